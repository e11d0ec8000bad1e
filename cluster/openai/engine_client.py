"""vLLM's engine as its API server knows it, with the routers of a cluster in the engine's place.

The server renders, tokenises and parses; token ids go to a router, deltas come back. The loop of
`RouterEngineClient.generate` is the hot path.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, NoReturn

from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor

from cluster.openai import call_scope
from cluster.openai.call_scope import CallScope
from cluster.openai.failures import HttpFailure
from cluster.openai.outputs import OutputAssembler
from cluster.openai.params import to_wire
from cluster.openai.refusals import Refused, to_exception
from cluster.openai.router_health import RouterHealth
from protos import common_pb2, inference_pb2
from protos.errors import KvorumError
from router.client import KvorumClient
from telemetry import spans
from telemetry.messages import Answers

Messages = AsyncGenerator[common_pb2.GenerateResponse, None]

_MAX_REQUEST_ID_CHARS = 128
_RETRY_S = 1.0
_NO_ROUTER = "no router has a replica that is ready; come back later"


class RouterEngineClient(EngineClient):
    """Forwards to routers. Making one loads the tokenizer and blocks: do it in a thread.

    Args:
        model: the name that routers know the model by.
        timeout_s: the longest time of one request, seconds.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        client: KvorumClient,
        health: RouterHealth,
        *,
        model: str,
        timeout_s: float,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self._client, self._health = client, health
        self._model, self._timeout_s = model, timeout_s
        self._running: dict[str, set[_Running]] = {}

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        """Never: vLLM's server would end the process, where waiting for a router helps."""
        return False

    @property
    def dead_error(self) -> BaseException:
        error: BaseException = EngineDeadError(_NO_ROUTER)
        return error

    async def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("generate",)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Before a response is begun.

        Raises:
            Refused: 503, no router serves.
        """
        if not self._health.serving:
            _refuse(call_scope.current())

    async def check_health(self) -> None:
        """Raises EngineDeadError while no router serves."""
        if not self._health.serving:
            raise EngineDeadError(_NO_ROUTER)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as vLLM's own engine client would give them, by `output_kind`.

        Closing the iterator cancels the request down to the engine at once. The trace is that of the HTTP
        request (`call_scope`); `kv_hints` are hints, and the cluster has its own.

        Raises:
            VLLMValidationError, VLLMNotFoundError, Refused: see `refusals.to_exception`.
        """
        scope = _understood()
        try:
            token_ids, text, cache_salt = _tokens(prompt)
            if data_parallel_rank not in (None, 0):
                raise VLLMValidationError(
                    f"data_parallel_rank {data_parallel_rank} is out of range: routers choose the replica",
                    parameter="data_parallel_rank",
                )
            request = inference_pb2.GenerateRequest(
                model=self._model,
                tokens=inference_pb2.TokenIds(ids=token_ids),
                sampling=to_wire(
                    sampling_params,
                    reasoning_ended=reasoning_ended,
                    reasoning_parser_kwargs=reasoning_parser_kwargs,
                ),
                options=_options(
                    scope,
                    request_id,
                    priority=priority,
                    cache_salt=cache_salt,
                    lora=lora_request,
                    session=session_id,
                ),
            )
        except VLLMError as error:
            _note(scope, error)
            raise
        assembler = OutputAssembler(request_id, text or prompt_text, token_ids, sampling_params, lora_request)
        feed = assembler.feed
        running = _Running()
        streams = self._client.stream(
            request,
            timeout=self._timeout_s,
            metadata=spans.inject(scope.context) if scope is not None else (),
            opened=running.opened,
        )
        self._running.setdefault(request_id, set()).add(running)
        if scope is not None:
            scope.running.add(running)
            streams = _noted(scope, self._model, sampling_params.n, streams)
        try:
            async with aclosing(streams) as messages:
                async for message in messages:
                    for output in feed(message):
                        yield output
            if assembler.unfinished():
                _end_early(scope)
        except KvorumError as error:
            exception = to_exception(error)
            _note(scope, exception)
            raise exception from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not running.aborted or (task is not None and task.cancelling()):
                raise
            for output in feed(_aborted(assembler)):
                yield output
        finally:
            self._forget(request_id, running)
            if scope is not None:
                scope.running.discard(running)
                assembler.account(scope.generated)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End the running streams of these ids; they finish with the reason "abort"."""
        for name in (request_id,) if isinstance(request_id, str) else tuple(request_id):
            for running in tuple(self._running.get(name, ())):
                running.aborted = True
                running.cancel()

    def encode(self, *arguments: Any, **named: Any) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Raises NotImplementedError, which is 501 to the client."""
        raise NotImplementedError("this model generates text: it has no embeddings, scores or classes")

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        """Nothing to free: no request has reached an engine."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Routers and replicas have the figures."""

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        _not_here("profiling")

    async def stop_profile(self) -> None:
        _not_here("profiling")

    async def reset_mm_cache(self) -> None:
        _not_here("resetting caches")

    async def reset_encoder_cache(self) -> None:
        _not_here("resetting caches")

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        _not_here("resetting caches")

    async def sleep(self, level: int = 1, mode: Any = "abort") -> None:
        _not_here("putting engines to sleep")

    async def release_kv_cache_memory(self) -> None:
        _not_here("releasing cache memory")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        _not_here("waking engines up")

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        _not_here("loading LoRA adapters (name them in engine.lora_modules)")

    async def pause_generation(self, *, mode: Any = "abort", clear_cache: bool = True) -> None:
        _not_here("pausing engines")

    async def resume_generation(self) -> None:
        _not_here("pausing engines")

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the tokenizer's threads. The routers' client belongs to whoever made it."""
        self.renderer.shutdown()

    def _forget(self, request_id: str, running: _Running) -> None:
        of_this_id = self._running[request_id]
        of_this_id.discard(running)
        if not of_this_id:
            del self._running[request_id]


class _Running:
    """One stream, for whoever wants to end it."""

    __slots__ = ("_call", "_cancelled", "aborted")

    def __init__(self) -> None:
        self._call: Any = None
        self._cancelled = False
        self.aborted = False  # its caller waits for the outputs that say so

    def opened(self, call: Any) -> None:
        self._call = call
        if self._cancelled:
            call.cancel()

    def cancel(self) -> None:
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()


def _tokens(prompt: Any) -> tuple[list[int], str | None, str]:
    """Token ids, text and cache salt of what vLLM's renderer made.

    Raises:
        VLLMValidationError: it holds more than token ids.
    """
    kind = prompt.get("type", "token") if isinstance(prompt, Mapping) else type(prompt).__name__
    if kind != "token" or "prompt_token_ids" not in prompt or prompt.get("multi_modal_data"):
        raise VLLMValidationError(
            f"only text and token ids can be sent to a replica, not {kind} input", parameter="prompt"
        )
    return list(prompt["prompt_token_ids"]), prompt.get("prompt"), prompt.get("cache_salt") or ""


def _options(
    scope: CallScope | None,
    request_id: str,
    *,
    priority: int,
    cache_salt: str,
    lora: LoRARequest | None,
    session: str | None,
) -> inference_pb2.RequestOptions:
    if not -(2**31) <= priority < 2**31:
        raise VLLMValidationError(f"priority {priority} does not fit 32 bits", parameter="priority")
    options = inference_pb2.RequestOptions(
        request_id=request_id[
            -_MAX_REQUEST_ID_CHARS:
        ],  # what tells prompts of one request apart is at its end
        priority=priority,
        cache_salt=cache_salt,
        lora=lora.lora_name if lora is not None else "",
        session=session or "",
    )
    if scope is not None:
        options.session = session or scope.session
        options.tenant = scope.tenant
        options.service_class = scope.service_class
    return options


def _noted(scope: CallScope, model: str, sequences: int, stream: Messages) -> Messages:
    """A stream that is about to begin, where wanted one that `scope` overhears."""
    generated, before = scope.generated, scope.generated.sequences
    generated.model = model
    generated.sequences += sequences
    return stream if scope.answers is None else _overheard(stream, scope.answers, before)


async def _overheard(stream: Messages, answers: Answers, before: int) -> Messages:
    async with aclosing(stream) as messages:
        async for message in messages:
            for choice in message.choices:
                answers.add(before + choice.index, choice.text)
            yield message


def _aborted(assembler: OutputAssembler) -> common_pb2.GenerateResponse:
    """The message that ends every sequence that has not ended."""
    message = common_pb2.GenerateResponse()
    for index in assembler.unfinished():
        message.choices.add(index=index, finish_reason=common_pb2.ABORT)
    return message


def _understood() -> CallScope | None:
    """The HTTP request, which has turned out to be one for an engine."""
    scope = call_scope.current()
    if scope is not None:
        scope.understood = True
    return scope


def _note(scope: CallScope | None, error: Exception) -> None:
    """Let the edge know, which must tell a client whom vLLM has told nothing yet, or nonsense."""
    if scope is None:
        return
    if isinstance(error, Refused):
        scope.retry_after_s = error.retry_after_s
    told = create_error_response(error).error
    scope.failure = HttpFailure(int(told.code), told.message, told.type, told.param)


def _refuse(scope: CallScope | None) -> NoReturn:
    error = Refused(
        _NO_ROUTER,
        HTTPStatus.SERVICE_UNAVAILABLE,
        retry_after_s=_RETRY_S,
        reason=common_pb2.Reason.Name(common_pb2.NO_REPLICA_READY),
    )
    _note(scope, error)
    raise error


def _end_early(scope: CallScope | None) -> NoReturn:
    """A stream that ends well, but without the end of each sequence, is not a whole answer."""
    error = Refused("the router ended this stream early", HTTPStatus.BAD_GATEWAY)
    _note(scope, error)
    raise error


def _not_here(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} is not done through this API: replicas belong to the cluster")
