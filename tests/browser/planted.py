"""Spans and a fleet for the page to show: ordinary requests, and each kind that is not."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from telemetry import spans
from telemetry.record import SERVICE_INSTANCE, SERVICE_NAME, StoredEvent, StoredLink, StoredSpan

HOSTILE = "<img src=x onerror=\"window.hacked='yes'\">"
HOSTILE_LINK = "javascript:window.hacked='yes'"
SKEW_MS = 35.0
MESSAGE = "the stream of replica-1@22222222 broke before its first message"

_ROUTER = {SERVICE_NAME: "kvorum.router", SERVICE_INSTANCE: "router-0", "host.name": "head"}
_FACE = {SERVICE_NAME: "kvorum.http", SERVICE_INSTANCE: "ingress-1", "host.name": "head"}
_EPOCHS = {"replica-0": "11111111", "replica-1": "22222222", "replica-2": "33333333"}


def candidate(
    replica: str, cached: int, uncached: int, queue: float, *, kv: float = 0.2, more: str = ""
) -> str:
    """One entry of kvorum.candidates, as router/tracing.py writes it."""
    prefill = uncached * 0.21
    ttft = queue + prefill + 3.1 + 1.4
    return (
        f"{replica}@{_EPOCHS[replica]} cached={cached} pending=0 pooled=0 uncached={uncached} "
        f"queue={queue:.1f} prefill={prefill:.1f} fetch=0.0 interference=3.1 overhead=1.4 ttft={ttft:.1f} "
        f"harm=2.0 affinity=0.0 score={ttft + 2:.1f} sequences=3 backlog=512 kv={kv:.2f}{more}"
    )


@dataclass
class Planted:
    """Spans made so far; times are ms after `begin_ms`, which is since the epoch."""

    begin_ms: float
    made: list[StoredSpan] = field(default_factory=list)
    draw: random.Random = field(default_factory=lambda: random.Random(6))

    def id(self, digits: int) -> str:
        """A fresh hex id."""
        return f"{self.draw.getrandbits(4 * digits) | 1:0{digits}x}"

    def span(  # noqa: PLR0917 (the order in which one tells of a span)
        self,
        trace: str,
        parent: str | None,
        name: str,
        start_ms: float,
        length_ms: float,
        resource: Mapping[str, Any] = _ROUTER,
        attributes: Mapping[str, Any] | None = None,
        *,
        error: str = "",
        message: str = "",
        events: Sequence[tuple[str, float]] = (),
        links: Sequence[StoredLink] = (),
    ) -> str:
        """Add one; its id."""
        own = self.id(16)
        start_ns = round((self.begin_ms + start_ms) * 1e6)
        self.made.append(
            StoredSpan(
                trace_id=trace,
                span_id=own,
                parent_id=parent,
                name=name,
                kind="SERVER" if parent is None or "generate" in name else "INTERNAL",
                start_ns=start_ns,
                end_ns=start_ns + round(length_ms * 1e6),
                status="ERROR" if error else "UNSET",
                status_message=message,
                attributes={**(attributes or {}), **({spans.ERROR_TYPE: error} if error else {})},
                events=tuple(StoredEvent(one, start_ns + round(at * 1e6)) for one, at in events),
                links=tuple(links),
                resource=resource,
            )
        )
        return own

    def router(
        self,
        trace: str,
        parent: str | None,
        at: float,
        length: float,
        *,
        error: str = "",
        message: str = "",
        **more: Any,
    ) -> str:
        """A router's span of a request with its figures."""
        return self.span(
            trace, parent, spans.ROUTER_REQUEST, at, length, _ROUTER, more, error=error, message=message
        )

    def replica(
        self,
        trace: str,
        parent: str,
        at: float,
        replica: str,
        phases: tuple[float, float, float],
        **more: Any,
    ) -> str:
        """What a replica records of a request it served; (queue, prefill, decode) in ms."""
        queue, prefill, decode = phases
        host = {
            SERVICE_NAME: "kvorum.replica",
            SERVICE_INSTANCE: f"{replica}/{_EPOCHS[replica]}",
            "host.name": more.pop("host", "head"),
        }
        links, output = more.pop("links", ()), more.pop("output", 64)
        attributes = {
            spans.GEN_AI_REQUEST_MODEL: "smollm2",
            spans.REPLICA: replica,
            spans.EPOCH: _EPOCHS[replica],
            spans.GEN_AI_USAGE_INPUT_TOKENS: more.pop("prompt", 512),
            spans.GEN_AI_USAGE_OUTPUT_TOKENS: output,
            spans.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: more.pop("cached", 0),
            spans.GEN_AI_RESPONSE_FINISH_REASONS: ["length"],
            **more,
        }
        own = self.span(
            trace, parent, spans.REPLICA_GENERATE, at, queue + prefill + decode + 2.4, host, attributes
        )
        at += 1.2
        self.span(trace, own, spans.REPLICA_QUEUE, at, queue, host)
        self.span(
            trace,
            own,
            spans.REPLICA_PREFILL,
            at + queue,
            prefill,
            host,
            {spans.COMPUTED_TOKENS: 208},
            links=links,
        )
        self.span(
            trace, own, spans.REPLICA_DECODE, at + queue + prefill, decode, host,
            {spans.GEN_AI_USAGE_OUTPUT_TOKENS: output},
            events=((spans.FIRST_TOKEN, 0.0), (spans.LAST_TOKEN, decode)),
        )  # fmt: skip
        return own

    def decision(self, trace: str, parent: str, at: float, chosen: str, listed: Sequence[str]) -> None:
        """The router's choice."""
        attributes = {
            spans.POLICY: "predicted-time",
            spans.WHY: "least predicted time",
            spans.REPLICA: chosen,
            spans.EPOCH: _EPOCHS[chosen],
            spans.CANDIDATES: list(listed),
        }
        self.span(trace, parent, spans.ROUTER_ROUTE, at, 0.31, _ROUTER, attributes)

    def ordinary(self, at: float, tenant: str, replica: str, decode: float) -> str:
        """A request that went well."""
        trace, prefill = self.id(32), self.draw.uniform(9, 60)
        length = prefill + decode + 8
        figures = _figures(0.004 + prefill / 1e3, tenant)
        top = self.router(trace, None, at, length, **figures)
        self.span(trace, top, spans.ROUTER_TOKENIZE, at + 0.2, 0.9)
        self.decision(trace, top, at + 1.2, replica, [candidate(replica, 0, 64, 0.0)])
        forward = self.span(
            trace, top, spans.ROUTER_FORWARD, at + 1.7, length - 2, _ROUTER, {spans.REPLICA: replica}
        )
        self.replica(trace, forward, at + 2.4, replica, (0.4, prefill, decode))
        return trace


