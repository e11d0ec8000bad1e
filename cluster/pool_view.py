"""What people see of the KV pool: a line for each host, and why a replica has no part in it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from protos import admin_pb2


def pool_lines(status: admin_pb2.ClusterStatus) -> list[Text]:
    """None where no pool is wanted."""
    return [*(_host(pool, status) for pool in status.kv_pools), *_without(status)]


def _host(pool: admin_pb2.KvPoolStatus, status: admin_pb2.ClusterStatus) -> Text:
    report = pool.report
    line = Text.assemble(f"KV pool on {pool.node}: ", "; ".join(_arenas(pool, status)), "; ")
    if not pool.agent:
        line.append(
            f"no agent{f': {pool.silence}' if pool.silence else ' yet'}", "red" if pool.silence else ""
        )
    elif pool.silence:
        line.append(f"agent {pool.agent} does not answer: {pool.silence}", "red")
    else:
        line.append(
            f"agent {pool.agent}, {report.blocks_sent} blocks sent, {report.blocks_received} received"
        )
    if report.blocks_refused:
        line.append(f", {report.blocks_refused} refused", "red")
    for peer in (peer for peer in report.peers if peer.avoided):
        line.append(f"; does not ask {peer.agent} for {peer.avoided_for_s:.0f} s: {peer.avoided}", "yellow")
    return line


def _arenas(pool: admin_pb2.KvPoolStatus, status: admin_pb2.ClusterStatus) -> Iterator[str]:
    arenas = pool.report.arenas
    if not arenas:
        yield _as_replicas_say(pool.node, status)
        return
    ready, slots = sum(arena.ready for arena in arenas), sum(arena.slots for arena in arenas)
    held = sum(arena.ready * arena.slot_bytes for arena in arenas)
    size = sum(arena.slots * arena.slot_bytes for arena in arenas)
    several = f" in {len(arenas)} arenas" if len(arenas) > 1 else ""
    yield f"{ready}/{slots} blocks{several}, {_gib(held)} of {_gib(size)} GiB"
    hits = sum(arena.hits for arena in arenas)
    asked = hits + sum(arena.misses for arena in arenas)
    yield f"hits {hits / asked:.0%} ({hits}/{asked})" if asked else "no hits yet"
    if corrupt := sum(arena.corrupt for arena in arenas):
        yield f"{corrupt} damaged blocks freed"


def _as_replicas_say(node: str, status: admin_pb2.ClusterStatus) -> str:
    """All of a host share one arena: any of them knows."""
    for replica in status.replicas:
        if replica.node == node and replica.load.pool_slots:
            return f"{replica.load.pool_ready_blocks}/{replica.load.pool_slots} blocks"
    return "no arena yet"


def _without(status: admin_pb2.ClusterStatus) -> Iterator[Text]:
    """One line for all replicas of the same reason."""
    reasons: dict[str, list[str]] = {}
    for replica in status.replicas:
        if replica.no_pool:
            reasons.setdefault(replica.no_pool, []).append(replica.replica)
    for reason, replicas in reasons.items():
        verb = "shares" if len(replicas) == 1 else "share"
        yield Text.assemble((f"{', '.join(replicas)} {verb} no KV blocks: ", "yellow"), reason)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
