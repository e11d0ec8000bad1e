"""What `kvorum doctor` reasons from: requests read from their spans, replicas, and metrics. Pure.

Times are seconds, sizes tokens, unless a name says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protos import admin_pb2
from telemetry import spans as names
from telemetry.record import StoredSpan

_TERM = re.compile(r"(\w+)=(-?\d+(?:\.\d+)?)")
"""Of a line of kvorum.candidates; what the line says in words is no number."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica that a request was or was not sent to, as the router saw it then."""

    replica: str
    cached: int
    """Prompt tokens resident there."""
    kv_usage: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that reached a replica, or failed before. Phases it never came to last 0 s."""

    trace_id: str
    start_s: float
    """Since the epoch."""
    duration_s: float
    replica: str = ""
    tenant: str = ""
    error: str = ""
    """error.type; empty of one that succeeded."""
    policy: str = ""
    degraded: str = ""
    """Why the router knew nothing exact of the chosen replica's cache."""
    candidates: tuple[Candidate, ...] = ()
    """The chosen one first."""
    prompt: int = 0
    cached: int = 0
    computed: int = 0
    output: int = 0
    """Per sequence."""
    ttft_s: float | None = None
    held_s: float = 0.0
    """In the router's queue."""
    queue_s: float = 0.0
    """In the engine's queue."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0
    """Since the epoch; the end of the prefill."""

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None of too few of them."""
        return self.decode_s / (self.output - 1) if self.output > 1 and self.decode_s > 0 else None

    @property
    def waited_s(self) -> float:
        """In both queues."""
        return self.held_s + self.queue_s

    @property
    def missed(self) -> int:
        """Prompt tokens that some other replica had cached and the chosen one had not."""
        chosen, *others = self.candidates or (Candidate("", 0, 0.0),)
        return max((other.cached - max(chosen.cached, self.cached) for other in others), default=0)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A recorded engine step of a prefill, on one shard."""

    tokens: int
    forward_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a replica says of itself now; zeros where it does not say."""

    name: str
    state: str = "ready"
    last_error: str = ""
    kv_tokens: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    max_sequences: int = 0
    max_batch_tokens: int = 0
    overlap: str = ""
    """As configured: auto, off or a number of chunks; empty without tensor parallelism."""
    collective: str = ""
    exposed: float | None = None
    """Share of the forward passes spent waiting for an AllReduce, since the engine's start."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Samples in the Prometheus form, (labels, value) by name."""

    samples: Mapping[str, Sequence[tuple[Mapping[str, str], float]]] = field(default_factory=dict)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The samples of `name` summed by one label's value."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            sums[labels.get(label, "")] = sums.get(labels.get(label, ""), 0.0) + value
        return sums


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of the recent past of one cluster."""

    requests: Sequence[RequestRecord]
    replicas: Sequence[ReplicaFacts] = ()
    steps: Sequence[StepRecord] = ()
    metrics: Metrics = Metrics()


def read_request(spans: Sequence[StoredSpan]) -> RequestRecord | None:
    """One trace as a request; None when its router's span is missing. Retries count as their last attempt."""
    by_name: dict[str, StoredSpan] = {}
    held_s = 0.0
    for span in sorted(spans, key=lambda span: span.start_ns):
        by_name[span.name] = span
        held_s += _seconds(span) if span.name == names.ROUTER_ADMIT else 0.0
    request = by_name.get(names.ROUTER_REQUEST)
    if request is None:
        return None
    whole = by_name.get(names.HTTP_REQUEST, request)
    route, generate, prefill = (
        by_name[name].attributes if name in by_name else {}
        for name in (names.ROUTER_ROUTE, names.REPLICA_GENERATE, names.REPLICA_PREFILL)
    )
    told = {**request.attributes}
    prompt, cached = (
        _int(told, name)
        for name in (names.GEN_AI_USAGE_INPUT_TOKENS, names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS)
    )
    decode = by_name.get(names.REPLICA_DECODE)
    return RequestRecord(
        trace_id=request.trace_id,
        start_s=whole.start_ns / 1e9,
        duration_s=_seconds(whole),
        replica=str(generate.get(names.REPLICA) or route.get(names.REPLICA) or ""),
        tenant=str(told.get(names.TENANT, "")),
        error=str(told.get(names.ERROR_TYPE, "")),
        policy=str(route.get(names.POLICY, "")),
        degraded=str(route.get(names.DEGRADED, "")),
        candidates=read_candidates(route.get(names.CANDIDATES)),
        prompt=prompt,
        cached=cached,
        computed=_int(prefill, names.COMPUTED_TOKENS) or max(prompt - cached, 0),
        output=_int(told, names.GEN_AI_USAGE_OUTPUT_TOKENS)
        // max(_int(told, names.GEN_AI_REQUEST_CHOICE_COUNT), 1),
        ttft_s=_float(told.get(names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK)),
        held_s=held_s,
        queue_s=_phase(by_name.get(names.REPLICA_QUEUE)),
        prefill_s=_phase(by_name.get(names.REPLICA_PREFILL)),
        decode_s=_phase(decode),
        first_token_s=decode.start_ns / 1e9 if decode else 0.0,
    )


