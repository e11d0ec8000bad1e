"""Who waits, who goes next, who is refused and what they are told."""

from __future__ import annotations

import itertools
from collections import defaultdict

import grpc
import pytest
from helpers_admission import assert_nothing_left, item
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import common_pb2
from protos.errors import KvorumError
from router.admission import AdmissionQueue, Item, ServiceClass

BATCH, INTERACTIVE = ServiceClass.BATCH, ServiceClass.INTERACTIVE


def offer_all(queue: AdmissionQueue, items: list[Item]) -> None:
    for each in items:
        assert queue.offer(each, 0.0) is None


def popped(queue: AdmissionQueue, count: int | None = None) -> list[Item]:
    items = iter(lambda: queue.pop(0.0), None)
    return list(items if count is None else itertools.islice(items, count))


def names(items: list[Item]) -> list[str]:
    return [each.payload for each in items]


# Order


def test_requests_of_one_tenant_go_in_order_of_arrival() -> None:
    queue = AdmissionQueue(8)
    offer_all(queue, [item(name=name, tokens=tokens) for name, tokens in (("a", 900), ("b", 1), ("c", 50))])
    assert names(popped(queue)) == ["a", "b", "c"]
    assert_nothing_left(queue)


def test_lower_priority_number_goes_first_within_a_tenant() -> None:
    queue = AdmissionQueue(8)
    offer_all(
        queue, [item(name="late", priority=5), item(name="b"), item(name="a", priority=-1), item(name="c")]
    )
    assert names(popped(queue)) == ["a", "b", "c", "late"]


def test_priority_of_one_tenant_does_not_pass_another_tenant() -> None:
    queue = AdmissionQueue(8)
    offer_all(
        queue, [item("x", name="x"), item("y", name="y1", priority=-9), item("y", name="y2", priority=-9)]
    )
    assert names(popped(queue, 2)) == ["x", "y1"]


def test_interactive_requests_go_before_batch_ones() -> None:
    queue = AdmissionQueue(8)
    offer_all(queue, [item(name="batch", kind=BATCH), item(name="a"), item(name="b")])
    assert names(popped(queue)) == ["a", "b", "batch"]


def test_peek_shows_what_pop_returns_and_changes_nothing() -> None:
    queue = AdmissionQueue(8)
    offer_all(queue, [item("x", 10, name="x"), item("y", 5, name="y"), item("z", 1, kind=BATCH, name="z")])
    while (head := queue.peek()) is not None:
        assert queue.peek() is head
        assert queue.pop(0.0) is head


def test_head_that_is_set_aside_keeps_its_turn() -> None:
    queue = AdmissionQueue(8)
    offer_all(queue, [item("x", 5, name="x1"), item("x", 5, name="x2"), item("y", 6, name="y1")])
    seen = []
    while (head := queue.peek()) is not None:
        seen.append(head.payload)
        queue.set_aside()
    assert sorted(seen) == ["x1", "x2", "y1"]
    assert len(queue) == 3
    queue.put_back()
    assert names(popped(queue)) == ["x1", "y1", "x2"]
    assert_nothing_left(queue)


def test_what_goes_past_a_head_set_aside_counts_for_its_tenant() -> None:
    queue = AdmissionQueue(8)
    offer_all(queue, [item("x", 10, name="x1"), item("x", 100, name="x2"), item("y", 105, name="y1")])
    queue.set_aside()
    assert names(popped(queue, 1)) == ["x2"]
    queue.put_back()
    assert names(popped(queue)) == ["y1", "x1"]


# Fairness


