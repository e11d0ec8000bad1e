"""How each request of the soak ended; travels from its client as JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any


@dataclass
class Answer:
    number: int
    kind: str
    began: float
    """Seconds, of the machine's clock."""
    ended: float = 0.0
    end: str = ""
    """whole | cancelled | error | hung"""
    tokens: int = 0
    """That came, of all sequences."""
    wrong: str = ""
    """How what came differs from the right answer; empty: it does not."""
    off: float = 0.0
    """The most by which a token's logprob differs from the right one."""
    code: str = ""
    """Of an error."""
    reason: str = ""
    said: str = ""
    replica: str = ""
    attempt: int = 0
    cached: int = 0
    """Tokens of the prompt that were not computed."""
    pooled: int = 0
    """Of these, loaded from the host's arena."""
    asked_agent: str = ""
    """From where blocks were to come."""
    pulled: int = 0
    """Blocks that did."""
    not_pulled: str = ""
    """Why not all."""

    def to_list(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Answer:
        return cls(*values)

    @property
    def seconds(self) -> float:
        return self.ended - self.began