def read_candidates(lines: Any) -> tuple[Candidate, ...]:
    """The attribute kvorum.candidates of a routing decision; what is no such line is left out."""
    found = []
    for line in lines if isinstance(lines, list | tuple) else ():
        key, _, rest = str(line).partition(" ")
        terms = {name: float(value) for name, value in _TERM.findall(rest.partition(" degraded=")[0])}
        if "cached" in terms:
            found.append(Candidate(key.partition("@")[0], int(terms["cached"]), terms.get("kv", 0.0)))
    return tuple(found)


def read_step(span: StoredSpan) -> StepRecord | None:
    """A span of an engine step; None of one that is not, or whose device does not tell its times."""
    told = span.attributes
    forward, exposed = (_float(told.get(name)) for name in (names.STEP_FORWARD_S, names.STEP_EXPOSED_S))
    if span.name != names.ENGINE_STEP or not forward or exposed is None:
        return None
    return StepRecord(_int(told, names.STEP_TOKENS), forward, exposed)


def read_replicas(
    status: admin_pb2.ClusterStatus, overlap: admin_pb2.OverlapStatus | None = None
) -> list[ReplicaFacts]:
    """What the controller says of each replica, with what its shards say of their AllReduces."""
    shards = {replica.replica: list(replica.shards) for replica in overlap.replicas} if overlap else {}
    return [
        ReplicaFacts(
            name=replica.replica,
            state=admin_pb2.ReplicaState.Name(replica.state).lower(),
            last_error=replica.last_error,
            kv_tokens=replica.load.kv_blocks * replica.load.block_size,
            kv_usage=replica.load.kv_usage,
            preemptions=replica.load.preemptions,
            max_sequences=replica.load.max_sequences,
            max_batch_tokens=replica.load.max_batch_tokens,
            **_communication(shards.get(replica.replica, [])),
        )
        for replica in status.replicas
    ]


def _communication(shards: Sequence[admin_pb2.ShardOverlap]) -> dict[str, Any]:
    told = [shard for shard in shards if not shard.silence]
    if len(shards) < 2 or not told:
        return {}
    paths = [totals for shard in told for totals in (shard.stock, shard.overlapped) if totals.timed_steps]
    # Where only some steps are timed their share of the forward passes is a guess, so it is scaled.
    forward_s = sum(totals.forward_s * totals.timed_steps / max(totals.steps, 1) for totals in paths)
    exposed_s = sum(totals.exposed_s for totals in paths)
    return {
        "overlap": told[0].mode,
        "collective": told[0].collective,
        "exposed": exposed_s / forward_s if forward_s > 0 else None,
    }


def read_metrics(text: str) -> Metrics:
    """Prometheus text as samples by name; what is no such text gives none."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - doctor alone

    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError:
        return Metrics()
    return Metrics(samples)


def mean(values: Iterable[float]) -> float:
    """0.0 of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _seconds(span: StoredSpan) -> float:
    return max(span.end_ns - span.start_ns, 0) / 1e9


def _phase(span: StoredSpan | None) -> float:
    """The engine's own figure where the span had to be shortened."""
    if span is None:
        return 0.0
    measured = _float(span.attributes.get(names.MEASURED_S))
    return _seconds(span) if measured is None else measured


def _int(attributes: Mapping[str, Any], name: str) -> int:
    return int(_float(attributes.get(name)) or 0)


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
