"""Block keys: the properties that router and replicas rely on, and the vectors that pin the scheme."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protos import blockkeys
from router.blockhash import prompt_keys

VECTORS = Path(blockkeys.__file__).with_name("blockkeys_vectors.json")
ROOT = blockkeys.root("revision")

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=200)
block_sizes = st.sampled_from([1, 2, 3, 5, 8, 16, 17])
parents = st.integers(1, 2**64 - 1)
texts = st.text(max_size=6)


def array(tokens: list[int]) -> npt.NDArray[np.int32]:
    return np.array(tokens, np.int32)


def one_by_one(tokens: list[int], block_size: int, parent: int) -> list[int]:
    """The scheme as its docstring writes it, a block at a time."""
    mask = 2**64 - 1
    state, found = blockkeys._unmix(parent), []
    weights = []
    for j in range(1, (block_size + 1) // 2 + 1):
        weights.append(mix(j * 0x9E3779B97F4A7C15 & mask) | 1)
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        block = [*tokens[start : start + block_size], *[0] * (block_size % 2)]
        total = block_size * 0xA0761D6478BD642F
        for low, high, weight in zip(block[0::2], block[1::2], weights, strict=True):
            x = (low | high << 32) * 0xE7037ED1A0B428DB & mask
            total += (x ^ x >> 32) * weight
        state = (state * 0xD1342543DE82EF95 + total) & mask
        found.append(mix(state))
    return found


def mix(x: int) -> int:
    mask = 2**64 - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


@settings(deadline=None)
@given(token_ids, block_sizes, parents)
def test_keys_are_the_documented_recurrence(tokens: list[int], block_size: int, parent: int) -> None:
    assert blockkeys.keys(array(tokens), block_size, parent).tolist() == one_by_one(
        tokens, block_size, parent
    )


@settings(deadline=None)
@given(token_ids, token_ids, block_sizes, parents)
def test_chain_goes_on_from_any_blocks_key(
    first: list[int], second: list[int], block_size: int, parent: int
) -> None:
    first = first[: len(first) // block_size * block_size]
    whole = blockkeys.keys(array(first + second), block_size, parent)
    head = blockkeys.keys(array(first), block_size, parent)
    tail = blockkeys.keys(array(second), block_size, int(head[-1]) if len(head) else parent)
    assert whole.tolist() == head.tolist() + tail.tolist()


def test_chain_longer_than_one_table_of_powers_is_one_chain() -> None:
    tokens = np.arange(3 * 4096 + 5, dtype=np.int32)
    whole = blockkeys.keys(tokens, 1, ROOT)
    head = blockkeys.keys(tokens[:6000], 1, ROOT)
    assert whole.tolist() == head.tolist() + blockkeys.keys(tokens[6000:], 1, int(head[-1])).tolist()
    assert len(set(whole.tolist())) == len(tokens)


@settings(deadline=None)
@given(parents)
@example(1)
@example(2**64 - 1)
def test_state_is_recovered_from_a_key(key: int) -> None:
    state = np.array([blockkeys._unmix(key)], np.uint64)
    blockkeys._mix(state)
    assert int(state[0]) == key


def test_key_is_never_zero_and_the_chain_goes_on_after_the_block_that_would_be() -> None:
    tokens = np.arange(80, dtype=np.int32)
    hashes = blockkeys._block_hashes(blockkeys._words(tokens, 16), 16)
    # The parent whose state leads to state 0, and so to key 0, at the first block.
    state = np.array([-int(hashes[0]) * pow(0xD1342543DE82EF95, -1, 2**64) % 2**64], np.uint64)
    blockkeys._mix(state)
    parent = int(state[0])
    keys = blockkeys.keys(tokens, 16, parent)
    assert keys[0] == 1
    assert keys[1:].tolist() == blockkeys.keys(tokens[16:], 16, 1).tolist()


@settings(deadline=None)
@given(st.tuples(texts, texts, texts), st.tuples(texts, texts, texts))
@example(("a", "b", ""), ("ab", "", ""))
@example(("a", "", "b"), ("a", "b", ""))
@example(("", "a", ""), ("a", "", ""))
@example(("a\0", "b", ""), ("a", "\0b", ""))
@example(("\ud800", "", ""), ("?", "", ""))
def test_namespaces_share_no_keys(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    tokens = np.arange(64, dtype=np.int32)
    mine, theirs = (set(prompt_keys(tokens, 16, *names).tolist()) for names in (one, other))
    assert mine == theirs if one == other else not mine & theirs


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=8, max_size=8))
def test_order_of_tokens_in_a_block_matters(tokens: list[int]) -> None:
    orders = set(itertools.islice(itertools.permutations(tokens), 0, None, 997))
    assert len({int(blockkeys.keys(array(list(order)), 8, ROOT)[0]) for order in orders}) == len(orders)


def test_order_of_blocks_matters() -> None:
    blocks = np.arange(64, dtype=np.int32).reshape(4, 16)
    orders = list(itertools.permutations(range(4)))
    last = {int(blockkeys.keys(blocks[list(order)].reshape(-1), 16, ROOT)[-1]) for order in orders}
    assert len(last) == len(orders)


def test_any_bit_of_any_token_changes_its_key_and_all_after_it() -> None:
    tokens = np.zeros(48, np.int32)
    plain = blockkeys.keys(tokens, 16, ROOT)
    seen = {int(plain[1])}
    for place, bit in itertools.product(range(16, 32), range(31)):
        changed = tokens.copy()
        changed[place] = 1 << bit
        keys = blockkeys.keys(changed, 16, ROOT)
        assert keys[0] == plain[0]
        assert keys[2] != plain[2]
        seen.add(int(keys[1]))
    assert len(seen) == 16 * 31 + 1


def test_structured_prompts_do_not_collide() -> None:
    """Counting, constant and repeating prompts are where a weak hash shows."""
    seen: set[int] = set()
    count = 0
    for period, step in itertools.product((1, 2, 16, 17, 64), (0, 1, 16, 4096)):
        for offset in range(50):
            tokens = (offset + step * (np.arange(1024, dtype=np.int64) % period)).astype(np.int32)
            keys = blockkeys.keys(tokens, 16, blockkeys.root(f"{period} {step} {offset}"))
            seen.update(keys.tolist())
            count += len(keys)
    assert len(seen) == count


def test_block_size_is_part_of_a_key() -> None:
    tokens = np.zeros(16, np.int32)
    keys = [int(blockkeys.keys(tokens, size, ROOT)[0]) for size in range(1, 17)]
    assert len(set(keys)) == 16


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_integer_type_of_the_tokens_does_not_matter(dtype: type[np.integer]) -> None:
    tokens = np.arange(100)
    expected = blockkeys.keys(tokens, 16, ROOT).tolist()
    assert blockkeys.keys(tokens.astype(dtype), 16, ROOT).tolist() == expected
    every_other = np.repeat(tokens.astype(dtype), 2)[::2]
    assert blockkeys.keys(every_other, 16, ROOT).tolist() == expected


def test_partial_block_has_no_key() -> None:
    assert len(blockkeys.keys(np.arange(15), 16, ROOT)) == 0
    assert len(blockkeys.keys(np.arange(0), 16, ROOT)) == 0
    assert len(blockkeys.keys(np.arange(33), 16, ROOT)) == 2


@pytest.mark.parametrize(
    ("tokens", "block_size", "parent", "says"),
    [
        (np.arange(4), 0, 1, "block_size is 0"),
        (np.arange(4), -1, 1, "block_size is -1"),
        (np.arange(4), 1 << 40, 1, "block_size is"),
        (np.arange(4), 2, 0, "parent is 0"),
        (np.arange(4), 2, 1 << 64, "parent is"),
        (np.array([1, 2**31]), 2, 1, "token ids go from 1 to 2147483648"),
        (np.array([-1, 2], np.int64), 2, 1, "token ids go from -1"),
        (np.array([-1, 2], np.int32), 2, 1, "token ids go from -1"),
        (np.array([0.5, 1.0]), 2, 1, "integers in one dimension"),
        (np.zeros((2, 2), np.int32), 2, 1, "integers in one dimension"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_values(
    tokens: npt.NDArray[np.integer], block_size: int, parent: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        blockkeys.keys(tokens, block_size, parent)


def test_vectors_of_the_scheme_hold() -> None:
    """The same file for router and replicas: a change here is a new scheme, and needs a new SCHEME."""
    content = json.loads(VECTORS.read_text())
    assert content["scheme"] == blockkeys.SCHEME
    for case in content["cases"]:
        root = blockkeys.root(case["revision"], case["lora"], case["cache_salt"])
        assert root == int(case["root"], 16)
        tokens = array(case["tokens"])
        keys = [int(key, 16) for key in case["keys"]]
        assert blockkeys.keys(tokens, case["block_size"], root).tolist() == keys
        names = (case["revision"], case["lora"], case["cache_salt"])
        assert prompt_keys(tokens, case["block_size"], *names).tolist() == keys
