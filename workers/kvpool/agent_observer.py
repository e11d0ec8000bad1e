"""What telemetry may see of an agent's work; the default sees nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Pulled:
    """What came of one pull, by its end."""

    blocks: int
    """That arrived for it and are in the arena."""
    size: int
    """Their bytes."""
    seconds: float
    failed: str
    """Why not all that were asked for are there now; empty: they are."""
    refused: bool = False
    """Nothing was tried: too many pulls were running."""


@dataclass(frozen=True)
class AgentCounts:
    """Of one agent: since it started, but for the last two, which are now."""

    blocks_sent: int
    bytes_sent: int
    blocks_received: int
    bytes_received: int
    blocks_refused: int
    """That arrived and were not what they were said to be."""
    streams_refused: int
    """Other agents' reads beyond those that are served at once."""
    streams: int
    """Other agents' reads that are served."""
    peers_avoided: int
    """Other agents that are not asked for a while."""


class AgentObserver(Protocol):
    """Hears of what ends, on the agent's event loop."""

    def pulled(self, pulled: Pulled | None) -> None:
        """A pull is over; None: whoever had asked for it hung up."""


class SilentObserver:
    """Sees nothing."""

    def pulled(self, pulled: Pulled | None) -> None:
        """See `AgentObserver`."""
