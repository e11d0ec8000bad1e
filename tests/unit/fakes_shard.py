"""Shards as the controller sees them through Ray, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from workers.overlap.plan import Plan, PlanRow
from workers.overlap.report import OverlapReport, PathTotals
from workers.placement import ShardInfo

PLAN = Plan(
    (
        PlanRow(128, 1, stock_ms=3.2, overlapped_ms=3.2, compute_ms=1.5, all_reduce_ms=0.8),
        PlanRow(512, 2, stock_ms=16.0, overlapped_ms=11.5, compute_ms=6.0, all_reduce_ms=5.0),
        PlanRow(1024, 4, stock_ms=31.6, overlapped_ms=20.7, compute_ms=12.0, all_reduce_ms=9.8),
    ),
    "measured",
)

FORCED = Plan((PlanRow(96, 4),), "forced")


def a_report(rank: int = 0, plan: Plan = PLAN, **changes: Any) -> OverlapReport:
    values: dict[str, Any] = {
        "rank": rank,
        "mode": "auto",
        "path": "overlapped",
        "reason": "measured at warm-up",
        "model": "LlamaForCausalLM",
        "collective": "gloo",
        "plan": plan,
        "stock": PathTotals(
            steps=40, tokens=90, forward_s=1.5, all_reduce_s=0.5, exposed_s=0.5, timed_steps=40
        ),
        "overlapped": PathTotals(
            steps=3, tokens=3072, forward_s=1.9, all_reduce_s=1.2, exposed_s=0.3, timed_steps=3
        ),
    }
    return OverlapReport(**{**values, **changes})


class FakeRemote:
    """A method of a Ray actor: its call is awaitable, or hangs, or raises."""

    def __init__(self, outcome: Callable[[], Any]) -> None:
        self._outcome = outcome
        self.calls = 0

    async def remote(self) -> Any:
        self.calls += 1
        found = self._outcome()
        return await found if asyncio.iscoroutine(found) else found


class FakeShard:
    """The actor handle of one shard."""

    def __init__(self, rank: int, overlap: Callable[[], Any]) -> None:
        info = ShardInfo(rank, 100 + rank, f"node-{rank}", f"10.0.0.{rank}", (rank,), (), "gloo")
        self.describe = FakeRemote(lambda: info)
        self.overlap = FakeRemote(overlap)


def raising(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def hanging() -> Any:
    return asyncio.Event().wait()
