"""Prompts in flight against the plain longest common prefix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import blockkeys
from router.inflight import InflightPrompts

BLOCK = 4
ROOT = blockkeys.root("revision")


def prompt(cut: int, tail: int, length: int) -> npt.NDArray[np.uint64]:
    """Keys of a prompt that leaves the common one after `cut` blocks."""
    tokens = np.concatenate((np.arange(cut * BLOCK), np.full(length * BLOCK, 100_000 + tail)))
    return blockkeys.keys(tokens, BLOCK, ROOT)


def common(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


prompts = st.builds(prompt, st.integers(0, 12), st.integers(0, 3), st.integers(0, 9))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), prompts, st.booleans()), max_size=24),
    prompts,
)
def test_match_is_the_longest_common_prefix_with_any_prompt_in_flight(
    sent: list[tuple[int, npt.NDArray[np.uint64], bool]], asked: npt.NDArray[np.uint64]
) -> None:
    inflight = InflightPrompts(per_row=100)
    handles = [inflight.add(row, keys) for row, keys, _ in sent]
    for handle, (_, _, ends) in zip(handles, sent, strict=True):
        if ends:
            inflight.discard(handle)
    expected: dict[int, int] = {}
    for row, keys, ends in sent:
        if not ends and common(keys, asked):
            expected[row] = max(expected.get(row, 0), common(keys, asked))
    assert inflight.match(asked) == expected
    assert len(inflight) == sum(not ends for _, _, ends in sent)


@settings(deadline=None)
@given(st.lists(prompts, max_size=24), prompts, st.integers(1, 4))
def test_bounded_match_never_claims_more_than_the_truth_and_sees_the_newest(
    sent: list[npt.NDArray[np.uint64]], asked: npt.NDArray[np.uint64], per_row: int
) -> None:
    inflight = InflightPrompts(per_row)
    for keys in sent:
        inflight.add(0, keys)
    found = inflight.match(asked).get(0, 0)
    assert found <= max((common(keys, asked) for keys in sent), default=0)
    related = [common(keys, asked) for keys in sent if common(keys, asked)]
    assert found == max(related[-per_row:], default=0)


def test_nothing_is_kept_once_every_prompt_has_ended() -> None:
    inflight = InflightPrompts()
    handles = [inflight.add(row, prompt(row, 0, 3)) for row in range(8)]
    for handle in handles:
        inflight.discard(handle)
        inflight.discard(handle)
    assert len(inflight) == 0
    assert inflight.match(prompt(4, 0, 3)) == {}
    assert not inflight._prompts


def test_prompt_shorter_than_a_block_is_counted_and_matches_nothing() -> None:
    inflight = InflightPrompts()
    empty = prompt(0, 0, 0)
    handle = inflight.add(3, empty)
    assert len(inflight) == 1
    assert inflight.match(empty) == {}
    inflight.discard(handle)
    assert len(inflight) == 0


def test_match_limit_of_zero_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        InflightPrompts(per_row=0)
