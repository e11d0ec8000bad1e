"""Block keys of a prompt, as the router asks for them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from protos import blockkeys

_root = lru_cache(maxsize=4096)(blockkeys.root)
_LONGEST_CACHED = 256  # characters: long names are hashed each time rather than kept


def prompt_keys(
    tokens: npt.NDArray[np.integer],
    block_size: int,
    revision: str,
    lora: str = "",
    cache_salt: str = "",
) -> blockkeys.Keys:
    """The keys of the prompt's full blocks in the namespace of revision, LoRA and salt.

    Raises what `blockkeys.keys` raises. The router's memory for roots is bounded whatever salts clients send.
    """
    short = len(revision) + len(lora) + len(cache_salt) <= _LONGEST_CACHED
    parent = _root(revision, lora, cache_salt) if short else blockkeys.root(revision, lora, cache_salt)
    return blockkeys.keys(tokens, block_size, parent)
