"""Metrics of a host's agent: what it exchanges with other hosts, and the arenas of its host.

An arena's figures are told once a host here, while each replica tells those of the arena that it shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final, Protocol

from telemetry.metrics import Meters, Reading
from workers.kvpool.agent_observer import AgentCounts, Pulled
from workers.kvpool.host_arenas import ArenaFigures
from workers.kvpool.metrics import PULL_S, outcome

NAMESPACE: Final = "namespace"
"""Of the figures of an arena: the digest of what makes its blocks interchangeable, which names its file."""

_DIRECTION: Final = "network.io.direction"


class Watched(Protocol):
    """What is looked up of an agent, from the exporters' threads."""

    def counts(self) -> AgentCounts:
        """See `KvAgent`."""
        ...

    def arenas(self) -> Sequence[ArenaFigures]:
        """See `KvAgent`."""
        ...


class AgentMetrics:
    """An AgentObserver: counts pulls as they end."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._pulls = meters.counter(
            "kvorum.kv_agent.pulls",
            "{pull}",
            "times that a replica of this host had blocks brought, by what came",
            keys=("outcome",),
        )
        self._duration = meters.histogram(
            "kvorum.kv_agent.pull.duration",
            "s",
            "from a replica's asking to the last block in the arena",
            bounds=PULL_S,
            keys=("outcome",),
        )

    def pulled(self, pulled: Pulled | None) -> None:
        """See `AgentObserver`."""
        if pulled is None:
            self._pulls.add(1, "cancelled")
        elif pulled.refused:
            self._pulls.add(1, "refused")
        else:
            how = outcome(pulled.failed, pulled.blocks)
            self._pulls.add(1, how)
            self._duration.record(pulled.seconds, how)

    def watch(self, agent: Watched) -> None:
        """Show an agent that has started, and its host's arenas."""
        _watch_exchange(self._meters, agent.counts)
        _watch_arenas(self._meters, agent.arenas)


def _watch_exchange(meters: Meters, counts: Callable[[], AgentCounts]) -> None:
    both = {"transmit": "blocks_sent", "receive": "blocks_received"}
    sizes = {"transmit": "bytes_sent", "receive": "bytes_received"}
    for name, unit, about, key, fields in (
        ("kvorum.kv_agent.blocks", "{block}", "blocks exchanged with other hosts", _DIRECTION, both),
        ("kvorum.kv_agent.transferred", "By", "bytes of these blocks", _DIRECTION, sizes),
        (
            "kvorum.kv_agent.blocks.refused",
            "{block}",
            "blocks of other hosts that were not what they were said to be",
            "",
            {"": "blocks_refused"},
        ),
        (
            "kvorum.kv_agent.streams.refused",
            "{stream}",
            "reads of other hosts beyond those that are served at once",
            "",
            {"": "streams_refused"},
        ),
    ):
        meters.total(name, unit, about, partial(_of_agent, counts, key, fields))
    for name, unit, about, field in (
        ("kvorum.kv_agent.streams", "{stream}", "reads of other hosts that are served", "streams"),
        ("kvorum.kv_agent.peers.avoided", "{peer}", "agents that are not asked for a while", "peers_avoided"),
    ):
        meters.gauge(name, unit, about, partial(_of_agent, counts, "", {"": field}))


def _watch_arenas(meters: Meters, arenas: Callable[[], Sequence[ArenaFigures]]) -> None:
    for name, unit, about, path in (
        ("kvorum.kv_agent.arena.slots", "{slot}", "blocks that fit in the arena", "usage.slots"),
        ("kvorum.kv_agent.arena.ready", "{block}", "blocks in the arena that can be loaded", "usage.ready"),
        ("kvorum.kv_agent.arena.leased", "{block}", "of them, those that are being read", "usage.leased"),
    ):
        meters.gauge(name, unit, about, partial(_of_arenas, arenas, attrgetter(path)))
    for name, unit, about, path in (
        (
            "kvorum.kv_agent.arena.evicted",
            "{block}",
            "blocks evicted since the arena was made",
            "counters.evicted",
        ),
        (
            "kvorum.kv_agent.arena.corrupt",
            "{block}",
            "blocks freed since their bytes were not what was written",
            "counters.corrupt",
        ),
        (
            "kvorum.kv_agent.arena.reclaimed",
            "{slot}",
            "slots that dead writers left",
            "counters.reclaimed",
        ),
    ):
        meters.total(name, unit, about, partial(_of_arenas, arenas, attrgetter(path)))


def _of_agent(counts: Callable[[], AgentCounts], key: str, fields: Mapping[str, str]) -> list[Reading]:
    """One of each field, told apart by the attribute `key`, if it has one."""
    now = counts()
    return [(getattr(now, field), {key: value} if key else {}) for value, field in fields.items()]


def _of_arenas(
    arenas: Callable[[], Sequence[ArenaFigures]], read: Callable[[ArenaFigures], int]
) -> list[Reading]:
    return [(read(figures), {NAMESPACE: figures.namespace}) for figures in arenas()]