@dataclass(frozen=True)
class Scene:
    """All spans, and the traces that tests look for."""

    spans: list[StoredSpan]
    whole: str
    retried: str
    refused: str
    cancelled: str
    hostile: str
    kept: str


def scene(now_ms: float) -> Scene:
    """Ordinary requests of the last minutes, and one of each special kind after them."""
    made = Planted(now_ms - 240_000)
    for number in range(130):
        tenant = ("acme", "globex", "")[number % 3]
        made.ordinary(number * 1400.0, tenant, f"replica-{number % 2}", made.draw.lognormvariate(5.4, 0.8))
    return Scene(
        made.made,
        whole=_whole(made, 190_000.0),
        retried=_retried(made, 200_000.0),
        refused=_refused(made, 205_000.0),
        cancelled=_cancelled(made, 208_000.0),
        hostile=_hostile(made, 210_000.0),
        kept=_kept(made, 215_000.0),
    )


def _figures(ttft_s: float, tenant: str = "", **more: Any) -> dict[str, Any]:
    found = {
        spans.OUTCOME: "ok",
        spans.GEN_AI_RESPONSE_MODEL: "smollm2",
        spans.GEN_AI_USAGE_INPUT_TOKENS: 512,
        spans.GEN_AI_USAGE_OUTPUT_TOKENS: 64,
        spans.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 304,
        spans.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: ttft_s,
        **more,
    }
    return found | ({spans.TENANT: tenant} if tenant else {})


