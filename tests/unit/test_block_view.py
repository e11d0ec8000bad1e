"""A replica's blocks as the router keeps them: exact, or none; and never more memory than the truth needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from fakes_cluster import FakeReplica, model_info, packed
from fakes_router import Stack, collected, eventually, running_stack, warmed
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import common_pb2, replica_pb2
from protos.replica_pb2 import DEVICE, HOST, BlockChange, ReplicaUpdate
from router.block_view import BlockView
from router.index import BlockIndex
from router.replica_view import DesyncError, ReplicaView

PROMPT = list(range(100, 300))


def changed(*changes: BlockChange, count: int | None = None, xor: int = 0) -> ReplicaUpdate:
    return ReplicaUpdate(blocks=changes, blocks_count=count, blocks_xor=xor)


def stored(*keys: int, tier: int = DEVICE) -> BlockChange:
    return BlockChange(tier=tier, stored=packed(set(keys)))  # type: ignore[arg-type]


def removed(*keys: int, tier: int = DEVICE) -> BlockChange:
    return BlockChange(tier=tier, removed=packed(set(keys)))  # type: ignore[arg-type]


def holding(*keys: int, most: int = 1000) -> tuple[BlockIndex, BlockView]:
    index = BlockIndex()
    view = BlockView(index, 0, most=most)
    view.apply(changed(stored(*keys)))
    return index, view


CONTRADICTIONS = {
    "stored twice": changed(stored(2)),
    "stored twice in one update": changed(stored(9), stored(9)),
    "stored twice in one list": changed(BlockChange(stored=packed({9}) * 2)),
    "removed though never stored": changed(removed(9)),
    "removed from another tier": changed(removed(2, tier=HOST)),
    "removed twice in one list": changed(BlockChange(removed=packed({2}) * 2)),
    "another number of blocks": changed(stored(9), count=3, xor=1 ^ 2 ^ 3 ^ 9),
    "other blocks": changed(stored(9), count=4, xor=1 ^ 2 ^ 3 ^ 8),
    "a negative number of blocks": changed(count=-1),
    "half a key": changed(BlockChange(stored=b"1234567")),
    "half a key removed": changed(BlockChange(removed=b"123456789")),
    "the key 0": changed(BlockChange(stored=bytes(8))),
    "an unknown tier": changed(stored(9, tier=7)),
    "a negative tier": changed(stored(9, tier=-1)),
    "more than it may have": changed(stored(*range(100, 1100))),
}


@pytest.mark.parametrize("update", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_blocks_that_contradict_what_is_held_are_all_forgotten(update: ReplicaUpdate) -> None:
    index, view = holding(1, 2, 3)
    with pytest.raises(DesyncError):
        view.apply(update)
    assert (view.count, len(index), index.blocks(0)) == (0, 0, 0)


def test_cleared_forgets_one_tier_and_what_comes_with_it_counts() -> None:
    index, view = holding(1, 2, 3)
    view.apply(changed(stored(1, 5, tier=HOST)))
    view.apply(changed(BlockChange(cleared=True, stored=packed({7})), count=3, xor=1 ^ 5 ^ 7))
    assert (index.blocks(0, DEVICE), index.blocks(0, HOST)) == (1, 2)


def test_snapshot_replaces_everything_before_it() -> None:
    index, view = holding(1, 2, 3)
    snapshot = changed(stored(3, 4), count=2, xor=3 ^ 4)
    snapshot.snapshot.replica = "r0"
    view.apply(snapshot)
    assert list(index.match(np.array([1], np.uint64))[0]) == [0]
    assert (view.count, len(index)) == (2, 2)


def test_blocks_are_compared_only_when_a_snapshot_in_parts_is_whole() -> None:
    _, view = holding(1)
    part = changed(stored(2), count=9, xor=9)
    part.blocks_more = True
    view.apply(part)
    view.apply(changed(stored(3), count=3, xor=1 ^ 2 ^ 3))
    assert view.count == 3


def test_full_replica_may_exchange_blocks() -> None:
    _, view = holding(1, 2, 3, most=3)
    view.apply(changed(BlockChange(removed=packed({1, 2}), stored=packed({4, 5})), count=3, xor=3 ^ 4 ^ 5))
    assert view.count == 3


def test_changes_of_one_replica_leave_the_blocks_of_another() -> None:
    index, view = holding(1, 2, 3)
    other = BlockView(index, 1, most=1000)
    other.apply(changed(stored(1, 2)))
    with pytest.raises(DesyncError):
        view.apply(changed(stored(2)))
    assert list(index.match(np.array([1, 2, 3], np.uint64))[0]) == [0, 2]


@given(st.lists(st.tuples(st.sampled_from([DEVICE, HOST]), st.integers(1, 12), st.booleans()), max_size=40))
@settings(max_examples=60, deadline=None)
def test_view_equals_the_replica_after_any_history(steps: list[tuple[int, int, bool]]) -> None:
    index = BlockIndex()
    view = BlockView(index, 0, most=1000)
    truth: dict[int, set[int]] = {DEVICE: set(), HOST: set()}
    for tier, key, clears in steps:
        held = truth[tier]
        change = BlockChange(tier=tier, cleared=clears and key == 12)  # type: ignore[arg-type]
        if change.cleared:
            held.clear()
        if key in held:
            change.removed = packed({key})
        else:
            change.stored = packed({key})
        held ^= {key}
        xor = 0
        for each in itertools.chain(*truth.values()):
            xor ^= each
        view.apply(changed(change, count=sum(map(len, truth.values())), xor=xor))
    assert [index.blocks(0, tier) for tier in truth] == [len(held) for held in truth.values()]
    assert len(index) == len(truth[DEVICE] | truth[HOST])


def test_index_gives_its_memory_back_after_churn() -> None:
    index, view = holding(1, most=100_000)
    small = index.nbytes
    generator = np.random.default_rng(1)
    for _ in range(8):
        keys = np.unique(generator.integers(1, 1 << 63, 20_000, np.uint64))
        view.apply(changed(BlockChange(stored=keys.tobytes())))
        view.apply(changed(BlockChange(removed=keys.tobytes())))
    assert view.count == 1
    assert index.nbytes <= 4 * small


def test_update_that_comes_twice_or_late_cannot_bring_a_block_back() -> None:
    view = ReplicaView()
    first = ReplicaUpdate(epoch="e1", seq=1, block_size=16, blocks=[stored(1)])
    first.snapshot.replica = "r0"
    second = ReplicaUpdate(epoch="e1", seq=2, block_size=16, blocks=[removed(1)])
    for late in (first, second):
        view.apply(first)
        view.apply(second)
        replayed = ReplicaUpdate()
        replayed.CopyFrom(late)
        replayed.ClearField("snapshot")
        with pytest.raises(DesyncError, match="seq"):
            view.apply(replayed)
        assert not view.synced


# Over gRPC

Edit = Callable[[ReplicaUpdate], None]


def nonsense(edit: Edit) -> Edit:
    """On every update after the snapshot."""

    def after_the_snapshot(update: ReplicaUpdate) -> None:
        if not update.HasField("snapshot"):
            edit(update)

    return after_the_snapshot


def seq_back(update: ReplicaUpdate) -> None:
    update.seq -= 1


def seq_gap(update: ReplicaUpdate) -> None:
    update.seq += 3


def other_epoch(update: ReplicaUpdate) -> None:
    update.epoch = "other"


def no_epoch(update: ReplicaUpdate) -> None:
    update.epoch = ""


def huge_epoch(update: ReplicaUpdate) -> None:
    update.epoch = "e" * 1_000_000


def negative_block_size(update: ReplicaUpdate) -> None:
    update.block_size = -16


def other_block_size(update: ReplicaUpdate) -> None:
    update.block_size += 1


def no_block_size(update: ReplicaUpdate) -> None:
    update.block_size = 0
    update.blocks.append(stored(9))


def half_a_key(update: ReplicaUpdate) -> None:
    update.blocks.append(BlockChange(stored=b"abc"))


def key_zero(update: ReplicaUpdate) -> None:
    update.blocks.append(BlockChange(stored=bytes(8)))


def unknown_tier(update: ReplicaUpdate) -> None:
    update.blocks.append(stored(9, tier=12))


def stored_twice(update: ReplicaUpdate) -> None:
    update.blocks.extend([stored(9), stored(9)])


def removed_unknown(update: ReplicaUpdate) -> None:
    update.blocks.append(removed(9))


def wrong_count(update: ReplicaUpdate) -> None:
    update.blocks_count += 1


def wrong_xor(update: ReplicaUpdate) -> None:
    update.blocks_xor ^= 1


def too_many(update: ReplicaUpdate) -> None:
    update.blocks.append(stored(*range(1, 5_000)))


NONSENSE: dict[str, tuple[Edit, str]] = {
    "seq goes back": (nonsense(seq_back), "seq"),
    "seq has a gap": (nonsense(seq_gap), "seq"),
    "epoch changes without a snapshot": (nonsense(other_epoch), "epoch"),
    "epoch is empty": (no_epoch, "epoch"),
    "epoch is a megabyte": (huge_epoch, "epoch"),
    "block size is negative": (negative_block_size, "block size"),
    "block size changes": (nonsense(other_block_size), "block size"),
    "blocks without a block size": (nonsense(no_block_size), "block size"),
    "half a key": (half_a_key, "8-byte"),
    "key 0": (key_zero, "0 is no block key"),
    "unknown tier": (unknown_tier, "tier"),
    "stored twice": (stored_twice, "resident already"),
    "removed though unknown": (removed_unknown, "not resident"),
    "wrong count": (wrong_count, "holds"),
    "wrong xor": (wrong_xor, "holds"),
    "more blocks than it may have": (too_many, "more than"),
}


@pytest.mark.parametrize(("edit", "why"), NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_is_dropped_counted_and_marked_and_harms_nobody_else(edit: Edit, why: str) -> None:
    liar = FakeReplica("liar")
    liar.edit_update = edit
    async with running_stack(extra=[liar], replicas=1, max_replica_blocks=1000) as stack:
        good = warmed(stack.replicas[0], PROMPT)
        warmed(liar, PROMPT)
        await eventually(lambda: stack.view("r0").blocks == len(good))
        await eventually(lambda: why in stack.view("liar").degraded)
        await eventually(lambda: stack.view("liar").views_dropped >= 2)
        assert len(stack.view("liar").degraded) < 1000
        assert (stack.view("r0").degraded, stack.view("r0").views_dropped) == ("", 0)
        assert len(stack.group.fleet.index) <= 2 * len(good)
        assert stack.view("liar").standing in ("ready", "suspect")
        await collected(stack.client, PROMPT, max_tokens=1)
        stack.replicas[0].draining = True
        stack.replicas[0].push()
        await eventually(lambda: stack.view("r0").standing == "out")
        await collected(stack.client, PROMPT, max_tokens=1)
        assert liar.seen


@pytest.mark.parametrize("field", ["key_scheme", "name", "revision", "tokenizer_digest"])
async def test_replica_of_another_model_or_scheme_is_counted_and_never_trusted(field: str) -> None:
    liar = FakeReplica("liar")

    def edit(update: ReplicaUpdate) -> None:
        if update.HasField("snapshot"):
            target = update.snapshot if field == "key_scheme" else update.snapshot.model
            setattr(target, field, "other")

    async with running_stack(extra=[liar]) as stack:
        good = warmed(stack.replicas[0], PROMPT)
        await eventually(lambda: stack.view("r0").blocks == len(good))
        liar.edit_update = edit
        warmed(liar, PROMPT)
        await liar.restart()
        await eventually(lambda: "other" in stack.view("liar").degraded)
        await eventually(lambda: liar.watchers > 0)
        assert stack.view("liar").views_dropped >= 1
        assert stack.view("liar").blocks == 0
        assert len(stack.group.fleet.index) == len(good)
        for _ in range(4):
            await collected(stack.client, PROMPT, max_tokens=1)
        assert len(stack.replicas[0].seen) == 4


async def test_ten_million_keys_are_refused_before_they_cost_memory() -> None:
    liar = FakeReplica("liar")
    keys = np.random.default_rng(3).integers(1, 1 << 63, 10_000_000, np.uint64)
    sent: list[int] = []

    def flood(update: ReplicaUpdate) -> None:
        part = keys[(update.seq - 1) * 250_000 : update.seq * 250_000]
        update.blocks.append(BlockChange(stored=part.tobytes()))
        update.blocks_more = True
        sent.append(len(part))
        liar.push()

    async with running_stack(extra=[liar], max_replica_blocks=400_000) as stack:
        good = warmed(stack.replicas[0], PROMPT)
        await eventually(lambda: stack.view("r0").blocks == len(good))
        liar.edit_update = flood
        await liar.restart()
        await eventually(lambda: stack.view("liar").views_dropped > 0)
        liar.edit_update = lambda update: None
        await eventually(lambda: stack.view("liar").degraded == "")
        assert sum(sent) < len(keys)
        assert len(stack.group.fleet.index) == len(good)
        assert stack.group.fleet.index.nbytes < 1 << 20


async def test_one_message_as_large_as_grpc_takes_is_refused_whole() -> None:
    liar = FakeReplica("liar")
    keys = np.random.default_rng(3).integers(1, 1 << 63, 4_000_000, np.uint64).tobytes()

    def flood(update: ReplicaUpdate) -> None:
        update.blocks.append(BlockChange(stored=keys))

    async with running_stack(extra=[liar], max_replica_blocks=1_000_000) as stack:
        liar.edit_update = flood
        liar.push()
        await eventually(lambda: stack.view("liar").views_dropped > 0)
        assert stack.group.fleet.index.nbytes < 1 << 20
        liar.edit_update = lambda update: None
        await eventually(lambda: stack.view("liar").degraded == "")


async def dropped_once(stack: Stack, replica: FakeReplica, edit: Edit) -> None:
    """The next update is edited, and no later one."""

    def once(update: ReplicaUpdate) -> None:
        if not update.HasField("snapshot"):
            replica.edit_update = lambda update: None
            edit(update)

    before = stack.view(replica.name).views_dropped
    replica.edit_update = once
    replica.push()
    await eventually(lambda: stack.view(replica.name).views_dropped == before + 1)


async def test_gap_drops_the_view_serves_meanwhile_and_a_fresh_snapshot_heals_it() -> None:
    async with running_stack() as stack:
        (replica,) = stack.replicas
        keys = warmed(replica, PROMPT)
        await eventually(lambda: stack.view("r0").blocks == len(keys))
        snapshots = replica.snapshots
        await dropped_once(stack, replica, seq_gap)
        replica.speaking.clear()  # the next snapshot does not come yet
        assert "seq" in stack.view("r0").degraded
        assert stack.view("r0").blocks == 0
        explained = await stack.client.explain(PROMPT)
        assert "seq" in explained.candidates[0].degraded
        assert explained.candidates[0].cached_tokens == 0
        await collected(stack.client, PROMPT, max_tokens=1)
        replica.speaking.set()
        await eventually(lambda: stack.view("r0").degraded == "")
        assert replica.snapshots == snapshots + 1
        assert stack.view("r0").blocks == len(keys)


async def test_replica_that_never_stops_lying_is_asked_less_and_less_often() -> None:
    liar = FakeReplica("liar")
    liar.edit_update = nonsense(seq_gap)
    async with running_stack(extra=[liar]) as stack:
        await eventually(lambda: stack.view("liar").views_dropped >= 4)
        link = next(link for link in stack.server.members.all_links() if link.replica == "liar")
        assert link._desyncs._next_s >= 0.1 * 2**4


async def test_cleared_cache_gets_no_more_credit_for_its_prefixes() -> None:
    async with running_stack(replicas=2) as stack:
        warm, _ = stack.replicas
        keys = warmed(warm, PROMPT)
        await eventually(lambda: stack.view("r0").blocks == len(keys))
        assert (await stack.client.explain(PROMPT)).chosen == "r0"

        def wiped(update: ReplicaUpdate) -> None:
            del update.blocks[:]
            update.blocks.append(BlockChange(cleared=True))
            update.blocks_count, update.blocks_xor = 0, 0

        warm.edit_update = wiped
        warm.push()
        await eventually(lambda: stack.view("r0").blocks == 0)
        assert (stack.view("r0").degraded, stack.view("r0").views_dropped) == ("", 0)
        found = await stack.client.explain(PROMPT)
        assert [candidate.cached_tokens for candidate in found.candidates] == [0, 0]


async def test_load_report_of_the_largest_numbers_does_not_break_anything() -> None:
    most = 2**31 - 1
    liar = FakeReplica("liar")
    liar.load = common_pb2.ReplicaLoad(
        running=most,
        waiting=most,
        sequences=most,
        kv_usage=float("inf"),
        prefill_backlog_tokens=2**63 - 1,
        prefill_ms_per_token=float("nan"),
        decode_step_ms=float("inf"),
        max_sequences=-5,
        max_batch_tokens=-1,
    )
    async with running_stack(extra=[liar]) as stack:
        found = await stack.client.explain(PROMPT)
        assert found.chosen == "r0"
        assert {candidate.replica for candidate in found.candidates} == {"r0", "liar"}
        await collected(stack.client, PROMPT, max_tokens=1)
        assert len(stack.replicas[0].seen) == 1


async def test_replica_cannot_ask_for_endless_patience_with_its_silence() -> None:
    liar = FakeReplica("liar", heartbeat_s=1e30)
    async with running_stack(extra=[liar]) as stack:
        link = next(link for link in stack.server.members.all_links() if link.replica == "liar")
        assert link._allowed_s() <= 3 * 60


async def test_model_info_of_the_replica_itself_is_what_requests_are_checked_against() -> None:
    async with running_stack(extra=[FakeReplica("r0", model=model_info(max_model_len=64))], replicas=0) as s:
        assert s.server.members.resolve("").max_model_len == 64


def test_tiers_of_the_protocol_are_those_of_the_index() -> None:
    assert BlockIndex().tiers == len(replica_pb2.Tier.values())
