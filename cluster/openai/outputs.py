"""A router's stream turned back into the `RequestOutput`s that vLLM's own front end would get.

A replica always sends deltas. What vLLM's `v1/engine/output_processor.py` (0.32, `RequestState`,
`ParentRequest`) makes of an engine's steps by `output_kind`, this makes of those deltas, down to what is
None and what is empty.
"""

from __future__ import annotations

import time

from vllm.logprobs import Logprob, SampleLogprobs, create_sample_logprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.metrics.stats import RequestStateStats

from cluster.openai.call_scope import Generated
from protos import common_pb2

_FINISH: dict[int, str] = {
    common_pb2.STOP: "stop",
    common_pb2.LENGTH: "length",
    common_pb2.ABORT: "abort",
    common_pb2.ERROR: "error",
    common_pb2.REPETITION: "repetition",
}

_WEIGHTS = "default"
"""vLLM's label of weights that were not changed while they serve; a replica's never are."""


class OutputAssembler:
    """One request's outputs. One message in, at most one output out; several sequences may share it."""

    def __init__(
        self,
        request_id: str,
        prompt_text: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        lora_request: LoRARequest | None,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt_text
        self._prompt_token_ids = prompt_token_ids
        self._lora = lora_request
        self._kind = params.output_kind
        self._flat = params.flat_logprobs
        self._decoded = params.detokenize
        self._wants_prompt_logprobs = params.prompt_logprobs is not None
        self._sequences = [_Sequence(index, params) for index in range(params.n)]
        self._running = params.n
        self._prompt_logprobs: SampleLogprobs | None = None
        self._cached_tokens = 0
        self._created_tokens = 0
        self._stats: RequestStateStats | None = None
        self._arrived_s, self._queued_s = time.time(), time.monotonic()

    def feed(self, message: common_pb2.GenerateResponse) -> list[RequestOutput]:
        """The output that `message` completes, or none.

        DELTA passes on what the message adds, CUMULATIVE all so far, FINAL_ONLY all sequences once the last
        has finished. As in vLLM, lists of a cumulative output go on growing after it was returned.
        """
        begins = any(not self._sequences[choice.index].begun for choice in message.choices)
        self._note(message)
        if not message.choices:
            return []
        self._running -= sum(1 for choice in message.choices if choice.finish_reason)
        outputs = self._outputs(message)
        if not outputs:
            return []
        # With deltas the prompt's logprobs come once with each sequence.
        repeated = self._kind is RequestOutputKind.DELTA and not begins and self._prompt_logprobs is not None
        return [
            RequestOutput(
                request_id=self._request_id,
                prompt=self._prompt,
                prompt_token_ids=self._prompt_token_ids,
                prompt_logprobs=[] if repeated else self._prompt_logprobs,
                outputs=outputs,
                finished=not self._running,
                metrics=self._stats,
                lora_request=self._lora,
                num_cached_tokens=self._cached_tokens,
                num_cache_creation_tokens=self._created_tokens,
            )
        ]

    def _outputs(self, message: common_pb2.GenerateResponse) -> list[CompletionOutput]:
        touched = [(self._sequences[choice.index], choice) for choice in message.choices]
        if self._kind is RequestOutputKind.DELTA:
            return [sequence.delta(choice) for sequence, choice in touched]
        for sequence, choice in touched:
            sequence.append(choice)
        if self._kind is RequestOutputKind.CUMULATIVE:
            return [sequence.whole() for sequence, _ in touched]
        return [] if self._running else [sequence.whole() for sequence in self._sequences]

    def account(self, total: Generated) -> None:
        """Add what there was of this request to `total`."""
        stats = self._stats
        total.prompt_tokens += len(self._prompt_token_ids)
        total.cached_tokens += self._cached_tokens
        for sequence in self._sequences:
            total.generated_tokens += sequence.generated
            if sequence.finish_reason is not None:
                total.finish_reasons.append(sequence.finish_reason)
        if stats is not None:
            first_at = stats.arrival_time + stats.first_token_latency
            total.first_at = min(total.first_at or first_at, first_at)

    def unfinished(self) -> list[int]:
        """Indices of the sequences that have not had their finish reason."""
        return [index for index, sequence in enumerate(self._sequences) if not sequence.finished]

    def _note(self, message: common_pb2.GenerateResponse) -> None:
        """What the first and the last message carry beside the text."""
        if message.HasField("usage"):
            self._cached_tokens = message.usage.cached_tokens
            self._created_tokens = message.usage.cache_creation_tokens
        if message.prompt_logprobs and self._wants_prompt_logprobs:
            positions = create_sample_logprobs(self._flat)
            for position in message.prompt_logprobs:
                positions.append(_position(position, self._decoded) or None)
            self._prompt_logprobs = positions
        if message.HasField("times"):
            self._note_times(message.times)
        if self._stats is not None:
            self._stats.num_generation_tokens += sum(len(choice.token_ids) for choice in message.choices)

    def _note_times(self, times: common_pb2.EngineTimes) -> None:
        """The engine's clock is another machine's: only differences of these are right."""
        stats = self._stats
        if stats is None:
            waited_s = time.time() - self._arrived_s
            stats = self._stats = RequestStateStats(
                arrival_time=self._arrived_s, queued_ts=self._queued_s, first_token_latency=waited_s
            )
        stats.scheduled_ts = stats.queued_ts + times.queue
        stats.first_token_ts = stats.scheduled_ts + times.prefill
        stats.last_token_ts = stats.first_token_ts + times.decode


class _Sequence:
    """One of the n sequences of a request."""

    def __init__(self, index: int, params: SamplingParams) -> None:
        self.begun = False
        self._index = index
        self._flat = params.flat_logprobs
        self._decoded = params.detokenize
        with_logprobs = params.num_logprobs is not None
        self._sum: float | None = 0.0 if with_logprobs else None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self.generated = 0
        self._logprobs: SampleLogprobs | None = create_sample_logprobs(self._flat) if with_logprobs else None
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether it has had its finish reason."""
        return self.finish_reason is not None

    def delta(self, choice: common_pb2.ChoiceDelta) -> CompletionOutput:
        """What this step added."""
        self._see(choice)
        logprobs = None if self._logprobs is None else create_sample_logprobs(self._flat)
        self._add_logprobs(logprobs, choice)
        return self._output(choice.text, list(choice.token_ids), logprobs)

    def append(self, choice: common_pb2.ChoiceDelta) -> None:
        """Keep what this step added."""
        self._see(choice)
        self._texts.append(choice.text)
        self._token_ids.extend(choice.token_ids)
        self._add_logprobs(self._logprobs, choice)

    def whole(self) -> CompletionOutput:
        """All so far."""
        text = "".join(self._texts)
        self._texts = [text]
        return self._output(text, self._token_ids, self._logprobs)

    def _see(self, choice: common_pb2.ChoiceDelta) -> None:
        self.begun = True
        self.generated += len(choice.token_ids)
        if choice.finish_reason:
            self.finish_reason = _FINISH[choice.finish_reason]
            if choice.HasField("stop_string"):
                self._stop_reason = choice.stop_string
            elif choice.HasField("stop_token_id"):
                self._stop_reason = choice.stop_token_id

    def _add_logprobs(self, logprobs: SampleLogprobs | None, choice: common_pb2.ChoiceDelta) -> None:
        if logprobs is None or self._sum is None:
            return
        for position in choice.logprobs:
            self._sum += position.tokens[0].logprob  # the sampled token's
            logprobs.append(_position(position, self._decoded))

    def _output(self, text: str, token_ids: list[int], logprobs: SampleLogprobs | None) -> CompletionOutput:
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self._sum,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            weight_versions=self._weights() if self.finish_reason else None,
        )

    def _weights(self) -> list[WeightVersionSpan]:
        return [WeightVersionSpan(_WEIGHTS, 0, self.generated)] if self.generated else []


def _position(wire: common_pb2.PositionLogprobs, decoded: bool) -> dict[int, Logprob]:
    """By token, in the wire's order. Without detokenising vLLM has no texts; the wire has empty ones."""
    return {
        entry.token_id: Logprob(entry.logprob, entry.rank or None, entry.decoded if decoded else None)
        for entry in wire.tokens
    }