def _whole(made: Planted, at: float) -> str:
    """Through the HTTP face, TP 2 on another host whose clock is behind, with engine steps."""
    trace, steps = made.id(32), made.id(32)
    epoch = _EPOCHS["replica-2"]
    firsts = [made.id(16), made.id(16)]
    links = [StoredLink(steps, first, {spans.RANK: rank}) for rank, first in enumerate(firsts)]
    face = made.span(
        trace, None, spans.HTTP_REQUEST, at, 912.0, _FACE,
        {spans.HTTP_METHOD: "POST", spans.HTTP_ROUTE: "/v1/chat/completions", spans.HTTP_STATUS: 200},
    )  # fmt: skip
    top = made.router(trace, face, at + 6.0, 902.0, **_figures(0.188, "acme"))
    made.span(trace, top, spans.ROUTER_TOKENIZE, at + 6.3, 2.1)
    made.span(trace, top, spans.ROUTER_ADMIT, at + 8.6, 41.5)
    degraded = " degraded='unsynced: a gap in its updates'"
    listed = [
        candidate("replica-2", 304, 208, 18.0, kv=0.46),
        candidate("replica-0", 0, 512, 0.0, kv=0.91),
        candidate("replica-1", 128, 384, 164.0, kv=0.33, more=degraded),
    ]
    made.decision(trace, top, at + 50.3, "replica-2", listed)
    forward = made.span(
        trace, top, spans.ROUTER_FORWARD, at + 51.0, 856.0, _ROUTER,
        {spans.REPLICA: "replica-2", spans.EPOCH: epoch, spans.ATTEMPT: 1, spans.PREDICTED_TTFT_S: 0.0662},
        events=[(spans.FIRST_TOKEN, 144.0)],
    )  # fmt: skip
    behind = at + 52.5 - SKEW_MS
    made.replica(
        trace, forward, behind, "replica-2", (22.0, 116.0, 706.0),
        host="far", links=links, cached=304, **{spans.REQUEST_ID: "chatcmpl-8d1c"},
    )  # fmt: skip
    for rank in (0, 1):
        for step in (0, 1):
            _step(made, steps, firsts, (rank, step), behind + 23.4 + 58 * step)
    return trace


def _step(made: Planted, trace: str, firsts: list[str], place: tuple[int, int], at: float) -> None:
    """One rank's span of one step; `place` is (rank, step), `firsts` the ids that the request links to."""
    rank, step = place
    resource = {
        SERVICE_NAME: "kvorum.shard",
        SERVICE_INSTANCE: f"replica-2/{_EPOCHS['replica-2']}/{rank}",
        "host.name": "far",
    }
    attributes = {
        spans.STEP_NUMBER: 4711 + step, spans.STEP_TOKENS: 136 + 3 * rank, spans.STEP_REQUEST_TOKENS: 104,
        spans.STEP_PATH: "overlapped", spans.STEP_CHUNKS: 2, spans.RANK: rank, spans.STEP_FORWARD_S: 0.057,
        spans.STEP_COMPUTE_S: 0.044, spans.STEP_ALL_REDUCE_S: 0.031,
        spans.STEP_EXPOSED_S: 0.009 + 0.003 * rank,
    }  # fmt: skip
    parent = None if place == (0, 0) else firsts[0]
    made.span(trace, parent, spans.ENGINE_STEP, at, 57.0 + rank, resource, attributes)
    if step == 0:
        made.made[-1] = replace(made.made[-1], span_id=firsts[rank])


def _retried(made: Planted, at: float) -> str:
    trace = made.id(32)
    top = made.router(trace, None, at, 1210.0, **_figures(0.95, "globex"))
    made.decision(
        trace,
        top,
        at + 1,
        "replica-1",
        [candidate("replica-1", 0, 512, 0.0), candidate("replica-0", 0, 512, 30.0)],
    )
    made.span(
        trace, top, spans.ROUTER_FORWARD, at + 1.5, 820.0, _ROUTER,
        {spans.REPLICA: "replica-1", spans.ATTEMPT: 1},
        error="REPLICA_LOST", message=MESSAGE,
    )  # fmt: skip
    made.decision(trace, top, at + 822, "replica-0", [candidate("replica-0", 0, 512, 30.0)])
    forward = made.span(
        trace,
        top,
        spans.ROUTER_FORWARD,
        at + 823,
        386.0,
        _ROUTER,
        {spans.REPLICA: "replica-0", spans.ATTEMPT: 2},
    )
    made.replica(trace, forward, at + 824, "replica-0", (12.0, 110.0, 255.0))
    return trace


def _refused(made: Planted, at: float) -> str:
    trace = made.id(32)
    message = "64 requests wait, the queue is full: try again in 2.0 s"
    figures = {spans.OUTCOME: "refused", spans.TENANT: "acme"}
    top = made.router(trace, None, at, 0.8, error="OVERLOADED", message=message, **figures)
    made.span(trace, top, spans.ROUTER_ADMIT, at + 0.4, 0.2, _ROUTER, error="OVERLOADED")
    return trace


def _cancelled(made: Planted, at: float) -> str:
    trace = made.id(32)
    figures = _figures(0.02, "globex", **{spans.OUTCOME: "cancelled"})
    top = made.router(trace, None, at, 310.0, error="cancelled", message="the client left", **figures)
    made.span(
        trace,
        top,
        spans.ROUTER_FORWARD,
        at + 2,
        307.0,
        _ROUTER,
        {spans.REPLICA: "replica-0"},
        error="cancelled",
    )
    return trace


