"""What people see of AllReduce overlap: each replica's plan, and where its shards' time went."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cluster.display import state_name, to_plain
from protos import admin_pb2

_LEGEND = (
    "plan: ms of one decoder layer without attention, AllReduce is one of its two; shards: seconds since the "
    "engine's start, AllReduce in the timed steps alone, exposed is AllReduce with nothing else to do, "
    "hidden is the rest of it; -: not measured"
)


def overlap_view(status: admin_pb2.OverlapStatus) -> Group:
    """A block a replica: its path and why, the plan, then a row for each shard and path it has taken."""
    parts: list[RenderableType] = []
    for replica in status.replicas:
        parts += _replica(replica)
    return Group(*parts, Text(_LEGEND, "dim"))


def overlap_json(status: admin_pb2.OverlapStatus) -> str:
    """Every field, by its proto name; numbers as numbers."""
    return json.dumps(to_plain(status), indent=2)


def _replica(replica: admin_pb2.ReplicaOverlap) -> Iterator[RenderableType]:
    name = (replica.replica, "bold")
    if replica.state != admin_pb2.READY:
        yield Text.assemble(name, f": {state_name(replica.state)}; its shards are asked once it is ready")
        return
    if replica.disagreement:
        yield Text.assemble(
            name,
            (
                f": RANKS DISAGREE, which hangs them: {replica.disagreement}; "
                "start the cluster anew with --overlap off, and report this",
                "bold red",
            ),
        )
    told = next((shard for shard in replica.shards if not shard.silence), None)
    if told is None:
        yield Text.assemble(name, (": no shard answers", "red"))
    else:
        where = f"; {told.model}, {told.collective}, --overlap {told.mode}"
        yield Text.assemble(
            name, ": ", (f"{told.path} path", _colour(told)), f": {told.reason}", (where, "dim")
        )
        if told.plan.rows:
            yield _indented(_plan(told.plan))
        yield _indented(_shards(replica))
    for shard in replica.shards:
        if shard.silence:
            yield _indented(Text(f"rank {shard.rank} does not say: {shard.silence}", "red"))


def _colour(shard: admin_pb2.ShardOverlap) -> str:
    return "green" if shard.path == "overlapped" else ""


def _plan(plan: admin_pb2.OverlapPlan) -> Table:
    table = _table(
        f"from tokens ({plan.origin})",
        "chunks",
        "compute ms",
        "AllReduce ms",
        "stock ms",
        "overlapped ms",
        "gain",
    )
    for row in plan.rows:
        gain = 1.0 - row.overlapped_ms / row.stock_ms if row.stock_ms > 0 else None
        table.add_row(
            str(row.tokens),
            str(row.chunks),
            *(
                _measured(value, ".2f")
                for value in (row.compute_ms, row.all_reduce_ms, row.stock_ms, row.overlapped_ms)
            ),
            "-" if gain is None else f"{gain:.1%}",
        )
    return table


def _shards(replica: admin_pb2.ReplicaOverlap) -> Table:
    table = _table(
        "rank", "path", "steps", "tokens", "forward s", "timed steps", "AllReduce s", "exposed s", "hidden"
    )
    for shard in replica.shards:
        paths = (("stock", shard.stock), ("overlapped", shard.overlapped))
        for path, totals in paths:
            if not totals.steps and path != shard.path:  # a silent shard has neither
                continue
            known = totals.timed_steps > 0 and totals.all_reduce_s > 0
            table.add_row(
                str(shard.rank),
                path,
                str(totals.steps),
                str(totals.tokens),
                _measured(totals.forward_s, ".3f"),
                str(totals.timed_steps),
                _measured(totals.all_reduce_s, ".3f"),
                f"{totals.exposed_s:.3f}" if known else "-",
                f"{1.0 - totals.exposed_s / totals.all_reduce_s:.1%}" if known else "-",
            )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column == "path" else "right")
    return table


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2), expand=False)


def _measured(value: float, shape: str) -> str:
    """Zero is what an unmeasured time is reported as."""
    return format(value, shape) if value > 0 else "-"
