"""The requests this replica has accepted and not finished, whoever sent them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

Prefix = Callable[[Sequence[int], int], int]
"""(keys, leading keys known to be resident) -> leading keys that are resident now."""


class Backlog(NamedTuple):
    """What is still to be computed of prompts."""

    tokens: int
    pairs: float
    """Of one of these tokens and one before it, as causal attention looks at: u*(c + u/2) of a prompt with
    u tokens left behind c."""


class Accepted:
    """Counts sequences and the prompt tokens that are still to be computed before first tokens.

    A prompt's remaining tokens are those after its resident prefix. The engine publishes the blocks of a
    chunk as it ends, so the prefix of a request in prefill grows by itself, and that of a waiting sibling
    grows with it, as it should: it will be a hit. A prefix is taken to stay once seen.
    Without block keys (no events) a prompt counts what its sender expected, whole, until its first token.
    """

    def __init__(self) -> None:
        self.sequences = 0
        self._prefilling: set[Acceptance] = set()

    @contextmanager
    def accept(
        self,
        sequences: int,
        prompt_tokens: int,
        *,
        keys: Sequence[int] = (),
        block_size: int = 0,
        expected_cached_tokens: int = 0,
    ) -> Iterator[Acceptance]:
        """Hold the request's load until the block ends, however it ends.

        Args:
            sequences: `n` of the request.
            keys: of the prompt's full blocks; empty when they cannot be had.
            block_size: tokens of one key.
            expected_cached_tokens: used when there are no keys.
        """
        held = Acceptance(self._prefilling, prompt_tokens, keys, block_size, expected_cached_tokens)
        self.sequences += sequences
        self._prefilling.add(held)
        try:
            yield held
        finally:
            self.sequences -= sequences
            self._prefilling.discard(held)

    def backlog(self, prefix: Prefix) -> Backlog:
        """What is still to compute, over all requests without a first token.

        At least one token each: the engine computes a prompt's last one even when all of it is cached.
        """
        tokens, pairs = 0, 0.0
        for held in self._prefilling:
            left = held.remaining(prefix)
            tokens += left.tokens
            pairs += left.pairs
        return Backlog(tokens, pairs)


class Acceptance:
    """One request's part of the backlog."""

    __slots__ = ("_block_size", "_done", "_expected", "_keys", "_prefilling", "_prompt")

    def __init__(
        self,
        prefilling: set[Acceptance],
        prompt: int,
        keys: Sequence[int],
        block_size: int,
        expected: int,
    ) -> None:
        self._prefilling = prefilling
        self._prompt = prompt
        self._keys = keys
        self._block_size = block_size
        self._expected = expected
        self._done = 0

    def first_token(self) -> None:
        """Its prefill is over; safe to call again."""
        self._prefilling.discard(self)

    def remaining(self, prefix: Prefix) -> Backlog:
        """What is still to compute of it now."""
        if self._keys:
            self._done = prefix(self._keys, self._done)
            cached = self._done * self._block_size
        else:
            cached = self._expected
        left = max(1, self._prompt - cached)
        return Backlog(left, left * (self._prompt - left + left / 2))
