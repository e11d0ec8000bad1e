"""Requests go to where their prefix is cached, as the replicas themselves say: over real gRPC."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from fakes_cluster import FakeReplica, Script
from fakes_router import Stack, assert_nothing_leaked, collected, eventually, running_stack, warmed

from protos.replica_pb2 import ReplicaUpdate

PROMPT = [7, *range(100, 499)]
USABLE = 384  # of its 400 tokens; the last block must be computed again
BLOCKS = 25


async def known(stack: Stack, replica: FakeReplica, blocks: int) -> None:
    await eventually(lambda: stack.view(replica.name).blocks == blocks)


async def chosen(stack: Stack, tokens: list[int], **options: Any) -> tuple[str, int]:
    """Where a request would go, and how much is cached there."""
    found = await stack.client.explain(tokens, **options)
    return found.chosen, next(c.cached_tokens for c in found.candidates if c.replica == found.chosen)


async def test_prompt_goes_to_the_replica_that_has_its_prefix_and_is_told_so() -> None:
    async with running_stack(replicas=4) as stack:
        warm = stack.replicas[2]
        warmed(warm, PROMPT)
        await known(stack, warm, BLOCKS)
        for _ in range(3):
            await collected(stack.client, [*PROMPT, 5], max_tokens=1)
        assert [seen.request.expected_cached_tokens for seen in warm.seen] == [USABLE + 16] * 3


async def test_longest_prefix_wins_however_the_shorter_ones_are_spread() -> None:
    async with running_stack(replicas=3) as stack:
        for replica, length in zip(stack.replicas, (80, 320, 160), strict=True):
            warmed(replica, PROMPT[:length])
        await eventually(lambda: [stack.view(f"r{i}").blocks for i in range(3)] == [5, 20, 10])
        assert await chosen(stack, PROMPT) == ("r1", 320)


async def test_evicted_blocks_stop_attracting_requests() -> None:
    async with running_stack(replicas=2) as stack:
        first, second = stack.replicas
        keys = warmed(first, PROMPT)
        warmed(second, PROMPT[:160])
        await known(stack, first, BLOCKS)
        await known(stack, second, 10)
        assert await chosen(stack, PROMPT) == ("r0", USABLE)
        first.blocks = first.blocks - keys
        first.push()
        await known(stack, first, 0)
        assert await chosen(stack, PROMPT) == ("r1", 160)


async def test_hole_in_the_chain_ends_the_prefix() -> None:
    async with running_stack() as stack:
        (replica,) = stack.replicas
        keys = warmed(replica, PROMPT) - warmed(replica, PROMPT[:32])
        keys |= warmed(replica, PROMPT[:16])
        replica.blocks = keys
        replica.push()
        await known(stack, replica, BLOCKS - 1)
        assert await chosen(stack, PROMPT) == ("r0", 16)


async def test_restarted_engine_is_forgotten_before_it_is_routed_to() -> None:
    async with running_stack() as stack:
        (replica,) = stack.replicas
        warmed(replica, PROMPT)
        await known(stack, replica, BLOCKS)
        replica.blocks = set()
        await replica.restart()
        (message,) = await collected(stack.client, PROMPT, max_tokens=1, timeout=20)
        assert message.served.epoch == replica.epoch
        assert replica.seen[-1].request.expected_cached_tokens == 0
        assert len(stack.group.fleet.index) == 0


async def test_engine_restarted_in_place_is_forgotten_although_its_connection_never_broke() -> None:
    async with running_stack() as stack:
        (replica,) = stack.replicas
        warmed(replica, PROMPT)
        await known(stack, replica, BLOCKS)
        replica.blocks, replica.epoch = set(), "fresh"
        replica.push()
        await eventually(lambda: stack.view("r0").epoch == "fresh")
        assert len(stack.group.fleet.index) == 0
        assert len(stack.group.fleet) == 1
        (message,) = await collected(stack.client, PROMPT, max_tokens=1)
        assert (message.served.epoch, replica.seen[-1].request.expected_cached_tokens) == ("fresh", 0)


async def test_block_size_that_is_known_late_turns_prefix_routing_on() -> None:
    async with running_stack(extra=[FakeReplica("late")], replicas=0) as stack:
        (replica,) = stack.replicas
        replica.block_size = 0
        await replica.restart()
        await eventually(lambda: stack.view("late").epoch == replica.epoch)
        assert (await chosen(stack, PROMPT))[1] == 0
        replica.block_size = 16
        warmed(replica, PROMPT)
        await known(stack, replica, BLOCKS)
        assert await chosen(stack, PROMPT) == ("late", USABLE)
        assert stack.view("late").views_dropped == 0


async def test_blocks_of_another_size_get_no_credit_and_the_replica_says_why() -> None:
    odd = FakeReplica("odd")
    odd.block_size = 32
    async with running_stack(replicas=2, extra=[odd]) as stack:
        warmed(odd, PROMPT)
        warmed(stack.replicas[0], PROMPT[:160])
        await known(stack, stack.replicas[0], 10)
        await eventually(lambda: "32 tokens" in stack.view("odd").degraded)
        assert stack.view("odd").blocks == 0
        assert await chosen(stack, PROMPT) == ("r0", 160)
        found = await stack.client.explain(PROMPT)
        assert found.block_size == 16
        assert ["32 tokens" in c.degraded for c in found.candidates] == [True, False, False]


async def test_cluster_that_changes_its_block_size_is_read_anew() -> None:
    async with running_stack(replicas=3) as stack:
        for replica in stack.replicas:
            warmed(replica, PROMPT)
        await eventually(lambda: all(stack.view(r.name).blocks == BLOCKS for r in stack.replicas))
        for replica in stack.replicas:  # one after another, as in a rolling restart
            replica.block_size, replica.blocks = 32, set()
            warmed(replica, PROMPT)
            await replica.restart()
            await eventually(lambda replica=replica: stack.view(replica.name).epoch == replica.epoch)  # type: ignore[misc]
        await eventually(lambda: all(stack.view(r.name).degraded == "" for r in stack.replicas))
        await eventually(lambda: all(stack.view(r.name).blocks == 12 for r in stack.replicas))
        assert (await chosen(stack, PROMPT))[1] == 384


async def test_index_holds_what_is_held_after_churn_and_nothing_when_all_have_left() -> None:
    rng = random.Random(5)
    async with running_stack(replicas=3) as stack:
        index = stack.group.fleet.index
        empty = index.nbytes
        for _ in range(10):
            for replica in stack.replicas:
                replica.blocks = {rng.randrange(1, 1 << 64) for _ in range(3000)}
                replica.push()
            await asyncio.sleep(0.01)
        for replica in stack.replicas:
            replica.blocks = {1, 2, 3}
            replica.push()
        await eventually(lambda: len(index) == 3)
        assert all(stack.view(replica.name).views_dropped == 0 for replica in stack.replicas)
        await stack.controller.announce(stack.replicas[0].member())
        await eventually(lambda: len(stack.group.fleet) == 1)
        # Eventually: on a busy machine even a fake replica is silent for 10 heartbeats at times.
        await eventually(lambda: (len(index), sum(index.blocks(row) for row in range(3))) == (3, 3))
        await stack.controller.announce()
        await eventually(lambda: len(index) == 0)
        assert index.nbytes <= 2 * empty + 4096


async def test_salted_prompts_and_other_adapters_share_no_blocks() -> None:
    async with running_stack() as stack:
        (replica,) = stack.replicas
        warmed(replica, PROMPT)
        warmed(replica, PROMPT[:160], cache_salt="ours")
        warmed(replica, PROMPT[:80], lora="poet")
        await known(stack, replica, BLOCKS + 10 + 5)
        found = {
            str(options): (await chosen(stack, PROMPT, **options))[1]
            for options in (
                {},
                {"cache_salt": "ours"},
                {"cache_salt": "theirs"},
                {"lora": "poet"},
                {"lora": "poet", "cache_salt": "ours"},
            )
        }
        assert list(found.values()) == [USABLE, 160, 0, 80, 0]


async def test_salted_prompt_in_flight_gives_no_credit_to_others() -> None:
    async with running_stack(script=Script(hang_after=0)) as stack:
        (replica,) = stack.replicas
        running = asyncio.ensure_future(collected(stack.client, PROMPT, cache_salt="ours"))
        await eventually(lambda: bool(replica.seen))
        pending = {
            salt: (await stack.client.explain(PROMPT, cache_salt=salt)).candidates[0].pending_tokens
            for salt in ("ours", "theirs", "")
        }
        assert pending == {"ours": USABLE, "theirs": 0, "": 0}
        running.cancel()
        await assert_nothing_leaked(stack.server)


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("system", "user", "assistant")
    return [{"role": roles[min(i, 1 + i % 2)], "content": text} for i, text in enumerate(contents)]


async def test_chats_are_matched_over_the_whole_template_not_by_their_first_message() -> None:
    def words(seed: int, count: int) -> str:
        rng = random.Random(seed)
        return " ".join("x" * rng.randrange(1, 40) for _ in range(count))

    system = words(1, 60)
    first, second = chat(system, words(2, 150)), chat(system, words(3, 150))
    async with running_stack(replicas=2) as stack:
        for replica, messages in zip(stack.replicas, (first, second), strict=True):
            tokens = (await stack.client.tokenize(messages=messages)).ids
            warmed(replica, list(tokens))
        await eventually(lambda: all(stack.view(r.name).blocks >= 13 for r in stack.replicas))
        for messages, name in ((first, "r0"), (second, "r1")):
            found = await stack.client.explain(messages=[*messages, *chat("a", "b")[1:]])
            cached = {c.replica: c.cached_tokens for c in found.candidates}
            assert found.chosen == name
            assert cached[name] >= 208
            assert set(cached.values()) - {cached[name]} == {48}  # the system prompt they share


async def test_burst_of_siblings_joins_the_first_instead_of_scattering() -> None:
    gate = asyncio.Event()
    async with running_stack(replicas=4, script=Script(gate=gate)) as stack:
        running = [asyncio.ensure_future(collected(stack.client, PROMPT, max_tokens=1)) for _ in range(4)]
        await eventually(lambda: sum(len(replica.seen) for replica in stack.replicas) == 4)
        gate.set()
        await asyncio.gather(*running)
        seen = [seen for replica in stack.replicas for seen in replica.seen]
        assert sum(len(replica.seen) > 0 for replica in stack.replicas) == 1
        assert sorted(each.request.expected_cached_tokens for each in seen) == [0, USABLE, USABLE, USABLE]
        await assert_nothing_leaked(stack.server)


async def test_hot_prefix_spills_before_its_replica_is_drowned() -> None:
    gate = asyncio.Event()
    async with running_stack(replicas=4, script=Script(gate=gate)) as stack:
        warm = stack.replicas[0]
        warm.load.prefill_ms_per_token = 0.2
        warmed(warm, PROMPT)
        await known(stack, warm, BLOCKS)
        running = [
            asyncio.ensure_future(collected(stack.client, PROMPT, max_tokens=1, n=4)) for _ in range(80)
        ]
        await eventually(lambda: sum(len(replica.seen) for replica in stack.replicas) == 80)
        share = Counter({replica.name: len(replica.seen) for replica in stack.replicas})
        gate.set()
        await asyncio.gather(*running)
        assert share["r0"] == max(share.values())
        assert share["r0"] < 80
        await assert_nothing_leaked(stack.server)


async def test_prompts_go_behind_many_short_ones_rather_than_a_long_one_of_as_many_tokens() -> None:
    async with running_stack(replicas=2) as stack:
        for replica, pairs in zip(stack.replicas, (20_000**2 / 2, 100 * 200**2 / 2), strict=True):
            replica.load.prefill_backlog_tokens = 20_000
            replica.load.prefill_backlog_pairs = pairs
            replica.push()
        await eventually(lambda: bool(stack.group.fleet.column("reported_pairs")[:2].all()))
        assert (await stack.client.explain(PROMPT)).chosen == "r1"


async def test_request_holds_the_pairs_of_what_it_has_to_compute_until_its_first_token() -> None:
    gate = asyncio.Event()
    async with running_stack(script=Script(gate=gate)) as stack:
        (replica,) = stack.replicas
        warmed(replica, PROMPT[:160])
        await known(stack, replica, 10)
        running = asyncio.ensure_future(collected(stack.client, PROMPT, max_tokens=1))
        await eventually(lambda: len(replica.seen) == 1)
        (held,) = stack.group.leases.held().values()
        assert (held.prefill_tokens, held.prefill_pairs) == (240, 240 * (160 + 120))
        assert float(stack.group.fleet.column("leased_pairs")[0]) == held.prefill_pairs
        gate.set()
        await running
        assert not stack.group.fleet.column("leased_pairs").any()
        await assert_nothing_leaked(stack.server)


async def test_session_returns_to_its_replica_and_leaves_it_when_it_is_busy() -> None:
    async with running_stack(replicas=4) as stack:
        for _ in range(6):
            await collected(stack.client, [1, 2, 3], max_tokens=1, session="s")
        (home,) = [replica for replica in stack.replicas if replica.seen]
        assert len(home.seen) == 6
        home.load.prefill_backlog_tokens = 5_000
        home.push()
        await eventually(lambda: float(stack.group.fleet.column("reported_backlog").max()) == 5_000)
        found = await stack.client.explain([1, 2, 3], session="s")
        assert found.chosen != home.name


async def test_update_that_is_repeated_after_a_removal_cannot_bring_blocks_back() -> None:
    async with running_stack() as stack:
        (replica,) = stack.replicas
        sent: list[ReplicaUpdate] = []

        def record(update: ReplicaUpdate) -> None:
            kept = ReplicaUpdate()
            kept.CopyFrom(update)
            sent.append(kept)

        replica.edit_update = record
        keys = warmed(replica, PROMPT)
        await known(stack, replica, BLOCKS)
        replica.blocks = replica.blocks - keys
        replica.push()
        await known(stack, replica, 0)
        (storing,) = [update for update in sent if any(change.stored for change in update.blocks)]

        def replay(update: ReplicaUpdate) -> None:
            if not update.HasField("snapshot"):
                replica.edit_update = lambda update: None
                del update.blocks[:]
                update.blocks.extend(storing.blocks)

        replica.edit_update = replay
        replica.push()
        await eventually(lambda: stack.view("r0").views_dropped == 1)
        await eventually(lambda: stack.view("r0").degraded == "")
        assert (stack.view("r0").blocks, await chosen(stack, PROMPT)) == (0, ("r0", 0))
