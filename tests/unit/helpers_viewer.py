"""Spans of a request as Kvorum records it, OTLP exports as anybody may send them, and a viewer that runs."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from telemetry import spans
from telemetry.record import StoredEvent, StoredLink, StoredSpan
from telemetry.store import SpanStore
from telemetry.viewer.server import Viewer
from telemetry.viewer.settings import ViewerSettings

MS = 1_000_000
PROTOBUF = {"content-type": "application/x-protobuf"}
CANDIDATE = (
    "{key} cached=64 pending=0 pooled=0 uncached=36 queue=1.5 prefill=36.0 fetch=0.0 interference=0.2 "
    "overhead=2.0 ttft=39.7 harm=0.5 affinity=0.0 score=40.2 sequences=3 backlog=120 kv=0.25"
)
_ids = itertools.count(1)


def a_span(
    name: str,
    start_ms: float,
    end_ms: float,
    *,
    trace: int = 1,
    parent: StoredSpan | str | None = None,
    host: str = "a",
    base_ns: int = 1_700_000_000_000_000_000,
    service: str = "kvorum.test",
    error: str | None = None,
    events: Sequence[tuple[str, float]] = (),
    links: Sequence[StoredLink] = (),
    **attributes: Any,
) -> StoredSpan:
    """A span whose times are ms after `base_ns`; attribute names have __ for dots."""
    known = {name.replace("__", "."): value for name, value in attributes.items()}
    if error:
        known["error.type"] = error
    return StoredSpan(
        trace_id=f"{trace:032x}",
        span_id=f"{next(_ids):016x}",
        parent_id=parent.span_id if isinstance(parent, StoredSpan) else parent,
        name=name,
        kind="SERVER",
        start_ns=base_ns + round(start_ms * MS),
        end_ns=base_ns + round(end_ms * MS),
        status="ERROR" if error else "UNSET",
        attributes=known,
        events=tuple(StoredEvent(event, base_ns + round(at * MS)) for event, at in events),
        links=tuple(links),
        resource={"service.name": service, "service.instance.id": "i0", "host.name": host},
    )


def a_request(
    trace: int = 1,
    *,
    tenant: str = "acme",
    replica: str = "replica-0",
    error: str | None = None,
    ms: float = 200.0,
    base_ns: int | None = None,
    skew_ms: float = 0.0,
) -> list[StoredSpan]:
    """HTTP face, router, replica: first token after 60 ms, 11 tokens, the last after `ms` - 10 ms.

    `skew_ms`: the replica is on another host, whose clock is so far ahead.
    """
    base = time.time_ns() if base_ns is None else base_ns
    common: dict[str, Any] = {"trace": trace, "base_ns": base}
    away: dict[str, Any] = {**common, "host": "b" if skew_ms else "a", "base_ns": base + round(skew_ms * MS)}
    http = a_span(spans.HTTP_REQUEST, 0, ms, service="kvorum.http", error=error, **common)
    usage = {
        "gen_ai__usage__input_tokens": 100,
        "gen_ai__usage__output_tokens": 11,
        "gen_ai__usage__cache_read__input_tokens": 64,
    }
    asked = a_span(
        spans.ROUTER_REQUEST, 2, ms - 2, parent=http, service="kvorum.router", error=error,
        kvorum__tenant=tenant, kvorum__outcome="error" if error else "ok", **usage, **common,
    )  # fmt: skip
    route = a_span(
        spans.ROUTER_ROUTE, 4, 5, parent=asked, service="kvorum.router", kvorum__replica=replica,
        kvorum__epoch="e1",
        kvorum__candidates=[CANDIDATE.format(key=key) for key in (f"{replica}@e1", "replica-9@e2")], **common,
    )  # fmt: skip
    forward = a_span(
        spans.ROUTER_FORWARD, 6, ms - 4, parent=asked, service="kvorum.router", kvorum__replica=replica,
        kvorum__epoch="e1", events=[(spans.FIRST_TOKEN, 60)], **common,
    )  # fmt: skip
    served = a_span(
        spans.REPLICA_GENERATE, 8, ms - 6, parent=forward, service="kvorum.replica", kvorum__replica=replica,
        **usage, **away,
    )  # fmt: skip
    decode = a_span(
        spans.REPLICA_DECODE, 58, ms - 10, parent=served, service="kvorum.replica",
        events=[(spans.FIRST_TOKEN, 58), (spans.LAST_TOKEN, ms - 10)],
        gen_ai__usage__output_tokens=11, **away,
    )  # fmt: skip
    return [http, asked, route, forward, served, decode]


def an_export(*, name: str = "span", start_ns: int | None = None, **fields: Any) -> ExportTraceServiceRequest:
    """One span, valid unless `fields` say otherwise."""
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    span.trace_id, span.span_id, span.name = bytes([1] * 16), bytes([2] * 8), name
    span.start_time_unix_nano = start_ns or time.time_ns()
    span.end_time_unix_nano = span.start_time_unix_nano + 5 * MS
    for field, value in fields.items():
        setattr(span, field, value)
    return request


def metrics(resource: Mapping[str, str], *found: Metric) -> ExportMetricsServiceRequest:
    """Metrics of one process."""
    request = ExportMetricsServiceRequest()
    group = request.resource_metrics.add()
    for key, value in resource.items():
        group.resource.attributes.add(key=key).value.string_value = value
    group.scope_metrics.add().metrics.extend(found)
    return request


def a_gauge(name: str, values: Mapping[str, float], *, unit: str = "", time_ns: int = 1) -> Metric:
    """A gauge with a point for each value of the attribute `k`."""
    metric = Metric(name=name, unit=unit, description=f"about {name}")
    for key, value in values.items():
        point = metric.gauge.data_points.add(as_double=value, time_unix_nano=time_ns)
        point.attributes.add(key="k").value.string_value = key
    return metric


@dataclass
class Running:
    http: httpx.AsyncClient
    otlp: str
    store: SpanStore

    async def metric(self, name: str) -> float:
        """The one sample whose line begins so; 0 when there is none."""
        text = (await self.http.get("/metrics")).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    async def received(self, outcome: str, signal: str = "traces") -> float:
        labels = f'{{service="kvorum.viewer",outcome="{outcome}",signal="{signal}"}}'
        return await self.metric(f"kvorum_telemetry_received_total{labels}")


@asynccontextmanager
async def running(
    tmp_path: Path, fleet: Any = None, scrape: Any = None, **settings: Any
) -> AsyncIterator[Running]:
    store = SpanStore(tmp_path / "traces.db")
    viewer = Viewer(ViewerSettings(http_port=0, **settings), store=store, fleet=fleet, scrape=scrape)
    addresses = await viewer.start()
    try:
        async with httpx.AsyncClient(base_url=addresses.http, timeout=30, verify=False) as http:
            yield Running(http, addresses.otlp, store)
    finally:
        await viewer.stop()