def tokens_by_tenant(items: list[Item]) -> dict[str, int]:
    served: dict[str, int] = defaultdict(int)
    for each in items:
        served[each.tenant] += each.tokens
    return served


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 500), st.integers(-1, 1)), min_size=1, max_size=12),
        min_size=2,
        max_size=5,
    ),
    st.randoms(use_true_random=False),
)
def test_tenants_with_backlog_get_tokens_within_one_largest_request_of_each_other(
    backlogs: list[list[tuple[int, int]]], rng: object
) -> None:
    queue = AdmissionQueue(1000)
    items = [item(str(t), tokens, priority=p) for t, work in enumerate(backlogs) for tokens, p in work]
    rng.shuffle(items)  # type: ignore[attr-defined]
    offer_all(queue, items)
    largest = max(each.tokens for each in items)
    left = {str(t): len(work) for t, work in enumerate(backlogs)}
    served = dict.fromkeys(left, 0)
    for each in iter(lambda: queue.pop(0.0), None):
        served[each.tenant] += each.tokens
        left[each.tenant] -= 1
        if left[each.tenant] == 0:  # it has no backlog any more
            del served[each.tenant]
        if served:
            assert max(served.values()) - min(served.values()) <= largest
    assert_nothing_left(queue)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 300), st.integers(0, 2)), min_size=5, max_size=80
    )
)
def test_over_any_interval_tenants_with_backlog_stay_within_two_largest_requests(
    arrivals: list[tuple[str, int, int]],
) -> None:
    """Tenants join at different times and leave; each pair is compared over every common backlog."""
    queue = AdmissionQueue(1000)
    waiting: dict[str, int] = defaultdict(int)
    since: dict[frozenset[str], dict[str, int]] = {}

    def release() -> None:
        each = queue.pop(0.0)
        if each is None:
            return
        waiting[each.tenant] -= 1
        for pair, served in list(since.items()):
            if each.tenant in pair:
                served[each.tenant] += each.tokens
                assert abs(served[min(pair)] - served[max(pair)]) < 2 * 300
                if waiting[each.tenant] == 0:
                    del since[pair]

    for tenant, tokens, releases in arrivals:
        queue.offer(item(tenant, tokens), 0.0)
        waiting[tenant] += 1
        for other in "abc":
            pair = frozenset((tenant, other))
            if other != tenant and waiting[other] and pair not in since:
                since[pair] = dict.fromkeys(pair, 0)
        for _ in range(releases):
            release()
    while len(queue):
        release()


def test_flood_of_one_tenant_does_not_starve_another() -> None:
    queue = AdmissionQueue(1000)
    offer_all(queue, [item("flood", 10, name="flood") for _ in range(500)])
    queue.offer(item("light", 400, name="light"), 0.0)
    before = 0
    while (each := queue.pop(0.0)) is not None and each.payload != "light":
        queue.offer(item("flood", 10, name="flood"), 0.0)
        before += each.tokens
    assert before <= 400 + 10


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=80),
    st.sampled_from([0.1, 0.3]),
)
def test_batch_requests_get_their_share_while_interactive_ones_never_end(
    sizes: list[tuple[int, int]], share: float
) -> None:
    queue = AdmissionQueue(1000, batch_share=share)
    served = {BATCH: 0, INTERACTIVE: 0}
    for interactive, batch in sizes:  # one of each waits before every release
        queue.offer(item("i", interactive), 0.0)
        queue.offer(item("b", batch, kind=BATCH), 0.0)
    for _ in sizes:
        each = queue.pop(0.0)
        assert each is not None
        served[each.service_class] += each.tokens
        owed = served[INTERACTIVE] * share / (1 - share)
        assert owed - 200 * (1 + share / (1 - share)) <= served[BATCH] <= owed


# Bounds and refusals


def refusal(queue: AdmissionQueue, each: Item, now: float = 0.0, **facts: float) -> KvorumError:
    with pytest.raises(KvorumError) as refused:
        queue.offer(each, now, **facts)  # type: ignore[arg-type]
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.reason == common_pb2.OVERLOADED
    return refused.value


def test_full_queue_refuses_and_says_when_it_will_have_drained() -> None:
    queue = AdmissionQueue(2)
    offer_all(queue, [item(tokens=300), item(tokens=500)])
    error = refusal(queue, item(), predicted_tokens_per_s=100.0)
    assert error.retry_after_s == pytest.approx(8.0)
    assert "2 requests wait" in error.message
    assert queue.totals["full"] == 1


def test_queue_of_no_places_refuses_everything() -> None:
    refusal(AdmissionQueue(0), item())
    refusal(AdmissionQueue(0), item(kind=BATCH))


