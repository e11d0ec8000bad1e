"""Metrics of a replica's pool: what its engine did with it, and what it had from other hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from protos import common_pb2
from telemetry.metrics import Meters, Reading
from workers.kvpool.stats import GAUGES, PoolStats

PULL_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_LOOKUPS = {"hit": "hits", "miss": "misses"}
_BLOCKS = {event: event for event in ("loaded", "lost", "stored", "dropped", "refused")}
_BYTES = {"load": "loaded_bytes", "store": "stored_bytes"}
_NOW = ("slots", "ready")


def watch_pool(meters: Meters, pool: Callable[[], PoolStats]) -> None:
    """Show the engine's pool; nothing of an engine that has none.

    The arena's own numbers (`GAUGES`) are those of the whole host: each of its replicas tells the same.

    Args:
        pool: read from other threads.
    """
    for name, unit, about, key, fields in (
        (
            "kvorum.replica.pool.lookups",
            "{block}",
            "blocks that the engine asked the pool for",
            "result",
            _LOOKUPS,
        ),
        (
            "kvorum.replica.pool.blocks",
            "{block}",
            "blocks of the engine by what became of them",
            "event",
            _BLOCKS,
        ),
        (
            "kvorum.replica.pool.transferred",
            "By",
            "bytes copied between engine and pool, over all ranks",
            "direction",
            _BYTES,
        ),
        (
            "kvorum.replica.pool.busy",
            "{time}",
            "times that the arena did not answer in time",
            "",
            {"": "busy"},
        ),
    ):
        meters.total(name, unit, about, partial(_readings, pool, key, fields))
    for name, unit, field in (
        ("kvorum.replica.pool.slots", "{block}", "slots"),
        ("kvorum.replica.pool.ready", "{block}", "ready"),
        ("kvorum.replica.pool.evicted", "{block}", "evicted"),
        ("kvorum.replica.pool.corrupt", "{block}", "corrupt"),
        ("kvorum.replica.pool.reclaimed", "{block}", "reclaimed"),
    ):
        show = meters.gauge if field in _NOW else meters.total
        show(name, unit, GAUGES[field], partial(_readings, pool, "", {"": field}))


class PullMetrics:
    """Counts requests for which another host was asked for blocks, as they end."""

    def __init__(self, meters: Meters) -> None:
        self._pulls = meters.counter(
            "kvorum.replica.pulls",
            "{pull}",
            "times that another host was asked for blocks",
            keys=("outcome",),
        )
        self._blocks = meters.counter("kvorum.replica.pull.blocks", "{block}", "blocks had from other hosts")
        self._bytes = meters.counter("kvorum.replica.pull.transferred", "By", "bytes had from other hosts")
        self._duration = meters.histogram(
            "kvorum.replica.pull.duration",
            "s",
            "from asking another host to its last block",
            bounds=PULL_S,
            keys=("outcome",),
        )

    def ended(self, pull: common_pb2.KvFetch | None) -> None:
        """None: the request ended before."""
        if pull is None:
            self._pulls.add(1, "cancelled")
            return
        how = outcome(pull.failed, pull.blocks)
        self._pulls.add(1, how)
        self._blocks.add(pull.blocks)
        self._bytes.add(pull.bytes)
        self._duration.record(pull.seconds, how)


def outcome(failed: str, blocks: int) -> str:
    """Whether whole, part or none of what was asked for came."""
    if not failed:
        return "whole"
    return "part" if blocks else "none"


def _readings(pool: Callable[[], PoolStats], key: str, fields: Mapping[str, str]) -> list[Reading]:
    """One of each field, told apart by the attribute `key`, if it has one."""
    now = pool()
    if not now.slots:
        return []
    return [(getattr(now, field), {key: value} if key else {}) for value, field in fields.items()]
