"""Spans of a request at the replica: generate and, below it, the fetch of blocks from another host, if there
was one, and the engine's queue, prefill and decode.

They are written when the request is over; before, there are only the ids of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from protos import common_pb2, replica_pb2
from protos.errors import KvorumError
from telemetry import spans
from telemetry.logs import speak_of
from telemetry.phases import record_engine_times
from telemetry.setup import Telemetry
from workers import step_tracing
from workers.observe import GenerateScope, Metadata, Sent
from workers.placement import ReplicaPlacement


class ReplicaTracing:
    """A GenerateObserver that records spans; those still open when `telemetry` ends have failed."""

    def __init__(self, telemetry: Telemetry, placement: ReplicaPlacement, model: str) -> None:
        self.telemetry, self.placement = telemetry, placement
        self.fixed: dict[str, AttributeValue] = {
            spans.GEN_AI_OPERATION_NAME: "text_completion",
            spans.GEN_AI_PROVIDER_NAME: "kvorum",
            spans.GEN_AI_REQUEST_MODEL: model,
            spans.REPLICA: placement.replica,
            spans.EPOCH: placement.epoch,
        }
        self._open: set[_Scope] = set()
        telemetry.at_shutdown(self._abandon)

    def start(self, request: replica_pb2.ReplicaGenerateRequest, metadata: Metadata) -> GenerateScope:
        """Open the span below the router's attempt."""
        scope = _Scope(self, request, spans.extract(metadata), self._open.discard)
        self._open.add(scope)
        return scope

    def _abandon(self) -> None:
        for scope in list(self._open):
            scope.abandon()


class _Scope:
    def __init__(
        self,
        owner: ReplicaTracing,
        request: replica_pb2.ReplicaGenerateRequest,
        parent: Context,
        over: Callable[[_Scope], None],
    ) -> None:
        self._owner, self._request, self._parent, self._over = owner, request, parent, over
        self._span = spans.start(owner.telemetry.tracer, spans.REPLICA_GENERATE, parent, kind=SpanKind.SERVER)
        self._arrived = time.time()
        speak_of(request.request_id, self._span.get_span_context())

    def finish(self, error: BaseException | None, sent: Sent) -> None:
        """Record the engine's phases and end the span."""
        self._over(self)
        if self._span.is_recording():
            if sent.accepted:
                self._record_phases(sent)
            self._span.set_attributes(self._attributes(sent))
        message = error.message if isinstance(error, KvorumError) else ""
        reason = common_pb2.Reason.Name(error.reason) if isinstance(error, KvorumError) else error
        spans.finish(self._span, reason, message)

    def abandon(self) -> None:
        """The process ends amid the request, and knows no more of it."""
        self._over(self)
        if self._span.is_recording():
            self._span.set_attributes(self._attributes(Sent(len(self._request.prompt_token_ids))))
        lost = common_pb2.Reason.Name(common_pb2.REPLICA_LOST)
        spans.finish(self._span, lost, "the replica's process ended amid this request")

    def _attributes(self, sent: Sent) -> dict[str, AttributeValue]:
        request, sampling = self._request, self._request.sampling
        told = {
            **self._owner.fixed,
            spans.REQUEST_ID: request.request_id,
            spans.GEN_AI_USAGE_INPUT_TOKENS: sent.prompt_tokens,
            spans.GEN_AI_USAGE_OUTPUT_TOKENS: sent.generated_tokens,
            spans.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: sent.cached_tokens,
        }
        if sampling.HasField("max_tokens"):
            told[spans.GEN_AI_REQUEST_MAX_TOKENS] = sampling.max_tokens
        if sampling.HasField("temperature"):
            told[spans.GEN_AI_REQUEST_TEMPERATURE] = sampling.temperature
        if sent.finish_reasons:
            names = [common_pb2.FinishReason.Name(reason).lower() for reason in sent.finish_reasons]
            told[spans.GEN_AI_RESPONSE_FINISH_REASONS] = names
        return told

    def _record_phases(self, sent: Sent) -> None:
        owner, times = self._owner, sent.times
        tracer, context = owner.telemetry.tracer, spans.below(self._span, self._parent)
        queued = self._arrived
        if sent.fetch_at:
            queued = self._record_fetch(sent, context)
            if sent.fetch is None:
                return  # it ended before the engine had it
        if times is None:  # ended before its first token: all of it was waiting, as far as we know
            record_engine_times(
                tracer,
                context,
                arrival_wall_s=queued,
                queue_s=max(0.0, time.time() - queued),
                prefill_s=None,
                decode_s=None,
            )
            return
        computed = sent.prompt_tokens - sent.cached_tokens
        # A shard takes a single token for a decode step.
        links = computed > 1 and step_tracing.links(
            owner.telemetry, owner.placement, self._request.request_id, self._request.sampling.n
        )
        record_engine_times(
            tracer,
            context,
            arrival_wall_s=spans.wall_from_monotonic(times.queued_ts),
            queue_s=max(0.0, times.scheduled_ts - times.queued_ts),
            prefill_s=max(0.0, times.first_token_ts - times.scheduled_ts),
            decode_s=max(0.0, times.last_token_ts - times.first_token_ts),
            prefill_attributes={
                spans.CACHED_TOKENS: sent.cached_tokens,
                spans.POOLED_TOKENS: sent.pooled_tokens,
                spans.COMPUTED_TOKENS: computed,
            },
            decode_attributes={spans.GEN_AI_USAGE_OUTPUT_TOKENS: sent.generated_tokens},
            prefill_links=links or (),
        )

    def _record_fetch(self, sent: Sent, context: Context) -> float:
        """Returns when it was over, in seconds since the epoch. One that brought too little is no error."""
        now, told = time.time(), sent.fetch
        began = max(self._arrived, spans.wall_from_monotonic(sent.fetch_at))
        ended = now if told is None else min(now, began + told.seconds)
        span = spans.start(
            self._owner.telemetry.tracer, spans.REPLICA_KV_FETCH, context, start_ns=round(began * 1e9)
        )
        if told is not None:
            span.set_attributes(
                {
                    spans.KV_FETCH_SOURCE: told.agent,
                    spans.KV_FETCH_BLOCKS: told.blocks,
                    spans.KV_FETCH_BYTES: told.bytes,
                }
            )
            if told.failed:
                span.set_attribute(spans.KV_FETCH_FAILED, told.failed)
        spans.finish(span, "cancelled" if told is None else None, end_ns=round(ended * 1e9))
        return ended
