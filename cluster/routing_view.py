"""What people see of routing: one decision with its terms, and what each router holds of the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.connect import Target
from protos import admin_pb2, inference_pb2
from protos.errors import KvorumError

_TERMS = (
    ("queue", "queue_ms"),
    ("prefill", "prefill_ms"),
    ("fetch", "fetch_ms"),
    ("decodes", "interference_ms"),
    ("other", "overhead_ms"),
    ("TTFT", "ttft_ms"),
    ("harm", "harm_ms"),
    ("session", "affinity_ms"),
    ("score", "score_ms"),
)
_STANDINGS = {"ready": "green", "suspect": "yellow", "out": "red"}


def explain_view(found: inference_pb2.ExplainResponse) -> Group:
    """A heading, and a row a candidate: tokens by where they are, then predicted milliseconds."""
    size = f"blocks of {found.block_size}" if found.block_size else "block size not known yet"
    heading = Text.assemble(
        (found.chosen or "nobody", "bold"),
        f" would serve these {found.prompt_tokens} tokens of {found.model} ({size}): {found.why}",
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("replica")
    for name in ("cached", "in flight", "pooled", "to compute", "seqs", "backlog"):
        table.add_column(name, justify="right")
    for name, _field in _TERMS:
        table.add_column(name, justify="right")
    table.add_column("")
    for row in found.candidates:
        table.add_row(
            Text(row.replica, "bold green" if row.chosen else ""),
            str(row.cached_tokens),
            str(row.pending_tokens),
            str(row.pooled_tokens),
            str(row.uncached_tokens),
            str(row.sequences),
            str(row.backlog_tokens),
            *(f"{getattr(row, field):.1f}" for _name, field in _TERMS),
            Text(row.degraded, "yellow"),
        )
    legend = Text(
        f"policy {found.policy}; times in predicted ms; TTFT = queue + prefill + fetch + decodes + other, "
        "score = TTFT + harm - session; the least score wins",
        "dim",
    )
    rows: list[RenderableType] = [heading, table, legend]
    if found.queue_length:
        rows.append(
            Text(f"{found.queue_length} requests wait, about {found.queue_wait_ms:.0f} ms before this one")
        )
    return Group(*rows)


def ask_routers(
    status: admin_pb2.ClusterStatus, token: str, target: Target | None = None
) -> dict[str, admin_pb2.RouterState | str]:
    """What every live router knows, or why it does not say; `target` has their TLS settings."""
    names = {router.address: router.name for router in status.routers if router.alive and router.address}
    if not names:
        return {}
    asked = replace(target or Target((), token), addresses=tuple(names))

    async def ask() -> dict[str, admin_pb2.RouterState | KvorumError]:
        async with asked.client() as client:
            return await client.router_states()

    found = asyncio.run(ask())
    return {
        names[address]: state if isinstance(state, admin_pb2.RouterState) else f"no answer: {state.message}"
        for address, state in found.items()
    }


def routing_view(routers: Mapping[str, admin_pb2.RouterState | str]) -> Group:
    """A block a router: its queues, and how well it knows each replica. A text instead: why it is missing."""
    parts: list[RenderableType] = []
    for name, state in routers.items():
        if isinstance(state, str):
            parts.append(Text(f"{name}: {state}", "red"))
            continue
        parts.append(_heading(name, state))
        parts.append(_views(state))
    return Group(*parts)


def _heading(name: str, state: admin_pb2.RouterState) -> Text:
    line = Text.assemble(
        (name, "bold"), f": {state.policy}, {state.in_flight} in flight, {state.leases} leases"
    )
    for queue in state.queues:
        if queue.length or queue.refused:
            line.append(
                f"; {queue.model}: {queue.length} wait, the oldest {queue.oldest_wait_s:.1f} s, "
                f"{queue.refused} refused"
            )
    return line


def _views(state: admin_pb2.RouterState) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in (
        "  replica",
        "standing",
        "blocks",
        "leases",
        "ms/token",
        "TTFT error",
        "hit error",
        "views dropped",
        "",
    ):
        table.add_column(column, justify="left" if column in ("  replica", "standing", "") else "right")
    for view in state.replicas:
        table.add_row(
            f"  {view.replica}",
            Text(view.standing, _STANDINGS.get(view.standing, "")),
            f"{view.blocks} × {view.block_size}" if view.block_size else "-",
            str(view.leases),
            f"{view.prefill_ms_per_token:.2f}",
            f"{view.ttft_error_ms:.0f} ms",
            f"{view.cached_error_tokens:.0f} tok",
            str(view.views_dropped),
            Text(view.degraded, "yellow"),
        )
    return table
