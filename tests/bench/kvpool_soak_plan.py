"""Which faults the soak makes, where and when, and what became of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

KILLS = ("writer shard", "writer core", "reader shard", "reader core")
"""Those that end a replica."""
CAUGHT = (*KILLS, "agent killed", "agent stalled")
"""Those for which a process is watched until it is at something."""


@dataclass(frozen=True)
class Fault:
    at: float
    """Share of the requests that are done by then."""
    kind: str
    """`KILLS`, agent killed, agent stalled, flips, quiet, or host killed."""
    host: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}, host {self.host}" if self.kind != "quiet" else "a pause, to look for leaks"


PLAN = (
    Fault(0.05, "flips"),
    Fault(0.06, "flips", 1),
    Fault(0.08, "writer shard", 1),
    Fault(0.18, "flips"),
    Fault(0.19, "flips", 1),
    Fault(0.20, "reader core"),
    Fault(0.32, "agent killed"),
    Fault(0.36, "flips", 1),
    Fault(0.37, "flips"),
    Fault(0.40, "reader shard", 1),
    Fault(0.50, "agent stalled", 1),
    Fault(0.56, "flips"),
    Fault(0.57, "flips", 1),
    Fault(0.60, "writer core"),
    Fault(0.70, "agent stalled"),
    Fault(0.75, "agent killed", 1),
    Fault(0.80, "flips"),
    Fault(0.81, "flips", 1),
    Fault(0.86, "quiet"),
    Fault(0.90, "host killed", 1),
)
QUICK = (
    Fault(0.10, "flips"),
    Fault(0.10, "flips", 1),
    Fault(0.20, "writer shard", 1),
    Fault(0.40, "reader core"),
    Fault(0.60, "agent stalled", 1),
    Fault(0.70, "agent killed"),
    Fault(0.80, "quiet"),
    Fault(0.85, "host killed", 1),
)
AFTER_HOST = 0.1
"""Share of the requests that are still sent after the host's end."""


@dataclass
class Made:
    """What became of one fault."""

    fault: Fault
    at: float
    """Seconds, of the machine's clock."""
    done: bool = False
    seen: str = ""
    in_flight: int = 0
    until: float = 0.0
    """When what it took away was there again; 0: not yet."""
    back: bool = True
    """Unless that never came."""
    leaks: dict[str, int] = field(default_factory=dict)
    """Of a pause."""
