"""The public API: `kvorum.v1.Inference`."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import grpc
import grpc.aio

from protos import common_pb2, inference_pb2
from protos.errors import KvorumError, to_status
from protos.tickets import ATTEMPT_KEY
from router.bounded_stream import BoundedStream
from router.config import RouterConfig
from router.explain import explained
from router.forward import Forwarder, deadline_exceeded
from router.group import loop_time
from router.intake import Generation, Intake, facts
from router.lookaside import Lookaside
from router.membership import Membership
from router.observe import Observer, Outcome, RequestScope, SilentObserver

log = logging.getLogger(__name__)

NAME = "kvorum.v1.Inference"

_T = TypeVar("_T")

_CUT_OFF_S = 5.0
"""For streams that were told to end to do so."""


class InferenceService:
    """Handles calls. Counts the streams in flight, to bound them and to drain."""

    def __init__(
        self, config: RouterConfig, members: Membership, lookaside: Lookaside, observer: Observer
    ) -> None:
        self._config, self._members = config, members
        self._intake = Intake(config, members)
        self._forwarder = Forwarder(max_attempts=config.max_attempts)
        self._lookaside, self._observer = lookaside, observer
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._cut_off = False
        self._streams: set[BoundedStream] = set()

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
            "Route": unary(self.route, pb.GenerateRequest.FromString, pb.RouteResponse.SerializeToString),
            "ReportEnd": unary(
                self.report_end, pb.ReportEndRequest.FromString, pb.ReportEndResponse.SerializeToString
            ),
            "ReportProgress": unary(
                self.report_progress,
                pb.ReportProgressRequest.FromString,
                pb.ReportProgressResponse.SerializeToString,
            ),
            "Explain": unary(
                self.explain, pb.GenerateRequest.FromString, pb.ExplainResponse.SerializeToString
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
            with suppress(TimeoutError):
                async with asyncio.timeout(_CUT_OFF_S):
                    await self._idle.wait()
            return False
        return True

    def cut_off(self) -> None:
        """End every stream in flight, and every request that waits, with UNAVAILABLE/ROUTER_DRAINING."""
        self._cut_off = True
        for group in self._members.groups():
            group.close(_draining)
        for stream in self._streams:
            stream.end()

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
        return await self._answer(context, self._intake.tokenize(request))

    async def route(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> inference_pb2.RouteResponse:
        """Decide and lease as Generate would; the client streams from the replica itself."""
        deadline = loop_time() + self._allowed_s(context)
        return await self._answer(context, self._route(request, context, deadline))

    async def report_end(
        self, request: inference_pb2.ReportEndRequest, context: Any
    ) -> inference_pb2.ReportEndResponse:
        """A routed stream is over."""
        self._lookaside.report(request)
        return inference_pb2.ReportEndResponse()

    async def report_progress(
        self, request: inference_pb2.ReportProgressRequest, context: Any
    ) -> inference_pb2.ReportProgressResponse:
        """A routed stream goes on."""
        self._lookaside.progress(request)
        return inference_pb2.ReportProgressResponse()

    async def explain(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> inference_pb2.ExplainResponse:
        """The decision for this request, with every candidate and term; nothing runs."""
        deadline = loop_time() + self._allowed_s(context)
        return await self._answer(context, self._explain(request, deadline))

    async def list_models(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """Every model that a member of the cluster serves, with its replicas."""
        models = []
        for info in self._members.models():
            ready, known = self._members.counts(info.name)
            models.append(inference_pb2.ServedModel(info=info, ready_replicas=ready, known_replicas=known))
        return inference_pb2.ListModelsResponse(models=models)

    async def _serve(self, request: Generation, operation: str, context: Any) -> None:
        """One request, observed and bounded; every way out ends its scope and frees its place."""
        request_id = request.options.request_id or uuid.uuid4().hex
        scope = self._observer.request(
            facts(request, request_id, operation), context.invocation_metadata() or ()
        )
        outcome = Outcome()
        deadline = loop_time() + self._allowed_s(context)
        try:
            with self._place():
                await self._generate(
                    request, request_id, context, scope=scope, outcome=outcome, deadline=deadline
                )
        except KvorumError as error:
            outcome.error = error
        except asyncio.CancelledError:
            # gRPC cancels the handler both when the client hangs up and when its deadline passes.
            if loop_time() >= deadline:
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
        request: Generation,
        request_id: str,
        context: Any,
        *,
        scope: RequestScope,
        outcome: Outcome,
        deadline: float,
    ) -> None:
        stream = BoundedStream(context.write, deadline)
        try:
            async with stream:
                self._streams.add(stream)
                job = await self._intake.job(request, request_id, deadline, scope)
                outcome.prompt_tokens = len(job.wanted.route.prompt_token_ids)
                await self._forwarder.run(job, stream.write, outcome)
        except TimeoutError:
            if self._cut_off:
                raise _draining() from None
            raise deadline_exceeded(outcome.generated_tokens) from None
        finally:
            self._streams.discard(stream)

    async def _route(
        self, request: inference_pb2.GenerateRequest, context: Any, deadline: float
    ) -> inference_pb2.RouteResponse:
        request_id = request.options.request_id or uuid.uuid4().hex
        scope = self._observer.request(
            facts(request, request_id, "text_completion"), context.invocation_metadata() or ()
        )
        outcome: Outcome | None = None
        try:
            with self._place():
                job = await self._intake.job(request, request_id, deadline, scope)
                return await self._lookaside.route(job, _attempt_id(context))
        except KvorumError as error:
            outcome = Outcome(error=error)
            raise
        except asyncio.CancelledError:
            # The client hung up, or the answer's deadline passed.
            late = loop_time() >= deadline
            outcome = Outcome(error=deadline_exceeded(0)) if late else Outcome(cancelled=True)
            raise
        except Exception:
            failure = _internal(request_id)
            outcome = Outcome(error=failure)
            raise failure from None
        finally:
            if outcome is not None:  # else the scope goes on until the client's report
                scope.finished(outcome)

    async def _explain(
        self, request: inference_pb2.GenerateRequest, deadline: float
    ) -> inference_pb2.ExplainResponse:
        scope = SilentObserver().request(facts(request, "", "text_completion"), ())
        with self._place():
            job = await self._intake.job(request, "", deadline, scope)
            return explained(job.group, job.wanted.route)

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


def _attempt_id(context: Any) -> str:
    """The client's wish; the router checks it."""
    wanted = dict(context.invocation_metadata() or ()).get(ATTEMPT_KEY, "")
    return wanted if isinstance(wanted, str) else ""


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
