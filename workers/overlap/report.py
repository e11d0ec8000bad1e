"""What a shard says of its AllReduces: which path its steps take, why, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from workers.overlap.plan import Plan


@dataclass(frozen=True)
class StepRecord:
    """One engine step of one shard. Times are seconds; None where this device does not tell them."""

    number: int
    """1 for the first step after the engine's start; equal on all ranks for the same step."""
    started_ns: int
    """Wall clock of the shard's host, ns since the epoch; an accelerator begins the pass when it is free."""
    tokens: int
    chunks: int
    """1: the stock path."""
    forward_s: float
    """The model's forward pass, embedding to final norm."""
    all_reduce_s: float | None
    """During which at least one AllReduce was in flight."""
    exposed_s: float | None
    """During which the compute thread (or stream) did nothing but wait for an AllReduce."""
    requests: tuple[tuple[str, int], ...] = ()
    """(engine's request id, its tokens in this step)."""

    @property
    def compute_s(self) -> float | None:
        """What is left of the forward pass without the waiting."""
        return None if self.exposed_s is None else self.forward_s - self.exposed_s


class StepObserver(Protocol):
    """Told of every engine step, in the thread that computes: it must return within microseconds.

    On an accelerator a step is told of once a later one begins and finds it done.
    """

    def step(self, record: StepRecord) -> None: ...


@dataclass(frozen=True)
class PathTotals:
    """Sums over the steps of one path since the engine's start.

    Without the steps that an accelerator replays whole from a CUDA graph: no code of ours runs in them.
    """

    steps: int = 0
    tokens: int = 0
    forward_s: float = 0.0
    all_reduce_s: float = 0.0
    """Of the `timed_steps` alone, as `exposed_s`."""
    exposed_s: float = 0.0
    timed_steps: int = 0
    """Steps whose AllReduces were timed: all of them on a CPU, some on an accelerator, none where
    nothing tells."""


@dataclass(frozen=True)
class OverlapReport:
    """One shard's answer to `kvorum status --overlap`."""

    rank: int
    mode: str
    """As configured: auto, off, or a number of chunks."""
    path: Literal["overlapped", "stock"]
    """overlapped: steps at or above the plan's threshold are split."""
    reason: str
    """Why the path is stock, or what the plan rests on; one line for people."""
    model: str
    """Architecture, such as LlamaForCausalLM."""
    collective: str
    plan: Plan = field(default_factory=Plan)
    stock: PathTotals = field(default_factory=PathTotals)
    overlapped: PathTotals = field(default_factory=PathTotals)
