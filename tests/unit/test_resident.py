"""The resident set is what a request can really reuse, whatever the engine's events look like."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from fakes_kv import FakeBlockPool, removed, stored

from protos import blockkeys
from workers.journal import Journal
from workers.kv_messages import AllBlocksCleared, BlockStored, Event, decode
from workers.kv_order import InOrder
from workers.kvpool.pool_keys import Transitions
from workers.resident import DEVICE, HOST, ResidentBlocks

REVISION = "digest-of-the-weights"
A, B, C = list(range(4)), list(range(10, 14)), list(range(20, 24))


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def resident(journal: Journal) -> ResidentBlocks:
    return ResidentBlocks(REVISION, journal, max_blocks=10_000)


def keys_of(tokens: list[int], *, block_size: int = 4, lora: str = "", salt: str = "") -> set[int]:
    root = blockkeys.root(REVISION, lora, salt)
    return set(blockkeys.keys(np.array(tokens), block_size, root).tolist())


def held(resident: ResidentBlocks, tier: int = DEVICE) -> set[int]:
    return set(resident.keys(tier).tolist())


def test_blocks_get_the_keys_that_a_router_derives_from_the_tokens(resident: ResidentBlocks) -> None:
    first = stored(A + B)
    resident.apply([first, stored(C, parent=first.block_hashes[-1])])
    assert held(resident) == keys_of(A + B + C)
    assert resident.block_size == 4
    assert resident.prefix(resident.prompt_keys(np.array(A + B + C + A))) == 3


def test_the_pool_goes_on_where_the_engines_own_blocks_end(resident: ResidentBlocks) -> None:
    event = stored(A)
    resident.apply([event])
    keys = resident.prompt_keys(np.array(A + B + C + A))
    resident.pool.apply(Transitions(keys[1:3], []))
    assert resident.local_prefix(keys) == 3
    assert resident.local_prefix(keys, start=2) == 3
    assert (resident.tiers(), held(resident, HOST)) == ([DEVICE, HOST], set(keys[1:3]))
    assert resident.prefix(keys) == 1  # the engine's own
    resident.apply([removed(*event.block_hashes)])
    assert resident.local_prefix(keys) == 0
    resident.fail("no more events")
    assert held(resident, HOST) == set(keys[1:3])  # the pool's blocks are not told by events


def test_a_removed_block_is_gone_and_its_children_stay_but_cannot_be_reached(
    resident: ResidentBlocks,
) -> None:
    event = stored(A + B + C)
    resident.apply([event, removed(event.block_hashes[1])])
    assert held(resident) == keys_of(A + B + C) - {resident.prompt_keys(np.array(A + B))[1]}
    assert resident.prefix(resident.prompt_keys(np.array(A + B + C))) == 1


def test_a_block_with_two_copies_is_resident_until_both_are_removed(resident: ResidentBlocks) -> None:
    event = stored(A)
    resident.apply([event, event, removed(*event.block_hashes)])
    assert held(resident) == keys_of(A)
    resident.apply([removed(*event.block_hashes)])
    assert held(resident) == set()


def test_all_blocks_cleared_empties_every_tier(resident: ResidentBlocks) -> None:
    resident.apply([stored(A), stored(A, medium="CPU"), AllBlocksCleared()])
    assert held(resident) == held(resident, HOST) == set()
    resident.apply([stored(B)])
    assert held(resident) == keys_of(B)


def test_tiers_are_kept_apart_and_a_parent_may_be_in_another_tier(resident: ResidentBlocks) -> None:
    first = stored(A)
    child = stored(B, parent=first.block_hashes[0], medium="CPU")
    resident.apply([first, child, stored(A, medium="CPU"), removed(*first.block_hashes)])
    assert held(resident) == set()
    assert held(resident, HOST) == keys_of(A + B)


def test_the_same_tokens_under_another_salt_or_adapter_are_other_blocks(resident: ResidentBlocks) -> None:
    resident.apply([stored(A, salt="tenant"), stored(A, lora="poet"), stored(A, lora="poet", salt="tenant")])
    expected: list[Any] = [{"salt": "tenant"}, {"lora": "poet"}, {"lora": "poet", "salt": "tenant"}]
    assert held(resident) == set().union(*(keys_of(A, **names) for names in expected))
    assert not held(resident) & keys_of(A)


def test_an_unknown_parent_never_opens_into_the_unsalted_namespace(resident: ResidentBlocks) -> None:
    resident.apply([stored(A, parent=b"never seen"), stored(B, parent=b"nor this")])
    assert held(resident) == set()
    assert resident.counters.unknown_parents == 2


def test_a_salt_that_an_event_does_not_tell_is_not_taken_for_none(resident: ResidentBlocks) -> None:
    event = stored(A)
    event.extra_keys = None
    resident.apply([event])
    assert held(resident) == set()
    assert resident.counters.unkeyed == 1


@pytest.mark.parametrize("extra", [("an-image", 3), b"digest of embeddings", ["an-image", 0]])
def test_blocks_with_images_or_embeddings_are_not_keyed_nor_what_follows(
    resident: ResidentBlocks, extra: Any
) -> None:
    event = stored(A + B + C, extra=[None, (extra,), None])
    resident.apply([event, stored(A, parent=event.block_hashes[2])])
    assert held(resident) == keys_of(A)
    assert (resident.counters.unkeyed, resident.counters.unknown_parents) == (2, 1)


def test_hybrid_groups_do_not_double_count_nor_collide(resident: ResidentBlocks) -> None:
    """One event per KV group and the same hashes in each: a key counts when every full group has it."""
    window: dict[str, Any] = {"group": 1, "kind": "sliding_window"}
    full: dict[str, Any] = {"group": 2, "kind": "full_attention"}
    resident.apply([stored(A + B), stored(A + B, **window), stored(A + B, **full)])
    assert held(resident) == keys_of(A + B)
    hashes = stored(A + B).block_hashes
    resident.apply([removed(hashes[0], group=1)])  # out of the window: the prefix is as usable as before
    assert held(resident) == keys_of(A + B)
    resident.apply([removed(hashes[1], group=2)])
    assert held(resident) == keys_of(A)
    resident.apply([stored(B, parent=hashes[0], **full)])
    assert held(resident) == keys_of(A + B)


def test_a_window_group_that_speaks_first_does_not_publish(resident: ResidentBlocks) -> None:
    resident.apply([stored(A + B, 8, group=0, kind="mamba"), stored(A + B, group=1)])
    assert held(resident) == keys_of(A + B)
    assert resident.block_size == 4


def test_a_model_without_full_attention_publishes_what_all_groups_hold(resident: ResidentBlocks) -> None:
    one, two = (dict[str, Any](group=index, kind="sliding_window") for index in range(2))
    resident.apply([stored(A + B, **one), stored(A + B, **two), removed(stored(A).block_hashes[0], group=0)])
    assert held(resident) == keys_of(A + B) - keys_of(A)


def test_the_block_size_is_learned_from_events_and_relearned_when_larger(resident: ResidentBlocks) -> None:
    assert resident.block_size == 0
    assert resident.prompt_keys(np.array(A)) == []
    resident.apply([stored(A)])
    resident.apply([stored(A + B, 8)])
    assert resident.block_size == 8
    assert held(resident) == keys_of(A + B, block_size=8)
    assert resident.counters.relearned == 1


def test_a_partial_block_contradicts_nothing(resident: ResidentBlocks) -> None:
    """vLLM also publishes entries for a part of a block, under the hash of that shorter prefix."""
    resident.apply([stored(A + B, 8), stored(C, 4), stored(A, 4, parent=stored(A + B, 8).block_hashes[0])])
    assert held(resident) == keys_of(A + B, block_size=8)
    assert resident.counters.partial == 2


def test_one_hash_for_two_prefixes_is_a_contradiction_and_the_first_stays(resident: ResidentBlocks) -> None:
    first, second = stored(A), stored(B + C)
    second.block_hashes[0] = first.block_hashes[0]
    resident.apply([first, second])
    assert held(resident) == keys_of(A)
    assert resident.counters.contradictions == 1


@pytest.mark.parametrize("size", [0, -4, 3, 1 << 20])
def test_nonsense_sizes_are_counted_and_change_nothing(resident: ResidentBlocks, size: int) -> None:
    event = stored(B)
    event.block_size = size
    resident.apply([stored(A), event])
    assert held(resident) == keys_of(A)
    assert resident.counters.unkeyed == 1


def test_removals_of_unknown_blocks_are_ignored_and_counted(resident: ResidentBlocks) -> None:
    resident.apply([stored(A), removed(b"x", 5, group=3), removed(b"y"), removed(b"z", medium="TAPE")])
    assert held(resident) == keys_of(A)
    assert resident.counters.unknown_removals == 4


def test_events_cannot_grow_the_set_beyond_what_the_engine_can_hold(journal: Journal) -> None:
    resident = ResidentBlocks(REVISION, journal, max_blocks=3)
    resident.apply([stored([n] * 4) for n in range(10)])
    assert resident.blocks() == 3
    assert "more than its 3 blocks" in resident.degraded
    assert resident.can_mend


def test_lost_events_leave_an_underestimate_until_the_cache_is_known_to_be_empty(
    resident: ResidentBlocks,
) -> None:
    before = stored(A + B)
    resident.apply([before])
    resident.lost_events("3 batches are lost")
    assert held(resident) == set()
    assert resident.degraded == "3 batches are lost"
    resident.apply([stored(C, parent=before.block_hashes[-1]), stored(C), removed(*before.block_hashes)])
    assert held(resident) == keys_of(C)
    resident.apply([AllBlocksCleared()])
    assert resident.degraded == ""


def test_a_reset_empties_the_set_at_once_and_keeps_what_is_stored_after_it(resident: ResidentBlocks) -> None:
    """An idle engine publishes its reset only with the next step."""
    resident.apply([stored(A)])
    resident.reset_done(resident.resets)
    assert held(resident) == set()
    resident.apply([stored(B)])  # was on its way when the cache was reset
    assert held(resident) == set()
    resident.apply([AllBlocksCleared(), stored(C)])
    assert held(resident) == keys_of(C)


def test_a_reset_whose_event_came_before_its_answer_loses_nothing(resident: ResidentBlocks) -> None:
    before = resident.resets
    resident.apply([stored(A), AllBlocksCleared(), stored(B)])
    resident.reset_done(before)
    assert held(resident) == keys_of(B)
    resident.apply([stored(C)])
    assert held(resident) == keys_of(B) | keys_of(C)


def test_a_second_reset_is_not_taken_for_done_by_the_event_of_the_first(resident: ResidentBlocks) -> None:
    resident.reset_done(resident.resets)
    before = resident.resets
    resident.apply([AllBlocksCleared(), stored(A)])
    resident.reset_done(before)
    assert held(resident) == set()
    resident.apply([AllBlocksCleared(), stored(B)])
    assert held(resident) == keys_of(B)


def test_a_failed_subscription_publishes_nothing_and_says_so_for_good(resident: ResidentBlocks) -> None:
    resident.apply([stored(A)])
    resident.fail("the subscriber failed")
    assert held(resident) == set()
    resident.apply([AllBlocksCleared()])
    assert resident.degraded == "the subscriber failed"
    assert not resident.can_mend


@pytest.mark.parametrize("seed", range(5))
def test_under_any_traffic_the_set_predicts_exactly_what_a_request_will_reuse(seed: int) -> None:
    """Shared prefixes, salts, copies and evictions; the journal's changes rebuild the same set."""
    rng = random.Random(seed)
    pool, journal = FakeBlockPool(capacity=60, block_size=4), Journal()
    resident = ResidentBlocks(REVISION, journal)
    mirror: set[int] = set()
    families = [[rng.randrange(100) for _ in range(60)] for _ in range(4)]
    for step in range(400):
        family = rng.choice(families)
        prompt = family[: rng.randrange(1, 60)] + [rng.randrange(100) for _ in range(rng.randrange(12))]
        salt = rng.choice(["", "", "a", "b"])
        keys = resident.prompt_keys(np.array(prompt), salt=salt)
        usable = min(resident.prefix(keys), (len(prompt) - 1) // 4)
        assert usable == pool.cached_blocks(prompt, salt)
        resident.apply(pool.run(prompt, salt, duplicate=rng.random() < 0.1))
        assert resident.blocks() == pool.distinct()
        if step % 97 == 96:
            resident.apply(pool.reset())
        before = journal.position
        if journal.cut() > before:
            for change in journal.since(before) or ():
                mirror = set() if change.cleared else mirror - set(change.removed.tolist())
                mirror |= set(change.stored.tolist())
        assert mirror == held(resident)
    assert resident.counters.unknown_parents == resident.counters.contradictions == 0


def test_batches_are_applied_in_order_and_once() -> None:
    order = InOrder()
    assert order.take(0, b"0") == [b"0"]
    assert order.take(2, b"2") == []
    assert order.missing
    assert order.take(0, b"0") == order.take(2, b"2") == []
    assert order.take(1, b"1") == [b"1", b"2"]
    assert not order.missing
    assert order.next == 3


def test_a_replay_in_any_order_cannot_resurrect_a_removed_block(resident: ResidentBlocks) -> None:
    event = stored(A)
    batches: dict[int, list[Event]] = {0: [event], 1: [removed(*event.block_hashes)], 2: [stored(B)]}
    order = InOrder()
    for number in (0, 2, 1, 0, 1, 2, 0):  # live, a gap, then a replay that repeats and reorders
        for ready in order.take(number, bytes([number])):
            resident.apply(batches[ready[0]])
    assert held(resident) == keys_of(B)


def test_a_gap_that_cannot_be_filled_is_given_up_and_what_follows_is_ready() -> None:
    order = InOrder()
    order.take(3, b"3")
    order.take(4, b"4")
    assert order.give_up() == (3, [b"3", b"4"])
    assert order.take(1, b"1") == []


def test_an_unreadable_batch_is_an_error_and_not_a_guess() -> None:
    for payload in (b"", b"\xc1", b"\x93\xcb"):
        with pytest.raises(ValueError, match="unreadable batch"):
            decode(payload)


def test_unknown_fields_of_a_newer_engine_are_skipped() -> None:
    import msgspec

    wire = {"type": "BlockStored", "novel": 1, "block_hashes": [b"h"], "parent_block_hash": None}
    wire |= {"token_ids": [1], "block_size": 1, "session_id": "s"}
    (event,) = decode(msgspec.msgpack.encode([0.5, [wire], 0]))
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [b"h"]
