"""Answers to those who ask how the HTTP face is: orchestrators, load balancers, people."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

LIVE, READY, STARTED = "/livez", "/readyz", "/startupz"
HEALTH, PING = "/health", "/ping"
PATHS: Final = frozenset({LIVE, READY, STARTED, HEALTH, PING})
"""Open to everyone, keys or not."""


@dataclass(frozen=True)
class Standing:
    """How the face is now. `elapsed_s`: since it was started."""

    phase: str
    elapsed_s: float
    started: bool  # vLLM's server is there
    ready: bool  # and a router with a replica behind it
    failed: bool = False  # for good: it takes a new process


def status(path: str, standing: Standing) -> int:
    """200 or 503 for one of `PATHS`.

    /livez is 503 only when waiting longer will not help; /health and /ping, which clients of vLLM ask,
    mean what /readyz means.
    """
    good = {LIVE: not standing.failed, STARTED: standing.started}.get(path, standing.ready)
    return 200 if good else 503


def body(standing: Standing) -> bytes:
    """The JSON document that goes with it."""
    return json.dumps({"phase": standing.phase, "elapsed_s": round(standing.elapsed_s, 3)}).encode()


def methods(path: str) -> tuple[str, ...]:
    """Which HTTP methods a probe takes."""
    return ("GET", "HEAD", "POST") if path == PING else ("GET", "HEAD")
