"""The public API: `kvorum.v1.Inference`."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio

from protos import common_pb2, inference_pb2, replica_pb2
from protos.errors import KvorumError, invalid, to_status
from router import prompt, validate
from router.config import RouterConfig
from router.forward import Forwarder, Job, deadline_exceeded
from router.membership import Membership
from router.observe import Observer, Outcome, RequestFacts, RequestScope
from router.picker import RouteRequest

log = logging.getLogger(__name__)

NAME = "kvorum.v1.Inference"

_Generation = inference_pb2.GenerateRequest | inference_pb2.ChatRequest
_T = TypeVar("_T")

_CUT_OFF_S = 5.0
"""For streams that were told to end to do so."""


class InferenceService:
    """Handles calls. Counts the streams in flight, to bound them and to drain."""

    def __init__(
        self, config: RouterConfig, members: Membership, forwarder: Forwarder, observer: Observer
    ) -> None:
        self._config, self._members = config, members
        self._forwarder, self._observer = forwarder, observer
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._cut_off = False
        self._timers: set[asyncio.Timeout] = set()

    @property
    def in_flight(self) -> int:
        """Streams now being served."""
        return self._in_flight

    def handler(self) -> grpc.GenericRpcHandler:
        """What to add to a server. Streamed responses leave as the bytes that the forwarder passes on."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        pb = inference_pb2
        methods: dict[str, Any] = {
            "Generate": stream(self.generate, pb.GenerateRequest.FromString),
            "Chat": stream(self.chat, pb.ChatRequest.FromString),
            "Tokenize": unary(
                self.tokenize, pb.TokenizeRequest.FromString, pb.TokenizeResponse.SerializeToString
            ),
            "ListModels": unary(
                self.list_models, pb.ListModelsRequest.FromString, pb.ListModelsResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(NAME, methods)

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests and wait for those in flight.

        Those that outlive the grace end with UNAVAILABLE/ROUTER_DRAINING; False when there were any.
        """
        self._draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            self.cut_off()
            async with asyncio.timeout(_CUT_OFF_S):
                await self._idle.wait()
            return False
        return True

    def cut_off(self) -> None:
        """End every stream in flight with UNAVAILABLE/ROUTER_DRAINING."""
        self._cut_off = True
        for timer in self._timers:
            if not timer.expired():
                timer.reschedule(0.0)

    async def generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        """Stream the continuation of a text, token ids or a chat."""
        await self._serve(request, "text_completion", context)

    async def chat(self, request: inference_pb2.ChatRequest, context: Any) -> None:
        """Stream the answer to a chat."""
        await self._serve(request, "chat", context)

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        """The tokens that Generate or Chat would send to the engine."""
        return await self._answer(context, self._tokenize(request))

    async def list_models(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """Every model that a member of the cluster serves, with its replicas."""
        models = []
        for info in self._members.models():
            ready, known = self._members.counts(info.name)
            models.append(inference_pb2.ServedModel(info=info, ready_replicas=ready, known_replicas=known))
        return inference_pb2.ListModelsResponse(models=models)

    async def _tokenize(self, request: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
        info = self._members.resolve(request.model)
        tokenizer = self._members.tokenizer(info)
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise invalid("prompt", "set text or chat", common_pb2.PROMPT_EMPTY)
        if kind == "chat":
            tokens = await prompt.from_chat(request.chat, tokenizer)
        else:
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            tokens = await prompt.from_text(
                request.text, tokenizer, max_tokens=info.max_model_len, add_special_tokens=special
            )
        return inference_pb2.TokenizeResponse(
            model=info.name, ids=tokens.ids, max_model_len=info.max_model_len, rendered=tokens.rendered
        )

    async def _serve(self, request: _Generation, operation: str, context: Any) -> None:
        """One request, observed and bounded; every way out ends its scope and frees its place."""
        request_id = request.options.request_id or uuid.uuid4().hex
        facts = _facts(request, request_id, operation)
        scope = self._observer.request(facts, context.invocation_metadata() or ())
        outcome = Outcome()
        deadline = asyncio.get_running_loop().time() + self._allowed_s(context)
        try:
            with self._place():
                await self._generate(
                    request, request_id, context, scope=scope, outcome=outcome, deadline=deadline
                )
        except KvorumError as error:
            outcome.error = error
        except asyncio.CancelledError:
            # gRPC cancels the handler both when the client hangs up and when its deadline passes.
            if asyncio.get_running_loop().time() >= deadline:
                outcome.error = deadline_exceeded(outcome.generated_tokens)
            else:
                outcome.cancelled = True
            raise
        except Exception:
            outcome.error = _internal(request_id)
        finally:
            scope.finished(outcome)
        if outcome.error is not None:
            await _refuse(context, outcome.error)

    async def _generate(
        self,
        request: _Generation,
        request_id: str,
        context: Any,
        *,
        scope: RequestScope,
        outcome: Outcome,
        deadline: float,
    ) -> None:
        timer = asyncio.timeout_at(deadline)
        try:
            async with timer:
                self._timers.add(timer)
                job = await self._job(request, request_id, deadline, scope)
                outcome.prompt_tokens = len(job.route.prompt_token_ids)
                await self._forwarder.run(job, context.write, outcome)
        except TimeoutError:
            if self._cut_off:
                raise _draining() from None
            raise deadline_exceeded(outcome.generated_tokens) from None
        finally:
            self._timers.discard(timer)

    async def _job(self, request: _Generation, request_id: str, deadline: float, scope: RequestScope) -> Job:
        """Tokenise and validate."""
        info = self._members.resolve(request.model)
        if not self._members.links(info.name):
            raise self._members.no_replica(info.name)
        started_ns = time.time_ns()
        tokens = await self._prompt(request, info)
        scope.tokenized(info.name, len(tokens.ids), started_ns)
        validate.prompt(tokens.ids, info, tokens.field)
        sampling, options = request.sampling, request.options
        validate.sampling(sampling, info, prompt_tokens=len(tokens.ids), max_n=self._config.max_n)
        validate.options(options, info)
        route = RouteRequest(
            model=info.name,
            prompt_token_ids=tokens.ids,
            sequences=validate.sequences(sampling),
            max_tokens=validate.room(sampling, info, len(tokens.ids)),
            lora=options.lora,
            cache_salt=options.cache_salt,
        )
        message = replica_pb2.ReplicaGenerateRequest(
            request_id=request_id,
            prompt_token_ids=tokens.ids,
            sampling=sampling if request.HasField("sampling") else None,
            priority=options.priority,
            cache_salt=options.cache_salt,
            lora=options.lora,
        )
        served = common_pb2.Served(request_id=request_id, model=info.name, trace_id=scope.trace_id)
        # A constraint that brings a replica down must not be tried on the next one.
        retryable = not sampling.HasField("structured")
        return Job(
            route, info.tokenizer_digest, message.SerializeToString(), served, deadline, scope, retryable
        )

    async def _prompt(self, request: _Generation, info: common_pb2.ModelInfo) -> prompt.Prompt:
        if isinstance(request, inference_pb2.ChatRequest):
            return await prompt.from_chat(request.chat, self._members.tokenizer(info))
        kind = request.WhichOneof("prompt")
        if kind == "tokens":
            return prompt.Prompt(list(request.tokens.ids), "tokens.ids")
        if kind == "text":
            return await prompt.from_text(
                request.text, self._members.tokenizer(info), max_tokens=info.max_model_len
            )
        if kind == "chat":
            return await prompt.from_chat(request.chat, self._members.tokenizer(info))
        raise invalid("prompt", "set text, tokens or chat", common_pb2.PROMPT_EMPTY)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of the `max_streams` places."""
        if self._draining:
            raise _draining()
        if self._in_flight >= self._config.max_streams:
            message = f"{self._in_flight} requests are in flight, the most this router takes; come back later"
            raise KvorumError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, common_pb2.OVERLOADED, message, retry_after_s=1.0
            )
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def _answer(self, context: Any, work: Awaitable[_T]) -> _T:
        """Await a unary answer within its deadline, or refuse."""
        try:
            async with asyncio.timeout(self._allowed_s(context)):
                return await work
        except KvorumError as error:
            failure = error
        except TimeoutError:
            failure = deadline_exceeded(0)
        except Exception:
            failure = _internal("of a unary call")
        await _refuse(context, failure)
        raise AssertionError("refusing always raises")

    def _allowed_s(self, context: Any) -> float:
        """What the client's deadline leaves, or the default."""
        remaining_s: float | None = context.time_remaining()
        return self._config.default_deadline_s if remaining_s is None else remaining_s


def _facts(request: _Generation, request_id: str, operation: str) -> RequestFacts:
    sampling = request.sampling
    return RequestFacts(
        request_id=request_id[: validate.MAX_REQUEST_ID_CHARS],
        operation=operation,
        model=request.model,
        sequences=validate.sequences(sampling),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
    )


def _internal(request_id: str) -> KvorumError:
    """Inside an except block: the traceback goes to the log, a name of it to the client."""
    incident = uuid.uuid4().hex[:12]
    log.exception("incident %s: request %s failed", incident, request_id)
    message = f"the router failed on this request; its log has the details under incident {incident}"
    return KvorumError(grpc.StatusCode.INTERNAL, common_pb2.INTERNAL, message)


def _draining() -> KvorumError:
    return KvorumError(
        grpc.StatusCode.UNAVAILABLE,
        common_pb2.ROUTER_DRAINING,
        "this router is going away; another one can serve",
        retry_after_s=0.0,
    )


async def _refuse(context: Any, error: KvorumError) -> None:
    """Ends the handler by raising what gRPC expects."""
    await context.abort_with_status(to_status(error))