@pytest.mark.parametrize(
    "settings",
    [{"max_queue": -1}, {"max_queue": 8, "batch_share": 0.0}, {"max_queue": 8, "batch_share": 1.0}],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        AdmissionQueue(**settings)  # type: ignore[arg-type]


def test_request_without_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        item(tokens=0)


def test_request_cannot_wait_twice() -> None:
    queue, each = AdmissionQueue(4), item()
    queue.offer(each, 0.0)
    with pytest.raises(ValueError, match="already"):
        queue.offer(each, 0.0)
    assert len(queue) == 1


def test_request_that_would_come_too_late_is_refused_at_once_with_the_wait_it_was_spared() -> None:
    queue = AdmissionQueue(100)
    offer_all(queue, [item(tokens=1000) for _ in range(10)])
    error = refusal(queue, item(deadline=5.0), predicted_tokens_per_s=1000.0)
    assert error.retry_after_s == pytest.approx(10.0)
    assert queue.totals["late"] == 1
    assert queue.offer(item(deadline=12.0), 0.0, predicted_tokens_per_s=1000.0) is None


def test_predicted_time_to_first_token_counts_against_the_deadline() -> None:
    queue = AdmissionQueue(100)
    error = refusal(queue, item(deadline=3.0), ttft_s=4.0)
    assert "4.00 s to the first token" in error.message
    assert queue.offer(item(deadline=5.0), 0.0, ttft_s=4.0) is None


def test_light_tenant_is_not_refused_for_the_backlog_of_another() -> None:
    queue = AdmissionQueue(100)
    offer_all(queue, [item("flood", 1000) for _ in range(50)])
    refusal(queue, item("flood", deadline=5.0), predicted_tokens_per_s=1000.0)
    assert queue.offer(item("light", 1000, deadline=5.0), 0.0, predicted_tokens_per_s=1000.0) is None


def test_nothing_is_predicted_from_an_unknown_rate() -> None:
    queue = AdmissionQueue(100)
    offer_all(queue, [item(tokens=10**6) for _ in range(10)])
    assert queue.predicted_drain_s() is None
    assert queue.offer(item(deadline=5.0), 0.0) is None


def test_while_nothing_can_serve_requests_may_wait_up_to_their_deadline() -> None:
    queue = AdmissionQueue(100)
    offer_all(queue, [item(tokens=10**6)])
    assert queue.offer(item(deadline=5.0), 0.0, predicted_tokens_per_s=1.0, stalled=True) is None


def test_requests_expire_shortly_before_their_deadline() -> None:
    queue = AdmissionQueue(100)
    short, long = item(deadline=2.0, name="short"), item(deadline=100.0, name="long")
    offer_all(queue, [long, short])
    assert short.answer_by == pytest.approx(1.8)
    assert long.answer_by == pytest.approx(99.5)
    assert queue.next_expiry() == short.answer_by
    assert queue.expire(1.7) == []
    assert queue.expire(1.8) == [short]
    assert queue.expire(99.6) == [long]
    assert queue.totals["expired"] == 2
    assert_nothing_left(queue)


def test_tenant_that_fills_the_queue_gives_way_to_one_that_does_not() -> None:
    queue = AdmissionQueue(4)
    offer_all(queue, [item("flood", name=str(n)) for n in range(4)])
    gone = [queue.offer(item("light"), 0.0), queue.offer(item("light"), 0.0)]
    assert names([each for each in gone if each]) == ["3", "2"]
    refusal(queue, item("light"))
    refusal(queue, item("flood"))
    assert len(queue) == 4
    assert queue.displaced_error(100.0).retry_after_s == pytest.approx(4.0)


def test_urgent_request_displaces_its_own_tenants_least_urgent_one() -> None:
    queue = AdmissionQueue(2)
    offer_all(queue, [item(name="b", priority=1), item(name="c", priority=1)])
    displaced = queue.offer(item(name="a", priority=0), 0.0)
    assert displaced is not None
    assert displaced.payload == "c"
    refusal(queue, item(priority=1))


def test_batch_requests_give_way_to_interactive_ones_but_keep_their_share_of_the_queue() -> None:
    queue = AdmissionQueue(10, batch_share=0.2)
    offer_all(queue, [item("b", kind=BATCH) for _ in range(10)])
    for _ in range(8):
        displaced = queue.offer(item("i"), 0.0)
        assert displaced is not None
        assert displaced.service_class is BATCH
    refusal(queue, item("i"))
    assert queue.lengths() == {INTERACTIVE: 8, BATCH: 2}


def test_batch_requests_get_into_a_queue_full_of_interactive_ones_up_to_their_share() -> None:
    queue = AdmissionQueue(10, batch_share=0.2)
    offer_all(queue, [item("i") for _ in range(10)])
    for _ in range(2):
        displaced = queue.offer(item("b", kind=BATCH), 0.0)
        assert displaced is not None
        assert displaced.service_class is INTERACTIVE
    refusal(queue, item("b", kind=BATCH))


def test_memory_follows_what_waits_and_not_what_has_come_and_gone() -> None:
    queue = AdmissionQueue(100)
    first = item("x", 10**6, deadline=50.0)
    queue.offer(first, 0.0)  # stays ahead of everything in the heap of deadlines
    for n in range(2000):
        urgent = item("x", 1 + n % 7, priority=-1)  # becomes the head of its tenant, and leaves
        queue.offer(urgent, 0.0)
        queue.remove(urgent, 0.0)
    assert len(queue._expiries) < 20
    assert len(queue._interactive._turns) < 20
    queue.remove(first, 0.0)
    assert_nothing_left(queue)


def test_oldest_wait_is_of_the_one_that_came_first() -> None:
    queue = AdmissionQueue(8)
    first = item("a", priority=9)
    queue.offer(first, 1.0)
    queue.offer(item("a"), 3.0)
    assert queue.oldest_wait_s(5.0) == 4.0
    queue.remove(first, 5.0)
    assert queue.oldest_wait_s(5.0) == 2.0
