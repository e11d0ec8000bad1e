"""What the soak of the KV pool asks: prompts that begin alike, and a mix of ways to ask for them. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ANSWER_TOKENS = 16
"""Of a right answer: whoever asks for fewer gets its beginning."""
PREFIXES = (256, 288, 320, 352, 384, 448, 512, 576, 640, 768)
"""Tokens that the prompts of each family have in common."""
SUFFIXES = (16, 24, 40, 64)
PROMPTS_PER_FAMILY = 12
LONG_S = 90.0
"""A deadline that no request should need."""
_VOCAB = (1000, 40_000)
_SHORT_S = (0.1, 1.5)
_SALT = "a tenant's"
_KINDS = {"plain": 58, "salted": 10, "once": 10, "cancelled": 9, "short": 7, "twice": 6}
"""Of 100 requests. `once`: under a salt of its own, so that no other request has a block of it."""


@dataclass(frozen=True)
class Request:
    number: int
    kind: str
    prompt: int
    """Which."""
    tokens: int
    salt: str = ""
    n: int = 1
    deadline_s: float = LONG_S
    leave_after: int = 0
    """Tokens, after which the client goes away; 0: it stays."""

    @property
    def fields(self) -> dict[str, Any]:
        """For `KvorumClient.generate`. Greedy; several sequences by letting only one token through."""
        greedy = {"temperature": 0.0} if self.n == 1 else {"temperature": 1.0, "top_k": 1, "n": self.n}
        salted = {"cache_salt": self.salt} if self.salt else {}
        return {"max_tokens": self.tokens, "ignore_eos": True, "logprobs": 1, **greedy, **salted}


def request(seed: int, number: int, prompts: int) -> Request:
    """The request of this number, of so many prompts."""
    dice = random.Random(f"{seed} {number}")
    (kind,) = dice.choices(list(_KINDS), list(_KINDS.values()))
    tokens = dice.randint(4, ANSWER_TOKENS)
    asked: dict[str, Any] = {"prompt": dice.randrange(prompts), "tokens": tokens}
    if kind == "salted":
        asked["salt"] = _SALT
    elif kind == "once":
        asked["salt"] = f"once {seed} {number}"
    elif kind == "cancelled":
        asked["leave_after"] = dice.randint(1, tokens - 1)
    elif kind == "short":
        asked["deadline_s"] = dice.uniform(*_SHORT_S)
    elif kind == "twice":
        asked["n"] = 2
    return Request(number, kind, **asked)


def candidates(seed: int, per_family: int, batch: int) -> list[list[list[int]]]:
    """So many prompts of each family; another batch has other ones, that begin as those of the first."""
    found = []
    for family, length in enumerate(PREFIXES):
        prefix = _tokens(f"prefix {seed} {family}", length)
        found.append(
            [
                prefix + _tokens(f"suffix {seed} {family} {batch} {each}", SUFFIXES[each % len(SUFFIXES)])
                for each in range(per_family)
            ]
        )
    return found


def differing(got: Sequence[int], right: Sequence[int], whole: bool) -> str:
    """How an answer, or what came of one, is not the right one; empty: it is."""
    for place, (one, other) in enumerate(zip(got, right, strict=False)):
        if one != other:
            return f"token {place} is {one}, not {other}"
    if len(got) > len(right):
        return f"{len(got)} tokens, and {len(right)} were asked for"
    if whole and len(got) < len(right):
        return f"{len(got)} tokens, and that was all, of {len(right)}"
    return ""


def _tokens(seed: str, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(*_VOCAB) for _ in range(count)]
