"""Spans of a request at the replica: generate, and the engine's queue, prefill and decode below it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, Tracer

from protos import common_pb2, replica_pb2
from protos.errors import KvorumError
from telemetry import spans
from telemetry.setup import Telemetry
from workers import step_tracing
from workers.placement import ReplicaPlacement

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from workers.observe import GenerateScope, Metadata


class ReplicaTracing:
    """A GenerateObserver that records OpenTelemetry spans."""

    def __init__(self, telemetry: Telemetry, placement: ReplicaPlacement, model: str) -> None:
        self._telemetry = telemetry
        self._placement = placement
        self._fixed = {
            spans.GEN_AI_OPERATION_NAME: "text_completion",
            spans.GEN_AI_PROVIDER_NAME: "kvorum",
            spans.GEN_AI_REQUEST_MODEL: model,
            spans.REPLICA: placement.replica,
            spans.EPOCH: placement.epoch,
        }

    def start(self, request: replica_pb2.ReplicaGenerateRequest, metadata: Metadata) -> GenerateScope:
        """Open the span below the router's attempt."""
        attributes: dict[str, str | int | float] = {
            **self._fixed,
            spans.REQUEST_ID: request.request_id,
            spans.GEN_AI_USAGE_INPUT_TOKENS: len(request.prompt_token_ids),
        }
        sampling = request.sampling
        if sampling.HasField("max_tokens"):
            attributes[spans.GEN_AI_REQUEST_MAX_TOKENS] = sampling.max_tokens
        if sampling.HasField("temperature"):
            attributes[spans.GEN_AI_REQUEST_TEMPERATURE] = sampling.temperature
        steps = step_tracing.links(self._telemetry, self._placement, request.request_id, sampling.n)
        prompt_tokens = len(request.prompt_token_ids)
        return _Scope(self._telemetry.tracer, spans.extract(metadata), attributes, prompt_tokens, steps)


class _Scope:
    def __init__(
        self,
        tracer: Tracer,
        parent: Context,
        attributes: dict[str, str | int | float],
        prompt_tokens: int,
        steps: Sequence[Link],
    ) -> None:
        self._tracer = tracer
        self._parent = parent
        self._span = spans.start(
            tracer, spans.REPLICA_GENERATE, parent, kind=SpanKind.SERVER, attributes=attributes
        )
        self._recording = self._span.is_recording()
        self._arrived = time.time()
        self._prompt_tokens = prompt_tokens
        self._steps = steps
        self._cached = 0
        self._generated = 0
        self._reasons: list[str] = []
        self._last: RequestOutput | None = None

    def step(self, response: common_pb2.GenerateResponse, output: RequestOutput) -> None:
        """Remember what the last span needs; nothing is recorded per token."""
        if not self._recording:
            return
        self._last = output
        if response.HasField("usage"):
            self._cached = response.usage.cached_tokens
        for choice in response.choices:
            self._generated += len(choice.token_ids)
            if choice.finish_reason:
                self._reasons.append(common_pb2.FinishReason.Name(choice.finish_reason).lower())

    def finish(self, error: BaseException | None) -> None:
        """Record the engine's phases and end the span."""
        if self._recording:
            self._record_phases()
            self._span.set_attribute(spans.GEN_AI_USAGE_OUTPUT_TOKENS, self._generated)
            self._span.set_attribute(spans.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, self._cached)
            if self._reasons:
                self._span.set_attribute(spans.GEN_AI_RESPONSE_FINISH_REASONS, self._reasons)
        message = error.message if isinstance(error, KvorumError) else ""
        reason = common_pb2.Reason.Name(error.reason) if isinstance(error, KvorumError) else error
        spans.finish(self._span, reason, message)

    def _record_phases(self) -> None:
        times = self._last.metrics if self._last is not None else None
        context = spans.below(self._span, self._parent)
        computed = self._prompt_tokens - self._cached
        if times is None:  # ended before its first token: all of it was waiting, as far as we know
            spans.record_engine_times(
                self._tracer,
                context,
                arrival_wall_s=self._arrived,
                queue_s=time.time() - self._arrived,
                prefill_s=None,
                decode_s=None,
            )
            return
        spans.record_engine_times(
            self._tracer,
            context,
            arrival_wall_s=spans.wall_from_monotonic(times.queued_ts),
            queue_s=max(0.0, times.scheduled_ts - times.queued_ts),
            prefill_s=max(0.0, times.first_token_ts - times.scheduled_ts),
            decode_s=max(0.0, times.last_token_ts - times.first_token_ts),
            prefill_attributes={
                spans.CACHED_TOKENS: self._cached,
                spans.COMPUTED_TOKENS: computed,
            },
            decode_attributes={spans.GEN_AI_USAGE_OUTPUT_TOKENS: self._generated},
            # A shard takes a single token for a decode step.
            prefill_links=self._steps if computed > 1 else (),
        )
