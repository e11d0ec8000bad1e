"""Engine steps as metrics and spans, recorded in the shard that computes them.

A step serves many requests, so its spans are no children of theirs: each sampled request has a second
trace with its prefill steps, to which its prefill span links. Replica and shards agree on that trace's
ids without a word, because they derive them: from the epoch, the request's id, the rank, and how
many prefill steps of the request came before.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Link

from telemetry import spans
from telemetry.config import TelemetryConfig
from telemetry.logs import configure_logging
from telemetry.setup import Telemetry, configure

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from workers.overlap.report import StepRecord
    from workers.placement import ReplicaPlacement

log = logging.getLogger(__name__)

TELEMETRY_KEY = "kvorum_telemetry"
"""Key of vLLM's `additional_config` under which a TelemetryConfig travels to the shards."""

SERVICE = "kvorum.shard"

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_REMEMBERED_REQUESTS = 4096
"""More than an engine prefills at a time; a forgotten one's steps would be numbered from 0 again."""
_REQUEST_STEPS = 64
"""Steps recorded of one request: with speculative decoding, decode steps look like prefill."""
_STEP_SPANS = 16
"""Spans recorded of one step; one takes tens of microseconds of the thread that computes."""

# vLLM makes ids unique with 8 random hex digits, and puts "INDEX_" before those of several sequences.
_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")


@dataclass(frozen=True)
class StepTrace:
    """The trace of one request's prefill steps in one epoch."""

    trace_id: int

    @classmethod
    def of(cls, epoch: str, request_id: str) -> StepTrace:
        """Of a request as the replica calls it. A repeated request id continues its first one's trace."""
        digest = blake2b(f"{epoch}\0{request_id}".encode(), digest_size=16).digest()
        return cls(int.from_bytes(digest) or 1)

    def span_id(self, rank: int, step: int) -> int:
        """Id of one rank's span of the request's prefill step number `step`, from 0."""
        place = b"".join((self.trace_id.to_bytes(16), rank.to_bytes(4), step.to_bytes(8)))
        return int.from_bytes(blake2b(place, digest_size=8).digest()) or 1

    def is_sampled(self, telemetry: Telemetry) -> bool:
        """The same answer in all processes with the same settings.

        Decided by the upper half of the id for `step_ratio`, and by the process's sampler, which looks at
        the lower one and may switch all off. Both draw by this trace's id: whether the request's own trace
        is recorded is drawn apart, since a shard does not know it.
        """
        chosen = self.trace_id >> 64 < telemetry.config.step_ratio * 2.0**64
        return chosen and telemetry.samples(self.trace_id, spans.ENGINE_STEP)


def links(telemetry: Telemetry, placement: ReplicaPlacement, request_id: str, sequences: int) -> list[Link]:
    """Links to every rank's span of the step in which this request's prefill begins; [] if not sampled.

    Args:
        sequences: how many the request asks for. The first of several stands for all: the others find
            its prompt in the cache.
    """
    steps = StepTrace.of(placement.epoch, f"0_{request_id}" if sequences > 1 else request_id)
    if not steps.is_sampled(telemetry):
        return []
    return [
        Link(spans.elsewhere(steps.trace_id, steps.span_id(slot.rank, 0)), {spans.RANK: slot.rank})
        for slot in placement.slots
    ]


def external_id(engine_id: str) -> str:
    """The request id given to the engine, from the one the engine goes by."""
    return _SUFFIX.sub("", engine_id)


def build(values: Mapping[str, Any] | None, placement: ReplicaPlacement, rank: int) -> StepTracing:
    """The observer of this shard process; never raises, a silent one must do where telemetry fails.

    Args:
        values: what `additional_config` holds under TELEMETRY_KEY; None records nothing.
    """
    telemetry = Telemetry.silent()
    if values is not None:
        instance = f"{placement.replica}/{placement.epoch}/{rank}"
        facts: dict[str, str | int] = {
            spans.REPLICA: placement.replica,
            spans.EPOCH: placement.epoch,
            spans.RANK: rank,
        }
        try:
            config = TelemetryConfig.model_validate(values)
            configure_logging(SERVICE, format=config.log_format)
            telemetry = configure(SERVICE, instance, config, facts)
            telemetry.start()  # its threads must not inherit the pin of the thread that computes
        except Exception as error:  # the libraries have no common error for malformed OTEL_* values
            log.warning("no telemetry of rank %d, check OTEL_*: %s", rank, error)
    return StepTracing(telemetry, placement, rank)


