"""Tracing of one process: its provider, where finished spans go, and how to end it."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanContext
from opentelemetry.util.types import AttributeValue

from telemetry import spans
from telemetry.config import TelemetryConfig
from telemetry.destinations import OTLP, STORE, journal_folder, open_journal, open_pipes, open_store
from telemetry.ids import GivenIds
from telemetry.journal import SpanJournal
from telemetry.metrics import SCOPE, Meters, Reading
from telemetry.otlp import sdk_is_disabled
from telemetry.pipe import PipeCounts, SpanPipe
from telemetry.record import SERVICE_INSTANCE, SERVICE_NAME
from telemetry.recovery import recover
from telemetry.tail import Tail

logger = logging.getLogger(__name__)

EXIT_FLUSH_S = 2.0

__all__ = ["EXIT_FLUSH_S", "OTLP", "STORE", "Telemetry", "configure", "open_store"]


class Telemetry:
    """The tracing and the metrics of this process. Hold it and pass it on: nothing looks it up globally."""

    def __init__(
        self,
        config: TelemetryConfig,
        provider: TracerProvider | None,
        pipes: Mapping[str, SpanPipe],
        meters: Meters,
        *,
        ids: GivenIds | None = None,
        tail: Tail | None = None,
        journal: SpanJournal | None = None,
    ) -> None:
        self.config = config
        self.provider = provider
        self.tail = tail
        self._journal = journal
        self._ids = ids
        self._abandoned: list[Callable[[], None]] = []
        self.tracer: trace.Tracer = provider.get_tracer(SCOPE) if provider else trace.NoOpTracer()
        self.meters = meters
        self._pipes = dict(pipes)
        if provider is not None:
            atexit.register(self.shutdown)
        meters.total("kvorum.telemetry.spans", "{span}", "spans by destination and fate", self._fates)
        meters.total(
            "kvorum.telemetry.malformed",
            "{header}",
            "callers' trace headers that were ignored",
            lambda: [(count, {"header": header}) for header, count in list(spans.malformed.items())],
        )

    @classmethod
    def silent(cls) -> Telemetry:
        """Records nothing."""
        return cls(TelemetryConfig(enabled=False), None, {}, Meters.silent())

    def samples(self, trace_id: int, name: str) -> bool:
        """Whether this process's sampler wants a new trace with this id that begins with a span `name`."""
        if self.provider is None:
            return False
        # Not None, which stands for the current context and the span that happens to be open in it.
        result = self.provider.sampler.should_sample(Context(), trace_id, name)
        return result.decision is Decision.RECORD_AND_SAMPLE

    def record(
        self,
        name: str,
        own: SpanContext,
        parent: SpanContext | None,
        *,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        """Record a span that is over, under ids that its caller derived.

        Args:
            own: the span's ids; whether it is recorded is the sampler's decision, as for any other.
            parent: a span of the same trace, which another process may record; None for the trace's first.
            start_ns, end_ns: nanoseconds since the epoch.
        """
        if self._ids is None:
            return
        with self._ids.given(own.trace_id, own.span_id):
            span = spans.start(
                self.tracer, name, spans.remote(parent), attributes=attributes, start_ns=start_ns
            )
        spans.finish(span, end_ns=end_ns)

    def counts(self) -> dict[str, PipeCounts]:
        """Spans exported, dropped and pending, by destination ("store", "otlp")."""
        return {name: pipe.counts for name, pipe in self._pipes.items()}

    def at_shutdown(self, abandon: Callable[[], None]) -> None:
        """Call it first at `shutdown`, in whichever thread that is: it is to end the spans still open."""
        self._abandoned.append(abandon)

    def start(self) -> None:
        """Start the exporting threads now, where a thread must not inherit a later caller's CPU affinity."""
        for pipe in self._pipes.values():
            pipe.start()

    def flush(self, timeout_s: float) -> bool:
        """Export what has ended so far; False when that takes longer than `timeout_s`.

        Blocks: from a coroutine call it with asyncio.to_thread.
        """
        deadline = time.monotonic() + timeout_s
        # All of them are asked before any is waited for, so they work side by side.
        for pipe in self._pipes.values():
            pipe.flush(0)
        results = [pipe.flush(max(deadline - time.monotonic(), 0)) for pipe in self._pipes.values()]
        return all(results)

    def shutdown(self, timeout_s: float = EXIT_FLUSH_S) -> None:
        """End open spans, flush for at most `timeout_s`, then stop; later spans are dropped. Idempotent.

        Runs at exit by itself, also of a Ray worker that got SIGTERM, but a plain process does not exit so:
        there the server's drain has to call it. Blocks.
        """
        deadline = time.monotonic() + timeout_s
        atexit.unregister(self.shutdown)
        abandoned, self._abandoned = self._abandoned, []
        for abandon in abandoned:
            try:
                abandon()
            except Exception:  # it sees a process that is going down; the others have their turn
                logger.exception("open spans were not ended")
        self.flush(timeout_s)
        for pipe in self._pipes.values():
            pipe.shutdown(0)
        if self._journal is not None:
            self._journal.shutdown()
        self.meters.shutdown(max(deadline - time.monotonic(), 0.0))

    def _fates(self) -> list[Reading]:
        return [
            (count, {"destination": name, "state": state})
            for name, counts in self.counts().items()
            for state, count in (
                ("exported", counts.exported),
                ("failed", counts.failed),
                ("refused", counts.refused),
            )
        ]


def configure(
    service: str, instance: str, config: TelemetryConfig, facts: Mapping[str, str | int] | None = None
) -> Telemetry:
    """Start tracing in this process.

    Args:
        service: service.name, such as "kvorum.router".
        instance: service.instance.id, such as a replica's name; unique within the service.
        config: what to record and keep.
        facts: what else holds of all that this process records; resource attributes.

    The provider is ours alone: another library that has set or will set the global one (vLLM,
    Ray) does not change what is recorded through the returned tracer. Ours becomes the global
    one when there is none. Trouble with a destination is logged, never raised.
    """
    if not config.enabled or sdk_is_disabled(os.environ):
        return Telemetry(config, None, {}, Meters.silent())
    resource = _resource(service, instance, facts or {})
    ids = GivenIds()
    provider = TracerProvider(
        # None: the SDK reads OTEL_TRACES_SAMPLER itself.
        sampler=None
        if os.environ.get("OTEL_TRACES_SAMPLER")
        else ParentBased(TraceIdRatioBased(config.sample_ratio)),
        resource=resource,
        shutdown_on_exit=False,
        id_generator=ids,
        span_limits=_limits(config),
    )
    journal = open_journal(config, resource.attributes)
    if journal is not None:
        provider.add_span_processor(journal)  # before those that tell it what they have exported
    pipes = open_pipes(config, journal)
    for pipe in pipes.values():
        provider.add_span_processor(pipe)
    tail = _tail(config, provider, pipes, ids)
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(provider)
    recover(journal_folder(config), pipes.values(), ids)
    meters = Meters.configured(os.environ, resource, config.viewer)
    return Telemetry(config, provider, pipes, meters, ids=ids, tail=tail, journal=journal)


def _tail(
    config: TelemetryConfig, provider: TracerProvider, pipes: Mapping[str, SpanPipe], ids: GivenIds
) -> Tail | None:
    """None where all is sampled, or another sampler than ours decides."""
    if config.sample_ratio == 1 or config.keep_slow_s == 0 or os.environ.get("OTEL_TRACES_SAMPLER"):
        return None
    keeping = TracerProvider(
        sampler=ALWAYS_ON,
        resource=provider.resource,
        shutdown_on_exit=False,
        id_generator=ids,
        span_limits=_limits(config),
    )
    for pipe in pipes.values():
        keeping.add_span_processor(pipe)
    return Tail(keeping.get_tracer(SCOPE), ids, slow_s=config.keep_slow_s)


def _limits(config: TelemetryConfig) -> SpanLimits:
    return SpanLimits(max_attribute_length=config.max_attribute_chars)


def _resource(service: str, instance: str, facts: Mapping[str, str | int]) -> Resource:
    own: dict[str, str | int] = {
        **facts,
        SERVICE_NAME: service,
        SERVICE_INSTANCE: instance,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    # One variable is inherited by processes of several roles, so the role given here wins.
    return Resource.create(own)
