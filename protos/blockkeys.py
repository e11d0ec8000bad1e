"""Block keys: how a prefix of tokens is named, one definition for the router and for the replicas.

A key is a 64-bit number for one full block of tokens together with everything before it, so two prompts share
a key exactly when they share the whole prefix up to that block, in the same namespace (model revision, LoRA,
cache salt). The method, all arithmetic modulo 2^64:

    word_j  = token_2j | token_2j+1 << 32            (tokens as 32-bit numbers; an odd block ends with a 0)
    x_j     = word_j * A;  x_j ^= x_j >> 32          (A odd; every bit of a token reaches all bits of the sum)
    h       = block_size * C + sum_j x_j * B_j       (B_j odd numbers from SplitMix64)
    state_i = state_(i-1) * M + h_i                  (a linear recurrence: a cumulative sum solves it)
    key_i   = mix(state_i)                           (mix: the bijection that finishes SplitMix64)

The state is recovered from a parent's key by the inverse of `mix`, so a chain goes on from any block's key.
Key 0 is never made. Keys name blocks for routing: engines keep their own hashes, and a collision, chance
about 2^-64 for each pair of blocks, costs a wrong estimate and never a wrong answer. The constants are
public: do not use the keys where somebody gains by a collision.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

SCHEME: Final = "kvorum-blocks-1"
MAX_BLOCK_SIZE: Final = 1 << 16  # tokens

Keys = npt.NDArray[np.uint64]
_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_UNMIX_1: Final = pow(_MIX_1, -1, 1 << 64)
_UNMIX_2: Final = pow(_MIX_2, -1, 1 << 64)
_STEP: Final = 0xD1342543DE82EF95  # M: odd, 5 modulo 8
_SPREAD: Final = 0xE7037ED1A0B428DB  # A
_SIZE: Final = 0xA0761D6478BD642F  # C
_CHUNK: Final = 4096  # blocks solved at once; bounds the tables of powers


def _powers(base: int) -> Keys:
    """base^1 … base^_CHUNK."""
    return np.multiply.accumulate(np.full(_CHUNK, base, np.uint64))


_UP: Final = _powers(_STEP)
_DOWN: Final = _powers(pow(_STEP, -1, 1 << 64))
_U27, _U30, _U31, _U32 = (np.uint64(n) for n in (27, 30, 31, 32))
_M1, _M2 = np.uint64(_MIX_1), np.uint64(_MIX_2)


def root(revision: str, lora: str = "", cache_salt: str = "") -> int:
    """The parent of a prompt's first block in this namespace, never 0.

    The parts are hashed with their lengths, so no two namespaces run together ("a" + "b" and "ab" + "").
    """
    digest = hashlib.blake2b(digest_size=8, person=SCHEME.encode())
    for part in (revision, lora, cache_salt):
        # A lone surrogate has no UTF-8 form; it still names a namespace of its own.
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return int.from_bytes(digest.digest(), "little") or 1


def keys(tokens: npt.NDArray[np.integer], block_size: int, parent: int) -> Keys:
    """The keys of the full blocks of `tokens`, chained after `parent`.

    `tokens`: one-dimensional, any integer type, token ids in 0 … 2^31-1; `parent`: a root or a block's key.
    A last, partial block has no key. `keys(a + b, bs, p)` is `keys(a, bs, p)` followed by
    `keys(b, bs, keys(a, bs, p)[-1])` when `len(a)` is a multiple of `bs`.
    ValueError: a block size outside 1 … 65536, a parent outside 1 … 2^64-1, an array that holds no token ids.
    """
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size is {block_size}: must be 1 to {MAX_BLOCK_SIZE} tokens")
    if not 1 <= parent <= _MASK:
        raise ValueError(f"parent is {parent}: must be a block key or a root, 1 to 2^64-1")
    words = _words(tokens, block_size)
    out = np.empty(len(words), np.uint64)
    state = _unmix(parent)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        state = _chain(_block_hashes(chunk, block_size), state, out[start : start + len(chunk)])
    if not out.all():
        # Once in 2^64 blocks a state mixes to 0: that block's key is 1, and the chain goes on from there.
        first = int(np.argmin(out))
        out[first] = 1
        out[first + 1 :] = keys(np.asarray(tokens)[(first + 1) * block_size :], block_size, 1)
    return out


def _words(tokens: npt.NDArray[np.integer], block_size: int) -> Keys:
    """The full blocks as [blocks, words] of two tokens each."""
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"tokens are {array.dtype}{list(array.shape)}: must be integers in one dimension")
    blocks = len(array) // block_size
    array = array[: blocks * block_size]
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise ValueError(f"token ids go from {array.min()} to {array.max()}: must be 0 to 2^31-1")
    table = array.astype("<i4", order="C", copy=False).reshape(blocks, block_size)
    if block_size % 2:
        padded = np.zeros((blocks, block_size + 1), "<i4")
        padded[:, :-1] = table
        table = padded
    return table.view("<u8").astype(np.uint64, copy=False)


def _block_hashes(words: Keys, block_size: int) -> Keys:
    """h of each row of `words`."""
    mixed = words * np.uint64(_SPREAD)
    mixed ^= mixed >> _U32
    hashes: Keys = mixed @ _weights(block_size)
    hashes += np.uint64(block_size * _SIZE & _MASK)
    return hashes


@lru_cache(maxsize=16)
def _weights(block_size: int) -> Keys:
    """B_j of each word of a block."""
    numbers = np.arange(1, (block_size + 1) // 2 + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    _mix(numbers)
    numbers |= np.uint64(1)
    return numbers


def _chain(hashes: Keys, state: int, out: Keys) -> int:
    """Write the keys of blocks with these hashes after `state` to `out`; the last state.

    state_i = M^i * (state_0 + sum_(j<=i) h_j * M^-j), i from 1.
    """
    count = len(hashes)
    hashes *= _DOWN[:count]
    np.cumsum(hashes, out=out)
    out += np.uint64(state)
    out *= _UP[:count]
    last = int(out[-1])
    _mix(out)
    return last


def _mix(x: Keys) -> None:
    """SplitMix64's finaliser, in place. Source: Steele, Lea, Flood: Fast Splittable PRNGs, OOPSLA 2014."""
    x ^= x >> _U30
    x *= _M1
    x ^= x >> _U27
    x *= _M2
    x ^= x >> _U31


def _unmix(key: int) -> int:
    """The inverse of `_mix` for one number."""
    x = key ^ key >> 31 ^ key >> 62
    x = x * _UNMIX_2 & _MASK
    x = x ^ x >> 27 ^ x >> 54
    x = x * _UNMIX_1 & _MASK
    return x ^ x >> 30 ^ x >> 60
