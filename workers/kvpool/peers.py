"""What an agent knows of other hosts' agents: whom not to ask for a while, and how fast they are. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

AVOIDED_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""After the first failure in a row, the second, …; the last one from there on."""
MOST_PEERS: Final = 256
"""Remembered; of more, those asked longest ago are forgotten."""

_RECENT: Final = 0.3  # weight of the last transfer in the mean speed


@dataclass
class Peer:
    """One of them, by its address."""

    failures: int = 0
    """In a row."""
    why: str = ""
    """The last one."""
    failed_at: float = -math.inf
    avoided_until: float = -math.inf
    blocks: int = 0
    """Received from it."""
    bytes_per_s: float = 0.0
    """Of recent transfers; 0: unknown."""


class Peers:
    """By "host:port". A peer that failed is left alone for a while, twice as long each time, so that one that
    is gone costs hardly any request its deadline; one success and all is forgiven.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._peers: dict[str, Peer] = {}  # the one asked last comes last

    def avoided(self, agent: str) -> str:
        """Why and for how long it is not to be asked; empty: ask it."""
        peer = self._peers.get(agent)
        left = peer.avoided_until - self._clock() if peer is not None else 0.0
        return f"{agent} is not asked for {left:.1f} s: {peer.why}" if peer is not None and left > 0 else ""

    def failed(self, agent: str, why: str, asked_at: float) -> None:
        """It is dead or too slow, or sent what it should not. `asked_at`: when, by the clock.

        Of transfers that ran side by side the first failure counts: the others say nothing new.
        """
        peer = self._of(agent)
        if asked_at <= peer.failed_at:
            return
        peer.why, peer.failed_at = why, self._clock()
        peer.avoided_until = peer.failed_at + AVOIDED_S[min(peer.failures, len(AVOIDED_S) - 1)]
        peer.failures += 1

    def served(self, agent: str, blocks: int, size: int, seconds: float) -> None:
        """It sent so many blocks, of so many bytes in all."""
        peer = self._of(agent)
        peer.failures, peer.why, peer.avoided_until = 0, "", -math.inf
        peer.blocks += blocks
        speed = size / max(seconds, 1e-9)
        peer.bytes_per_s += (speed - peer.bytes_per_s) * (_RECENT if peer.bytes_per_s else 1.0)

    def known(self) -> list[tuple[str, Peer, float]]:
        """Each with its address and the seconds for which it is not asked, 0 when it is. For any thread."""
        now = self._clock()
        peers = list(self._peers.items())  # at once: the event loop changes them
        return [(agent, peer, max(0.0, peer.avoided_until - now)) for agent, peer in peers]

    def _of(self, agent: str) -> Peer:
        peer = self._peers.pop(agent, None) or Peer()
        self._peers[agent] = peer
        if len(self._peers) > MOST_PEERS:
            del self._peers[next(iter(self._peers))]
        return peer
