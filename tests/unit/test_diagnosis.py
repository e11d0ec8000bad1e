"""`kvorum doctor` names the cause that was planted, with its figures, and nothing where nothing is wrong."""

from __future__ import annotations

import pytest
from helpers_doctor import a_request, at_once, causes, chosen, findings, healthy, one_by_one

from cluster.evidence import Metrics, RequestRecord, StepRecord


def waiting(
    count: int, *, queue_s: float = 2.0, kv_usage: float = 0.2, **changes: object
) -> list[RequestRecord]:
    """Requests that came at once and waited in the engine's queue."""
    return [
        a_request(0.0, queue_s=queue_s, candidates=chosen(kv_usage=kv_usage), **changes) for _ in range(count)
    ]


def test_quick_requests_of_a_healthy_cluster_find_nothing() -> None:
    assert findings(one_by_one(10, prompt=20, prefill_s=0.03)) == []


def test_no_requests_and_no_replicas_find_nothing() -> None:
    assert findings([]) == []


def test_waiting_for_kv_space_says_how_many_requests_fit_and_how_much_more_is_needed() -> None:
    tiny = healthy(kv_tokens=1056, preemptions=3)
    [finding] = findings(waiting(12, kv_usage=0.95), tiny)
    assert (finding.cause, finding.symptom) == ("kv-space", "low throughput")
    assert "KV space for 1056 tokens, 4 of these requests of 264, and had 12 at once" in finding.figures
    assert "3 sequences were preempted" in finding.figures
    assert finding.change.startswith("--kv-cache-gib, 3.0 times as much")
    assert finding.cost_s == pytest.approx(2.0)


def test_preemptions_without_a_queue_are_a_matter_of_kv_space_too() -> None:
    tiny = healthy(kv_tokens=1056, preemptions=12)
    assert causes(findings(at_once(12, 0.0, computed=200, queue_s=0.0), tiny))[0] == "kv-space"


def test_many_requests_at_once_with_room_for_all_of_them_just_queue() -> None:
    [finding] = findings(waiting(24), healthy())
    assert finding.cause == "queue"
    assert "--replicas 1 -> 2" in finding.change
    assert finding.effect == "the wait of 2.00 s to about 1.00 s"


def test_time_held_in_the_router_counts_as_waiting_and_refusals_are_told() -> None:
    requests = [a_request(0.0, held_s=3.0, candidates=chosen()) for _ in range(6)]
    refused = Metrics({"kvorum_router_refused_total": [({"reason": "OVERLOADED"}, 4.0)]})
    [finding] = findings(requests, healthy(), metrics=refused)
    assert finding.cause == "queue"
    assert "3.00 s of it in the router" in finding.figures
    assert "4 were refused" in finding.figures


