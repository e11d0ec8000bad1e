"""The block index against the plainest model of it: a set of keys for each row and tier."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import keytable
from router.index import BlockIndex
from router.keytable import KeyTable

TIERS = 3
ROWS = (0, 1, 2, 63, 64, 130)


class NaiveIndex:
    """What `BlockIndex` means."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], set[int]] = {}

    def of(self, row: int, tier: int) -> set[int]:
        return self.held.setdefault((row, tier), set())

    def store(self, row: int, keys: list[int], tier: int) -> int:
        before = len(self.of(row, tier))
        self.of(row, tier).update(keys)
        return len(self.of(row, tier)) - before

    def remove(self, row: int, keys: list[int], tier: int) -> int:
        before = len(self.of(row, tier))
        self.of(row, tier).difference_update(keys)
        return before - len(self.of(row, tier))

    def clear(self, row: int, tier: int | None) -> None:
        for each in range(TIERS) if tier is None else (tier,):
            self.of(row, each).clear()

    def match(self, keys: list[int], rows: int) -> list[list[int]]:
        return [[self._depth(keys, row, tier) for row in range(rows)] for tier in range(TIERS)]

    def alone(self, keys: list[int], rows: int, tier: int) -> list[int]:
        held = [self.of(row, tier) for row in range(rows)]
        return [next((d for d, key in enumerate(keys) if key not in own), len(keys)) for own in held]

    def _depth(self, keys: list[int], row: int, tier: int) -> int:
        held = set().union(*(self.of(row, each) for each in range(tier + 1)))
        return next((depth for depth, key in enumerate(keys) if key not in held), len(keys))

    def distinct(self) -> int:
        return len(set().union(*self.held.values()))


def array(keys: list[int]) -> npt.NDArray[np.uint64]:
    """As they come from the wire: read-only."""
    return np.frombuffer(np.array(keys, np.uint64).tobytes(), np.uint64)


def chains(seed: int) -> list[list[int]]:
    """Prompts with shared beginnings, as keys; some short, some longer than the loop's limit."""
    rng = np.random.default_rng(seed)
    stem = rng.integers(1, 2**64, 150, np.uint64).tolist()
    return [
        stem[:cut] + rng.integers(1, 2**64, int(tail), np.uint64).tolist()
        for cut, tail in zip((0, 3, 60, 150, 150), rng.integers(0, 120, 5), strict=True)
    ]


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, int, int, int, int, int]]:
    """(what, row, tier, chain, from, to)."""
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from(["store", "store", "store", "remove", "clear", "clear all", "match"]),
                st.sampled_from(ROWS),
                st.integers(0, TIERS - 1),
                st.integers(0, 4),
                st.integers(0, 270),
                st.integers(0, 270),
            ),
            max_size=40,
        )
    )


@settings(deadline=None, max_examples=150)
@given(steps(), st.integers(0, 2**32))
def test_index_agrees_with_a_set_per_row_and_tier_after_any_steps(
    todo: list[tuple[str, int, int, int, int, int]], seed: int
) -> None:
    index, naive, prompts = BlockIndex(TIERS), NaiveIndex(), chains(seed)
    for what, row, tier, chain, start, end in todo:
        keys = prompts[chain][start:end] if start < end else prompts[chain][end:start][::-1]
        if what == "store":
            assert index.store(row, array(keys), tier) == naive.store(row, keys, tier)
        elif what == "remove":
            assert index.remove(row, array(keys), tier) == naive.remove(row, keys, tier)
        elif what.startswith("clear"):
            scope = None if what == "clear all" else tier
            index.clear(row, scope)
            naive.clear(row, scope)
        assert index.blocks(row, tier) == len(naive.of(row, tier))
        assert len(index) == naive.distinct()
        if what == "match":
            assert index.match(array(keys)).tolist() == naive.match(keys, index.rows)
    for prompt in prompts:
        assert index.match(array(prompt)).tolist() == naive.match(prompt, index.rows)
        alone = [naive.alone(prompt, index.rows, tier) for tier in range(TIERS)]
        assert index.match_alone(array(prompt), range(TIERS)).tolist() == alone
        assert index.match_alone(array(prompt), (2, 0)).tolist() == [alone[2], alone[0]]


def test_hole_in_the_chain_ends_the_prefix_until_it_is_filled() -> None:
    index, keys = BlockIndex(), array(chains(1)[3])
    index.store(0, keys)
    index.store(1, keys)
    index.remove(0, keys[70:71])
    assert index.match(keys)[0].tolist() == [70, len(keys)]
    index.store(0, keys[70:71])
    assert index.match(keys)[0].tolist() == [len(keys), len(keys)]


def test_blocks_of_slower_tiers_fill_the_gaps_of_faster_ones() -> None:
    index, keys = BlockIndex(), array(chains(2)[3])
    index.store(0, keys[:10], tier=0)
    index.store(0, keys[10:30], tier=1)
    index.store(0, keys[30:], tier=2)
    assert index.match(keys)[:, 0].tolist() == [10, 30, len(keys)]
    index.clear(0, tier=1)
    assert index.match(keys)[:, 0].tolist() == [10, 10, 10]