def _hostile(made: Planted, at: float) -> str:
    """As from a stranger's OTLP export: markup, scripts, invisible characters, an endless value."""
    trace = made.id(32)
    stranger = {SERVICE_NAME: HOSTILE, SERVICE_INSTANCE: "\u202egnp.exe\u202c", "host.name": HOSTILE}
    attributes = {
        spans.TENANT: HOSTILE,
        spans.REPLICA: HOSTILE,
        spans.CANDIDATES: [
            HOSTILE,
            f"{HOSTILE}@{HOSTILE} cached={HOSTILE} ttft=NaN score=1e999",
            "",
            "\x00=\x00",
        ],
        spans.WHY: HOSTILE,
        "<script>window.hacked='yes'</script>": HOSTILE_LINK,
        "__proto__": "polluted",
        "long": "A" * 100_000,
    }
    top = made.span(
        trace, None, HOSTILE, at, 5.0, stranger, attributes,
        error=HOSTILE, message=HOSTILE, events=[(HOSTILE, 1.0)],
        links=[StoredLink(HOSTILE_LINK, HOSTILE, {"a": HOSTILE})],
    )  # fmt: skip
    made.span(trace, top, spans.ROUTER_ROUTE, at + 1, 1.0, stranger, attributes)
    return trace


def _kept(made: Planted, at: float) -> str:
    """Not sampled, kept by the router because it was slow."""
    trace = made.id(32)
    figures = _figures(5.8, "acme", **{"kvorum.sampled_by": "slow"})
    top = made.router(trace, None, at, 7300.0, **figures)
    made.span(trace, top, spans.ROUTER_ADMIT, at + 2, 5100.0)
    made.span(trace, top, spans.ROUTER_FORWARD, at + 5104, 2190.0, _ROUTER, {spans.REPLICA: "replica-1"})
    return trace


def fleet() -> dict[str, Any]:
    """As the viewer's actor gives it: the controller's status, and what each router knows."""
    states = (("replica-0", "READY", 0.91), ("replica-1", "DRAINING", 0.33), ("replica-2", "READY", 0.46))
    return {
        "name": "kvorum",
        "model": {"name": "smollm2", "max_model_len": 4096},
        "tensor_parallel_size": 2,
        "replicas": [_replica(number, *state) for number, state in enumerate(states)],
        "routers": [
            {"name": "router-0", "address": "127.0.0.1:50051", "pid": 4001, "node": "head", "alive": True}
        ],
        "routing": {
            "router-0": {
                "policy": "predicted-time",
                "in_flight": 7,
                "leases": 7,
                "queues": [
                    {
                        "model": "smollm2",
                        "length": 3,
                        "oldest_wait_s": 0.42,
                        "predicted_drain_s": 0.9,
                        "refused": 12,
                    }
                ],
                "replicas": [_view(*state) for state in states],
            },
            "router-1": {"error": "no answer: connection refused"},
        },
    }


def _replica(number: int, name: str, state: str, kv: float) -> dict[str, Any]:
    return {
        "replica": name,
        "epoch": _EPOCHS[name],
        "state": state,
        "state_for_s": 3725.0,
        "age_s": 3900.0,
        "restarts": number,
        "last_error": "the engine died: shard 1 of replica-1 ended (exit 137)" if number == 1 else "",
        "shards": [
            {
                "rank": rank,
                "node": "head",
                "pid": 5000 + rank,
                "cores": [rank],
                "collective": "shm",
                "alive": True,
            }
            for rank in (0, 1)
        ],
        "load": {
            "running": 3 + number,
            "waiting": number,
            "kv_usage": kv,
            "prefix_queries_tokens": 20_000,
            "prefix_hits_tokens": 12_400 - 3000 * number,
            "generated_tokens": 182_000,
            "preemptions": 0,
            "prefill_backlog_tokens": 512 * number,
            "prefill_ms_per_token": 0.21,
            "decode_step_ms": 9.7,
        },
    }


def _view(name: str, state: str, _kv: float) -> dict[str, Any]:
    return {
        "replica": name,
        "epoch": _EPOCHS[name],
        "standing": "ready" if state == "READY" else "out",
        "degraded": "unsynced: a gap in its updates" if name == "replica-2" else "",
        "blocks": 812,
        "leases": 2,
        "ttft_error_ms": 11.4,
        "cached_error_tokens": 3.0,
    }