def test_a_full_batch_with_others_waiting_is_the_batching_limit() -> None:
    narrow = healthy(max_sequences=2)
    requests = [
        a_request(0.0, queue_s=1.216 * (number // 2), prefill_s=0.2, candidates=chosen())
        for number in range(12)
    ]
    finding = findings(requests, narrow)[0]
    assert finding.cause == "batching-limit"
    assert finding.change == "--max-num-seqs 2 -> 16"


def test_a_batch_with_room_for_all_is_no_limit() -> None:
    requests = [a_request(0.0, queue_s=1.0, prefill_s=0.2, candidates=chosen()) for _ in range(12)]
    assert "batching-limit" not in causes(findings(requests, healthy(max_sequences=13)))


def test_round_robin_past_warm_caches_is_told_with_the_hits_it_missed() -> None:
    requests = one_by_one(10, prompt=1000, prefill_s=1.0, policy="round-robin", candidates=chosen(0, 960))
    [finding] = findings(requests, healthy(), healthy("replica-1"))
    assert finding.cause == "cold-cache"
    assert finding.change == "--policy round-robin -> predicted-time"
    assert "9600 of 10000 computed prompt tokens were cached on another replica" in finding.figures
    assert finding.cost_s == pytest.approx(0.96)


def test_a_policy_that_knew_of_the_other_cache_had_its_reasons() -> None:
    requests = one_by_one(10, prompt=1000, prefill_s=1.0, candidates=chosen(0, 960))
    assert "cold-cache" not in causes(findings(requests))


def test_a_replica_that_takes_longer_for_the_same_work_is_named() -> None:
    quick = one_by_one(6, replica="replica-0")
    slow = one_by_one(6, replica="replica-1", prefill_s=0.6, decode_s=3.0)
    finding = findings([*quick, *slow], healthy(), healthy("replica-1"))[0]
    assert finding.cause == "slow-replica"
    assert finding.figures.startswith("replica-1 takes 3.0 times as long")
    assert "replica-1" in finding.change


def test_a_replica_with_more_to_do_at_a_time_is_not_called_slow() -> None:
    alone = one_by_one(8, replica="replica-0", prefill_s=0.02, prompt=20)
    crowded = at_once(16, 0.0, replica="replica-1", prompt=20)
    assert "slow-replica" not in causes(findings([*alone, *crowded], healthy(), healthy("replica-1")))


def test_a_slow_link_without_overlap_says_to_switch_overlap_on() -> None:
    shards = healthy(overlap="off", collective="gloo", exposed=0.5)
    steps = [StepRecord(tokens=512, forward_s=1.0, exposed_s=0.6)] * 4
    finding = findings(one_by_one(6, prompt=1000, prefill_s=2.0), shards, steps=steps)[0]
    assert finding.cause == "exposed-communication"
    assert finding.change.startswith("--overlap off -> auto")
    assert "60% of prefill steps" in finding.figures
    assert finding.effect.startswith("at most 0.80 s")


def test_a_slow_link_with_overlap_is_a_matter_of_the_link() -> None:
    shards = healthy(overlap="auto", collective="gloo", exposed=0.4)
    finding = findings(one_by_one(6), shards)[0]
    assert finding.cause == "exposed-communication"
    assert "--placement pack" in finding.change


def test_a_batch_beyond_what_adds_throughput_is_told_with_a_smaller_one() -> None:
    requests = [*at_once(1, 0.0), *at_once(8, 100.0), *at_once(64, 200.0)]
    finding = findings(requests, healthy(max_sequences=128))[0]
    assert finding.cause == "batch-too-large"
    assert finding.change == "--max-num-seqs 128 -> 30"
    assert "throughput x 0.8" in finding.effect


def test_no_batch_is_advised_that_is_smaller_than_any_that_was_seen() -> None:
    requests = [*at_once(48, 0.0), *at_once(80, 100.0), *at_once(120, 200.0)]
    finding = findings(requests, healthy(max_sequences=128))[0]
    assert finding.change == "--max-num-seqs 128 -> 48"


def test_times_that_follow_the_context_are_a_matter_of_kv_bandwidth() -> None:
    requests = []
    for number, prompt in enumerate((100, 100, 2000, 8000) * 4):
        held = prompt + 32
        requests.append(
            a_request(100.0 * number, prompt=prompt, cached=prompt - 16, prefill_s=0.02,
                      decode_s=63 * (0.01 + held * 1e-5))
        )  # fmt: skip
    for number in range(4):  # the same number of sequences with short prompts takes hardly longer
        requests += [
            a_request(5000.0 + 100 * number, prompt=100, cached=84, prefill_s=0.02,
                      decode_s=63 * (0.01 + 4 * 132 * 1e-5))
            for _ in range(4)
        ]  # fmt: skip
    assert "kv-bandwidth" in causes(findings(requests))


def test_streams_that_pause_for_other_prompts_are_told_how_long() -> None:
    requests = one_by_one(8, prompt=20, prefill_s=0.02)
    for number in range(8):
        start = 1000.0 + 100 * number
        requests.append(a_request(start, prompt=20, prefill_s=0.02, decode_s=63 * 0.016 + 2.0))
        requests.append(a_request(start + 0.5, prompt=2000, prefill_s=2.0, output=1, decode_s=0.0))
    finding = next(f for f in findings(requests) if f.cause == "prefills-delay-decodes")
    assert "a step of up to 512 tokens" in finding.figures
    assert "--max-num-batched-tokens 512 -> 128" in finding.change


def test_long_prompts_that_nobody_has_cached_are_named_when_nothing_else_is_wrong() -> None:
    [finding] = findings(one_by_one(6, prompt=2000, prefill_s=2.0))
    assert finding.cause == "prefill"
    assert "1.00 ms each" in finding.figures


def test_prompts_too_short_to_say_what_a_token_takes_are_no_finding() -> None:
    assert findings(one_by_one(6, prompt=20, prefill_s=1.0)) == []


def test_a_replica_that_is_down_comes_first_with_its_last_words() -> None:
    down = healthy("replica-1", state="failed", last_error="shard 0 was killed")
    found = findings(waiting(24), healthy(), down)
    assert causes(found)[0] == "replica-down"
    assert "replica-1 is failed: shard 0 was killed" in found[0].figures


def test_failing_requests_are_counted_by_their_reason_and_cancelled_ones_are_not() -> None:
    lost = [a_request(0.0, error="REPLICA_LOST") for _ in range(2)]
    left = [a_request(0.0, error="cancelled") for _ in range(5)]
    [finding] = findings([*one_by_one(10, prompt=20, prefill_s=0.03), *lost, *left])
    assert finding.cause == "failing-requests"
    assert finding.figures == "2 of 17 traced requests failed or were refused: 2 REPLICA_LOST"


def test_failures_of_which_all_but_few_successes_are_traced_are_not_many() -> None:
    lost = [a_request(0.0, error="REPLICA_LOST") for _ in range(2)]
    counted = Metrics(
        {"kvorum_router_requests_total": [({"outcome": "ok"}, 998.0), ({"outcome": "error"}, 2.0)]}
    )
    assert findings([*one_by_one(2, prompt=20, prefill_s=0.03), *lost], metrics=counted) == []


def test_the_costliest_cause_comes_first() -> None:
    requests = waiting(12, queue_s=3.0, policy="round-robin", prompt=1000, prefill_s=1.0)
    missed = [
        a_request(
            0.0, queue_s=3.0, policy="round-robin", prompt=1000, prefill_s=4.0, candidates=chosen(0, 960)
        )
        for _ in range(12)
    ]
    found = findings([*requests, *missed])
    assert causes(found)[:2] == ["queue", "cold-cache"]
    assert found[0].cost_s > found[1].cost_s
