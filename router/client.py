"""The Python client.

    async with KvorumClient("127.0.0.1:50051") as client:
        async for message in client.generate("Once upon a time", max_tokens=32):
            for choice in message.choices:
                print(choice.text, end="", flush=True)

Every failure is a `protos.errors.KvorumError` with its reason, field violations and retry delay.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf import json_format

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.channels import ClientTls, bearer, open_channel
from protos.errors import KvorumError, from_rpc_error

Message = Mapping[str, Any] | common_pb2.ChatMessage
Metadata = Sequence[tuple[str, str]]

_T = TypeVar("_T")
_DEFAULT_TIMEOUT_S = 600.0
_UNARY_TIMEOUT_S = 30.0
_ELSEWHERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class UnfitValueError(ValueError):
    """An argument that the message has no room for; it says which."""


class KvorumClient:
    """Talks to one of several routers; before the first message it fails over to the next one.

    Args:
        addresses: host:port of each router.
        api_key: sent as a bearer token.
        tls: turns TLS on.
    """

    def __init__(
        self,
        *addresses: str,
        api_key: str | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        if not addresses:
            raise ValueError("give the address of at least one router, as host:port")
        self._addresses = list(addresses)
        self._tls = tls
        self._credential = bearer(api_key)
        self._routers: dict[str, tuple[grpc.aio.Channel, inference_pb2_grpc.InferenceAsyncStub]] = {}
        self._preferred = 0

    async def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Iterable[Message] | None = None,
        tools: Iterable[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        lora: str = "",
        timeout: float = _DEFAULT_TIMEOUT_S,
        metadata: Metadata = (),
        **sampling: Any,
    ) -> AsyncGenerator[common_pb2.GenerateResponse, None]:
        """Stream what follows a text, token ids, or a chat; closing the iterator cancels the request.

        Args:
            prompt: text or token ids; or give `messages`, with tools and template_kwargs: see `chat_prompt`.
            timeout: seconds for the whole stream.
            sampling: fields of `SamplingParams` by name, such as temperature=0, max_tokens=64,
                stop=["\\n"], logit_bias={5: -100.0}, structured=StructuredOutput(regex="[0-9]+").

        Raises:
            KvorumError: refused, nothing could serve it, or the stream broke.
            ValueError: not exactly one of prompt and messages, or an unknown sampling field.
        """
        if (prompt is None) == (messages is None):
            raise ValueError("give either a prompt or messages")
        request = inference_pb2.GenerateRequest(
            model=model,
            sampling=_sampling(sampling),
            options=inference_pb2.RequestOptions(
                request_id=request_id, priority=priority, cache_salt=cache_salt, lora=lora
            ),
        )
        if isinstance(prompt, str):
            try:
                request.text = prompt
            except UnicodeEncodeError as error:
                raise UnfitValueError(f"prompt: not text that UTF-8 can carry: {error}") from None
        elif prompt is not None:
            request.tokens.ids.extend(prompt)
        else:
            request.chat.CopyFrom(chat_prompt(messages or (), tools, template_kwargs))
        deadline = time.monotonic() + timeout
        async with aclosing(self._stream(request, deadline, metadata)) as stream:
            async for message in stream:
                yield message

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
        self, request: inference_pb2.GenerateRequest, deadline: float, metadata: Metadata
    ) -> AsyncGenerator[common_pb2.GenerateResponse, None]:
        last: KvorumError | None = None
        for turn in self._turns():
            left_s = max(deadline - time.monotonic(), 0.0)
            call = self._stub(turn).Generate(request, timeout=left_s, metadata=(*self._credential, *metadata))
            started = False
            try:
                async for message in call:
                    if not started:
                        started, self._preferred = True, turn
                    yield message
            except grpc.aio.AioRpcError as failure:
                last = from_rpc_error(failure)
                if started or last.code not in _ELSEWHERE:
                    raise last from None
            else:
                return
            finally:
                call.cancel()
        assert last is not None
        raise last

    async def _unary(
        self, method: Callable[[inference_pb2_grpc.InferenceAsyncStub], Any], request: Any
    ) -> Any:
        last: KvorumError | None = None
        for turn in self._turns():
            try:
                call = method(self._stub(turn))
                response = await call(request, timeout=_UNARY_TIMEOUT_S, metadata=self._credential)
            except grpc.aio.AioRpcError as failure:
                last = from_rpc_error(failure)
                if last.code not in _ELSEWHERE:
                    raise last from None
            else:
                self._preferred = turn
                return response
        assert last is not None
        raise last

    def _turns(self) -> Iterator[int]:
        """Each router once, beginning with the one that served last."""
        first, count = self._preferred, len(self._addresses)
        return ((first + i) % count for i in range(count))

    def _stub(self, turn: int) -> inference_pb2_grpc.InferenceAsyncStub:
        address = self._addresses[turn]
        if address not in self._routers:
            channel = open_channel(address, tls=self._tls)
            self._routers[address] = (channel, inference_pb2_grpc.InferenceStub(channel))
        return self._routers[address][1]


class SyncClient:
    """`KvorumClient` for code without an event loop; one thread at a time.

    with SyncClient("127.0.0.1:50051") as client:
        for message in client.generate("Once upon a time", max_tokens=32):
            ...
    """

    def __init__(self, *addresses: str, api_key: str | None = None, tls: ClientTls | None = None) -> None:
        self._runner = asyncio.Runner()
        self._client = KvorumClient(*addresses, api_key=api_key, tls=tls)

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


def chat_prompt(
    messages: Iterable[Message],
    tools: Iterable[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> inference_pb2.ChatPrompt:
    """Messages, tools and calls as OpenAI's API writes them, as a ChatPrompt; keys keep their order.

    A message's `content` may be None; its `reasoning_content` may also be called `reasoning`.

    Raises:
        ValueError: a message has a key that ChatMessage does not know, or a value is no JSON object.
    """
    chat = inference_pb2.ChatPrompt()
    for i, message in enumerate(messages):
        if isinstance(message, common_pb2.ChatMessage):
            chat.messages.append(message)
        else:
            chat.messages.append(_message(f"messages[{i}]", message))
    chat.tools_json.extend(_json(f"tools[{i}]", tool) for i, tool in enumerate(tools))
    if template_kwargs:
        chat.template_kwargs_json = _json("template_kwargs", template_kwargs)
    return chat


def _message(path: str, plain: Mapping[str, Any]) -> common_pb2.ChatMessage:
    fields = {key: value for key, value in plain.items() if value is not None}
    calls = fields.pop("tool_calls", ())
    if "reasoning" in fields:  # vLLM's newer name; where both are given it counts
        fields["reasoning_content"] = fields.pop("reasoning")
    try:
        message: common_pb2.ChatMessage = json_format.ParseDict(fields, common_pb2.ChatMessage())
    except json_format.ParseError as error:
        raise ValueError(f"{path}: {error}") from None
    message.tool_calls_json.extend(_json(f"{path}.tool_calls[{i}]", call) for i, call in enumerate(calls))
    return message


def _json(path: str, plain: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(plain), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not a JSON object: {error}") from None


def _sampling(fields: Mapping[str, Any]) -> common_pb2.SamplingParams:
    known = common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    unknown = sorted(fields.keys() - known.keys())
    if unknown:
        raise ValueError(f"unknown sampling field {unknown[0]}; there are: {', '.join(sorted(known))}")
    params = common_pb2.SamplingParams()
    for name, value in fields.items():
        if value is None:
            continue
        try:
            params.MergeFrom(common_pb2.SamplingParams(**{name: value}))
        except (ValueError, TypeError) as error:
            raise UnfitValueError(f"{name}: {value!r} does not fit: {error}") from None
    return params
