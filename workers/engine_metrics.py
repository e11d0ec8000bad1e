"""vLLM's own metrics of the engine that this process fronts."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric, generate_latest

_FAMILIES = "vllm:"


def engine_metrics() -> str:
    """Prometheus text of the families vllm:*. Takes milliseconds: not for an event loop."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry  # noqa: PLC0415 - imports vLLM

    return exposition(get_prometheus_registry())


def exposition(registry: CollectorRegistry) -> str:
    """Those families of `registry`, as text of format 0.0.4."""
    return generate_latest(_Families(registry)).decode()


class _Families(CollectorRegistry):
    """A registry without what is not vLLM's."""

    def __init__(self, whole: CollectorRegistry) -> None:
        super().__init__()
        self._whole = whole

    def collect(self) -> Iterable[Metric]:
        return [family for family in self._whole.collect() if family.name.startswith(_FAMILIES)]