def test_replicas_with_the_same_blocks_share_their_memory() -> None:
    index, keys = BlockIndex(), np.arange(1, 50_001, dtype=np.uint64)
    index.store(0, keys)
    alone = index.nbytes
    for row in range(1, 64):
        index.store(row, keys)
    assert index.nbytes == alone
    assert len(index) == len(keys)


def test_dropped_replica_leaves_no_block_and_no_memory_behind() -> None:
    index = BlockIndex()
    empty = index.nbytes
    for row in range(8):
        index.store(row, np.arange(1 + row * 10_000, 20_001 + row * 10_000, dtype=np.uint64))
    full = index.nbytes
    for row in range(8):
        index.clear(row)
        assert index.blocks(row) == 0
    assert len(index) == 0
    assert index.nbytes < empty + 16 * 8 * 1024 < full


def test_memory_is_flat_under_churn_with_rows_dropped_and_used_again() -> None:
    """A small version of `make bench NAME=router ARGS=--soak`."""
    index, rng = BlockIndex(), np.random.default_rng(3)
    held: dict[int, list[npt.NDArray[np.uint64]]] = {row: [] for row in range(6)}
    sizes = []
    for step in range(3_000):
        row = int(rng.integers(6))
        keys = rng.integers(1, 2**64, int(rng.choice([1, 16, 128])), np.uint64)
        assert index.store(row, keys) == len(keys)
        held[row].append(keys)
        while len(held[row]) > 20:
            oldest = held[row].pop(0)
            assert index.remove(row, oldest) == len(oldest)
        if step % 250 == 0:
            index.clear(row)
            held[row] = []
        assert len(index) == sum(len(keys) for kept in held.values() for keys in kept)
        sizes.append(index.nbytes)
    assert max(sizes[500:]) <= 1.5 * max(sizes[:500])
    for kept in held.values():
        for keys in kept:
            assert index.match(keys)[0].max() == len(keys)


def test_million_blocks_take_less_than_100_mib() -> None:
    index, rng = BlockIndex(), np.random.default_rng(4)
    for row in range(50):
        index.store(row, rng.integers(1, 2**64, 20_000, np.uint64))
    assert len(index) == 1_000_000
    assert index.nbytes < 100 * 2**20


def test_blocks_stay_found_when_new_hash_functions_have_to_be_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keytable, "_MOVES", 4)  # moves of a key before it gives up; rare otherwise
    draw, drawn = KeyTable._draw, []

    def counted(table: KeyTable) -> None:
        drawn.append(table)
        draw(table)

    monkeypatch.setattr(KeyTable, "_draw", counted)
    index, rng = BlockIndex(), np.random.default_rng(5)
    keys = rng.integers(1, 2**64, 6_000, np.uint64)
    for start in range(0, 3_000, 16):
        assert index.store(0, keys[start : start + 16]) == 16
    assert index.store(1, keys[3_008:]) == len(keys) - 3_008
    assert len(drawn) > 1
    assert index.match(keys[:3_008])[0, 0] == 3_008
    assert index.match(keys[3_008:])[0, 1] == len(keys) - 3_008
    assert index.remove(0, keys) == 3_008
    assert len(index) == len(keys) - 3_008


def test_keys_of_one_pattern_are_as_good_as_random_ones() -> None:
    """A replica may publish numbers that are no hashes: they must not degrade the table."""
    for stride in (1, 2**20, 2**32, 2**40):
        index = BlockIndex()
        keys = np.arange(1, 20_001, dtype=np.uint64) * np.uint64(stride)
        assert index.store(0, keys) == len(keys)
        assert index.match(keys)[0, 0] == len(keys)
        assert index.nbytes < 4 * 2**20


def test_key_zero_is_no_block() -> None:
    index = BlockIndex()
    for size in (3, 100):
        keys = np.arange(size, dtype=np.uint64)
        assert index.store(0, keys) == size - 1
        assert index.match(keys)[0, 0] == 0
        assert index.match(keys[::-1])[0, 0] == size - 1
        assert index.remove(0, keys) == size - 1
        assert len(index) == 0
    keys = np.arange(1, 1025, dtype=np.uint64)
    index.store(0, keys[::-1])  # out of order, and the table full to the last number
    assert index.match(np.insert(keys, 1020, np.uint64(0)))[0, 0] == 1020
    assert index.match(np.append(np.arange(1, 1025, dtype=np.uint64), np.uint64(0)))[0, 0] == 1024


def test_row_that_stored_nothing_has_nothing() -> None:
    index = BlockIndex()
    assert index.match(array([1, 2])).shape == (3, 0)
    assert index.blocks(7) == 0
    assert index.remove(7, array([1])) == 0
    index.clear(7)
    index.store(2, array([]))
    assert index.match(array([])).tolist() == [[0] * 3] * 3


@pytest.mark.parametrize(("row", "tier"), [(-1, 0), (0, -1), (0, 3)])
def test_row_or_tier_that_cannot_be_is_refused(row: int, tier: int) -> None:
    index = BlockIndex()
    for act in (index.store, index.remove):
        with pytest.raises(ValueError, match=f"row {row}, tier {tier}"):
            act(row, array([1]), tier)
    with pytest.raises(ValueError, match=f"row {row}, tier {tier}"):
        index.clear(row, tier)
    with pytest.raises(ValueError, match=f"row {row}, tier {tier}"):
        index.blocks(row, tier)