class StepTracing:
    """A StepObserver: durations of every step as metrics, prefill steps of sampled requests as spans.

    Replica, epoch and rank are attributes of the process's resource.
    """

    def __init__(self, telemetry: Telemetry, placement: ReplicaPlacement, rank: int) -> None:
        self._telemetry = telemetry
        self._epoch = placement.epoch
        self._rank = rank
        self._first_rank = min(slot.rank for slot in placement.slots)
        self._records_spans = telemetry.provider is not None and telemetry.config.step_ratio > 0
        self._requests: OrderedDict[str, _Steps | None] = OrderedDict()
        self._failed = False
        self._duration, self._all_reduce, self._exposed = (
            telemetry.meters.histogram(
                name, "s", about, bounds=_STEP_S, keys=(spans.STEP_PATH, spans.STEP_CHUNKS)
            )
            for name, about in (
                ("kvorum.shard.step.duration", "forward pass of one engine step"),
                ("kvorum.shard.step.all_reduce", "of it, with an AllReduce in flight"),
                ("kvorum.shard.step.all_reduce.exposed", "of it, spent waiting for an AllReduce"),
            )
        )

    def step(self, record: StepRecord) -> None:
        """Take note of a step; called by the thread that computes, which no failure here may end."""
        if self._failed:
            return
        try:
            self._measure(record)
            # Every scheduled request has a token: with no more tokens than requests, none is in prefill.
            if self._records_spans and record.tokens > len(record.requests):
                self._record_spans(record)
        except Exception:
            self._failed = True
            log.exception("rank %d records no more engine steps", self._rank)

    def shutdown(self) -> None:
        """Export what is waiting, for about two seconds at most. Blocks; idempotent."""
        self._telemetry.shutdown()

    def _measure(self, record: StepRecord) -> None:
        path, chunks = _path(record.chunks), record.chunks
        self._duration.record(record.forward_s, path, chunks)
        if record.all_reduce_s is not None:
            self._all_reduce.record(record.all_reduce_s, path, chunks)
        if record.exposed_s is not None:
            self._exposed.record(record.exposed_s, path, chunks)

    def _record_spans(self, record: StepRecord) -> None:
        common: dict[str, AttributeValue] | None = None
        room = _STEP_SPANS
        for engine_id, tokens in record.requests:
            if tokens <= 1:
                continue
            steps = self._steps_of(external_id(engine_id))
            if steps is None:
                continue
            number = steps.next()
            if number >= _REQUEST_STEPS or room == 0:
                continue
            room -= 1
            common = common or _attributes(record)
            first = spans.elsewhere(steps.trace.trace_id, steps.trace.span_id(self._first_rank, 0))
            own = spans.elsewhere(steps.trace.trace_id, steps.trace.span_id(self._rank, number))
            self._telemetry.record(
                spans.ENGINE_STEP,
                own,
                None if own == first else first,
                start_ns=record.started_ns,
                end_ns=record.started_ns + round(record.forward_s * 1e9),
                attributes={
                    **common,
                    spans.RANK: self._rank,
                    spans.REQUEST_ID: steps.request_id,
                    spans.STEP_REQUEST_TOKENS: tokens,
                },
            )

    def _steps_of(self, request_id: str) -> _Steps | None:
        """None: not sampled. Both answers are remembered, the latest asked for the longest."""
        if request_id in self._requests:
            self._requests.move_to_end(request_id)
            return self._requests[request_id]
        trace = StepTrace.of(self._epoch, request_id)
        steps = _Steps(request_id, trace) if trace.is_sampled(self._telemetry) else None
        self._requests[request_id] = steps
        if len(self._requests) > _REMEMBERED_REQUESTS:
            self._requests.popitem(last=False)
        return steps


@dataclass
class _Steps:
    """A sampled request and how many prefill steps it has had."""

    request_id: str
    trace: StepTrace
    done: int = 0

    def next(self) -> int:
        """The number of the step that is being recorded, from 0."""
        number, self.done = self.done, self.done + 1
        return number


def _path(chunks: int) -> str:
    return "overlapped" if chunks > 1 else "stock"


def _attributes(record: StepRecord) -> dict[str, AttributeValue]:
    """What all spans of this step say; times the device does not tell are left out."""
    told = {
        spans.STEP_FORWARD_S: record.forward_s,
        spans.STEP_COMPUTE_S: record.compute_s,
        spans.STEP_ALL_REDUCE_S: record.all_reduce_s,
        spans.STEP_EXPOSED_S: record.exposed_s,
    }
    return {
        spans.STEP_NUMBER: record.number,
        spans.STEP_TOKENS: record.tokens,
        spans.STEP_PATH: _path(record.chunks),
        spans.STEP_CHUNKS: record.chunks,
        **{name: seconds for name, seconds in told.items() if seconds is not None},
    }
