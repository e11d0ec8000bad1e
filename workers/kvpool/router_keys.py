"""The router's names of a request's blocks, for those who tell it what the pool holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protos import blockkeys

UNNAMED = 0
"""Never a router's key: the block has none, since its tokens do not tell all that is in it (images, …)."""


class RouterKeys:
    """Those of one request, chained on as it grows.

    Args:
        tokens: prompt and output; may be a live view that grows.
        block_tokens: of one block.
        root: of the request's namespace (`blockkeys.root`).
    """

    def __init__(self, tokens: Sequence[int], block_tokens: int, root: int) -> None:
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._root = root
        self._keys: list[int] = []

    def ending_at(self, token: int | None) -> int:
        """The key of the full block that ends before this token; `UNNAMED` when there is no such block."""
        if token is None or token % self._block_tokens or not 0 < token <= len(self._tokens):
            return UNNAMED
        if (block := token // self._block_tokens) > len(self._keys):
            self._grow(token)
        return self._keys[block - 1]

    def _grow(self, end: int) -> None:
        start = len(self._keys) * self._block_tokens
        parent = self._keys[-1] if self._keys else self._root
        fresh = np.array(self._tokens[start:end], np.int64)
        self._keys += blockkeys.keys(fresh, self._block_tokens, parent).tolist()
