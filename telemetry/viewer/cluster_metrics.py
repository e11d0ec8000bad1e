"""The metrics of the whole cluster as one Prometheus text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from telemetry.viewer.metric_table import MetricTable
from telemetry.viewer.prometheus import Exposition, family_name, label_text
from telemetry.viewer.receiver import Receiver

_MOST_REPLICAS: Final = 1024
_MAX_TEXT_CHARS: Final = 8 * 1024 * 1024
"""Of one replica's own metrics."""
_OWN: Final = (("service", "kvorum.viewer"),)


class ClusterMetrics:
    """What processes have sent, what replicas say of their engines, and what the viewer counts itself."""

    def __init__(self, table: MetricTable, receiver: Receiver) -> None:
        self._table, self._receiver = table, receiver
        self.scrape_failures = 0
        """Scrapes that had to do without the engines' metrics."""

    def exposition(self, engines: Mapping[str, str]) -> bytes:
        """The text; `engines`: the Prometheus text of each replica's engine, by the replica's name."""
        exposition = Exposition()
        self._table.expose(exposition)
        for replica, text in list(engines.items())[:_MOST_REPLICAS]:
            exposition.merge(text[:_MAX_TEXT_CHARS], "replica", replica)
        received = {
            label_text(_OWN, {"signal": signal, "outcome": outcome}): number
            for (signal, outcome), number in self._receiver.counts.items()
        }
        own = label_text(_OWN, {})
        _add(exposition, "kvorum.telemetry.received", "counter", "spans and points by outcome", received)
        for name, kind, about, value in (
            (
                "kvorum.viewer.scrape.failures",
                "counter",
                "scrapes without engines",
                self.scrape_failures,
            ),
            ("kvorum.viewer.processes", "gauge", "processes whose metrics are kept", self._table.processes),
            ("kvorum.viewer.series", "gauge", "series kept", self._table.series),
            ("kvorum.viewer.lines.refused", "gauge", "lines left out of this scrape", exposition.refused),
        ):
            _add(exposition, name, kind, about, {own: value})
        return exposition.text().encode("utf-8", "replace")


def _add(exposition: Exposition, name: str, kind: str, about: str, values: Mapping[str, int]) -> None:
    family = family_name(name, "", counter=kind == "counter")
    exposition.add(family, kind, about, [f"{family}{{{labels}}} {value}" for labels, value in values.items()])
