"""Asks shards how they overlap AllReduce, and puts their words into the admin API's messages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from ray.exceptions import RayActorError, RayError

from cluster.rayerrors import last_line
from protos import admin_pb2
from workers.overlap.plan import Plan
from workers.overlap.report import OverlapReport, PathTotals

_ASK_TIMEOUT_S = 2.0

Answers = Mapping[int, OverlapReport | str]
"""By rank: the shard's report, or why there is none."""


async def ask_shards(
    shards: Mapping[int, Callable[[], Any]], timeout_s: float = _ASK_TIMEOUT_S
) -> dict[int, OverlapReport | str]:
    """Ask all of them at once. Never raises: a shard that does not say gets a text that says why.

    Args:
        shards: by rank, what finds the shard's actor; it may block and may raise ValueError.
    """
    answers = await asyncio.gather(*(_ask(find, timeout_s) for find in shards.values()))
    return dict(zip(shards, answers, strict=True))


async def _ask(find: Callable[[], Any], timeout_s: float) -> OverlapReport | str:
    try:
        async with asyncio.timeout(timeout_s):
            actor = await asyncio.to_thread(find)
            report: OverlapReport | None = await actor.overlap.remote()
    except RayActorError:
        return "it has died, or its node cannot be reached"
    except RayError as error:  # before the others: what a shard raises is also of the type it raised
        return last_line(error)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except ValueError:
        return "there is no such shard: its engine has ended"
    except AttributeError:
        return "it runs a version that does not report"
    return "its engine is still loading" if report is None else report


def summary(answers: Answers) -> str:
    """A replica's answers in one line for `kvorum status`; empty unless every shard has said.

    Without measured times, so that replicas of one mind say the same.
    """
    reports = [answer for answer in answers.values() if isinstance(answer, OverlapReport)]
    if not reports or len(reports) < len(answers):
        return ""
    if differing := disagreement(answers):
        return f"RANKS DISAGREE: {differing}"
    report = reports[0]
    splits = _splits(report)
    if not splits:
        return f"stock path: {re.split('[,;]', report.reason, maxsplit=1)[0]}"
    counts = [chunks for _tokens, chunks in splits if chunks > 1]
    few, most = min(counts), max(counts)
    several = str(few) if few == most else f"{few} to {most}"
    return f"{several} chunks from {splits[0][0]} tokens ({report.plan.origin})"


def disagreement(answers: Answers) -> str:
    """How the ranks that answered would split steps differently; empty when they agree.

    Ranks that split a step differently issue different collectives, and wait for each other for ever.
    """
    ranks: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for rank, answer in sorted(answers.items()):
        if isinstance(answer, OverlapReport):
            ranks.setdefault(_splits(answer), []).append(str(rank))
    if len(ranks) < 2:
        return ""
    return "; ".join(f"rank {', '.join(which)}: {_splits_text(splits)}" for splits, which in ranks.items())


def to_message(
    replica: str, epoch: str, state: admin_pb2.ReplicaState.ValueType, answers: Answers
) -> admin_pb2.ReplicaOverlap:
    """A replica's answers as the admin API shows them."""
    return admin_pb2.ReplicaOverlap(
        replica=replica,
        epoch=epoch,
        state=state,
        shards=[_shard(rank, answer) for rank, answer in sorted(answers.items())],
        disagreement=disagreement(answers),
    )


def _shard(rank: int, answer: OverlapReport | str) -> admin_pb2.ShardOverlap:
    if isinstance(answer, str):
        return admin_pb2.ShardOverlap(rank=rank, silence=answer)
    return admin_pb2.ShardOverlap(
        rank=rank,
        mode=answer.mode,
        path=answer.path,
        reason=answer.reason,
        model=answer.model,
        collective=answer.collective,
        plan=_plan(answer.plan),
        stock=_totals(answer.stock),
        overlapped=_totals(answer.overlapped),
    )


def _plan(plan: Plan) -> admin_pb2.OverlapPlan:
    rows = [admin_pb2.OverlapPlanRow(**asdict(row)) for row in plan.rows]
    return admin_pb2.OverlapPlan(origin=plan.origin, rows=rows)


def _totals(totals: PathTotals) -> admin_pb2.PathTotals:
    return admin_pb2.PathTotals(**asdict(totals))


def _splits(report: OverlapReport) -> tuple[tuple[int, int], ...]:
    """(tokens, chunks) wherever the number of chunks changes: equal exactly where two ranks act alike."""
    if report.path == "stock":
        return ()
    changes = [next(rows) for _chunks, rows in groupby(report.plan.rows, key=lambda row: row.chunks)]
    splits = tuple((row.tokens, row.chunks) for row in changes)
    return splits[1:] if splits and splits[0][1] == 1 else splits


def _splits_text(splits: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{chunks} chunks from {tokens} tokens" for tokens, chunks in splits) or "stock path"
