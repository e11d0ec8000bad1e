"""The Python client.

    async with KvorumClient("127.0.0.1:50051") as client:
        async for message in client.generate("Once upon a time", max_tokens=32):
            for choice in message.choices:
                print(choice.text, end="", flush=True)

Every failure is a `protos.errors.KvorumError` with its reason, field violations and retry delay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from protos import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2, inference_pb2_grpc
from protos.channels import ClientTls, bearer, open_channel
from protos.errors import GAVE_UP, KvorumError, from_rpc_error, refused_by_grpc
from router.client_request import Message, chat_prompt, generate_request
from router.lookaside_client import LookasideStreams

Metadata = Sequence[tuple[str, str]]

_T = TypeVar("_T")
_DEFAULT_TIMEOUT_S = 600.0
_UNARY_TIMEOUT_S = 30.0
_STATE_TIMEOUT_S = 2.0
# A router that stops cancels the calls that it had not begun to serve.
_ELSEWHERE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
)


class KvorumClient:
    """Talks to one of several routers; before the first message it fails over to the next one.

    Args:
        addresses: host:port of each router.
        api_key: sent as a bearer token.
        tls: turns TLS on.
        lookaside: ask a router which replica to use and stream from it directly: no router in the path of
            the tokens. The replicas' addresses must be reachable from here.
        usable: says of an address whether that router is known to serve; the others are tried last.
    """

    def __init__(
        self,
        *addresses: str,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        lookaside: bool = False,
        usable: Callable[[str], bool] | None = None,
    ) -> None:
        if not addresses:
            raise ValueError("give the address of at least one router, as host:port")
        self._addresses = list(addresses)
        self._usable = usable
        self._tls = tls
        self._credential = bearer(api_key)
        self._routers: dict[str, tuple[grpc.aio.Channel, inference_pb2_grpc.InferenceAsyncStub]] = {}
        self._preferred = 0
        self._direct = LookasideStreams(self._route, self._report, self._progress) if lookaside else None

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        timeout: float = _DEFAULT_TIMEOUT_S,
        metadata: Metadata = (),
        **fields: Any,
    ) -> AsyncGenerator[common_pb2.GenerateResponse, None]:
        """Stream what follows a text, token ids, or a chat; closing the iterator cancels the request.

        Args:
            prompt: text or token ids, or give `messages`; `fields` are as in `generate_request`.
            timeout: seconds for the whole stream.

        Raises:
            KvorumError: refused, nothing could serve it, or the stream broke.
            ValueError: not exactly one of prompt and messages, or an unknown field.
        """
        request = generate_request(prompt, **fields)
        async with aclosing(self.stream(request, timeout=timeout, metadata=metadata)) as stream:
            async for message in stream:
                yield message

    def stream(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout: float = _DEFAULT_TIMEOUT_S,
        metadata: Metadata = (),
        opened: Callable[[Any], None] | None = None,
    ) -> AsyncGenerator[common_pb2.GenerateResponse, None]:
        """`generate` of a request that is already a message.

        Args:
            opened: told of each call to a router or replica as it begins, so that another task can cancel
                the last one, upon which the iterator raises asyncio.CancelledError.
        """
        deadline = time.monotonic() + timeout
        if self._direct is not None:
            return self._direct.stream(request, deadline, metadata, opened)
        return self._stream(request, deadline, metadata, opened)

    async def explain(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        timeout: float = _UNARY_TIMEOUT_S,
        **fields: Any,
    ) -> inference_pb2.ExplainResponse:
        """Which replica would serve this request now, and every term of every candidate; nothing runs."""
        request = generate_request(prompt, **fields)
        answer = await self._unary(lambda stub: stub.Explain, request, timeout)
        response: inference_pb2.ExplainResponse = answer
        return response

    async def router_states(self) -> dict[str, admin_pb2.RouterState | KvorumError]:
        """What each router knows of replicas, queues and leases, or why it does not say, by address."""
        found: dict[str, admin_pb2.RouterState | KvorumError] = {}
        for turn, address in enumerate(self._addresses):
            self._stub(turn)
            stub: Any = admin_pb2_grpc.RouterAdminStub(self._routers[address][0])
            try:
                found[address] = await stub.GetRouterState(
                    admin_pb2.GetRouterStateRequest(), timeout=_STATE_TIMEOUT_S, metadata=self._credential
                )
            except grpc.aio.AioRpcError as failure:
                found[address] = from_rpc_error(failure)
        return found

    async def tokenize(
        self, text: str | None = None, *, messages: Iterable[Message] | None = None, model: str = ""
    ) -> inference_pb2.TokenizeResponse:
        """The tokens that `generate` would send for this text or chat."""
        request = inference_pb2.TokenizeRequest(model=model)
        if text is not None:
            request.text = text
        else:
            request.chat.CopyFrom(chat_prompt(messages or ()))
        response: inference_pb2.TokenizeResponse = await self._unary(lambda stub: stub.Tokenize, request)
        return response

    async def list_models(self) -> list[inference_pb2.ServedModel]:
        """What is served, and by how many replicas."""
        response = await self._unary(lambda stub: stub.ListModels, inference_pb2.ListModelsRequest())
        return list(response.models)

    async def close(self) -> None:
        """Close every connection; streams that still run are cancelled."""
        if self._direct is not None:
            await self._direct.close()
        routers, self._routers = self._routers, {}
        for channel, _ in routers.values():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _stream(
        self,
        request: inference_pb2.GenerateRequest,
        deadline: float,
        metadata: Metadata,
        opened: Callable[[Any], None] | None,
    ) -> AsyncGenerator[common_pb2.GenerateResponse, None]:
        last: KvorumError | None = None
        for turn in self._turns():
            left_s = max(deadline - time.monotonic(), 0.0)
            call = self._stub(turn).Generate(request, timeout=left_s, metadata=(*self._credential, *metadata))
            if opened is not None:
                opened(call)
            started = False
            try:
                async for message in call:
                    if not started:
                        started, self._preferred = True, turn
                    yield message
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
                # A router that gave up has tried the replicas that another one would try.
                if started or not _worth_another(error) or GAVE_UP in error.metadata:
                    raise error from None
                # What one says that is there tells more than that another one is not.
                if last is None or last.retry_after_s is None:
                    last = error
            else:
                return
            finally:
                call.cancel()
        assert last is not None
        raise last

    async def _route(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float,
        metadata: Metadata,
        opened: Callable[[Any], None] | None,
    ) -> tuple[inference_pb2.RouteResponse, int]:
        response = await self._unary(lambda stub: stub.Route, request, timeout_s, metadata, opened)
        return response, self._preferred

    async def _report(self, turn: int | None, end: inference_pb2.ReportEndRequest) -> None:
        """To that router, or to all."""
        for each in range(len(self._addresses)) if turn is None else (turn,):
            await self._told(self._stub(each).ReportEnd, end)

    async def _progress(self, turn: int, report: inference_pb2.ReportProgressRequest) -> None:
        await self._told(self._stub(turn).ReportProgress, report)

    async def _told(self, method: Any, report: Any) -> None:
        """Best effort: a lease of which nothing is heard ends by itself."""
        with suppress(grpc.aio.AioRpcError):
            await method(report, timeout=_STATE_TIMEOUT_S, metadata=self._credential)

    async def _unary(
        self,
        method: Callable[[inference_pb2_grpc.InferenceAsyncStub], Any],
        request: Any,
        timeout_s: float = _UNARY_TIMEOUT_S,
        metadata: Metadata = (),
        opened: Callable[[Any], None] | None = None,
    ) -> Any:
        last: KvorumError | None = None
        until = time.monotonic() + timeout_s
        for turn in self._turns():
            left_s = max(until - time.monotonic(), 0.0)
            call = method(self._stub(turn))(request, timeout=left_s, metadata=(*self._credential, *metadata))
            if opened is not None:
                opened(call)
            try:
                response = await call
            except grpc.aio.AioRpcError as failure:
                last = from_rpc_error(failure)
                if not _worth_another(last):
                    raise last from None
            else:
                self._preferred = turn
                return response
        assert last is not None
        raise last

    def _turns(self) -> Sequence[int]:
        """Each router once, beginning with the one that served last; those known not to serve are last."""
        first, count = self._preferred, len(self._addresses)
        turns = [(first + i) % count for i in range(count)]
        usable = self._usable
        if usable is not None:
            turns.sort(key=lambda turn: not usable(self._addresses[turn]))
        return turns

    def _stub(self, turn: int) -> inference_pb2_grpc.InferenceAsyncStub:
        address = self._addresses[turn]
        if address not in self._routers:
            channel = open_channel(address, tls=self._tls)
            self._routers[address] = (channel, inference_pb2_grpc.InferenceStub(channel))
        return self._routers[address][1]


def _worth_another(error: KvorumError) -> bool:
    """Whether another router may serve what one did not."""
    return error.code in _ELSEWHERE and not refused_by_grpc(error)


class SyncClient:
    """`KvorumClient` for code without an event loop; one thread at a time.

    with SyncClient("127.0.0.1:50051") as client:
        for message in client.generate("Once upon a time", max_tokens=32):
            ...
    """

    def __init__(
        self,
        *addresses: str,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        lookaside: bool = False,
    ) -> None:
        self._runner = asyncio.Runner()
        self._client = KvorumClient(*addresses, api_key=api_key, tls=tls, lookaside=lookaside)

    def generate(
        self, prompt: str | Sequence[int] | None = None, **arguments: Any
    ) -> Iterator[common_pb2.GenerateResponse]:
        """See `KvorumClient.generate`."""
        stream = self._client.generate(prompt, **arguments)
        try:
            while True:
                try:
                    message = self._run(anext(stream))
                except StopAsyncIteration:
                    return
                yield message
        finally:
            self._run(stream.aclose())

    def tokenize(self, text: str | None = None, **arguments: Any) -> inference_pb2.TokenizeResponse:
        """See `KvorumClient.tokenize`."""
        response: inference_pb2.TokenizeResponse = self._run(self._client.tokenize(text, **arguments))
        return response

    def list_models(self) -> list[inference_pb2.ServedModel]:
        """See `KvorumClient.list_models`."""
        models: list[inference_pb2.ServedModel] = self._run(self._client.list_models())
        return models

    def close(self) -> None:
        """Close the connections and the loop."""
        self._run(self._client.close())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Any) -> Any:
        async def awaited() -> Any:
            return await work

        return self._runner.run(awaited())
