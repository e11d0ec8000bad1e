"""The client's half of lookaside: a router decides, the tokens come straight from the replica.

Routers then do no work per token. Each attempt asks a router for a replica and a ticket, streams from
the replica, and reports its first token, that it goes on, and how it ended; a replica lost before its first
token is replaced once.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio

from protos import common_pb2, inference_pb2
from protos.channels import open_channel
from protos.errors import KvorumError, from_rpc_error
from protos.tickets import ATTEMPT_KEY, TICKET_KEY
from router.tasks import TaskGroup

GENERATE = "/kvorum.v1.Replica/Generate"

_LOSS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_UNHEARD = (*_LOSS, grpc.StatusCode.DEADLINE_EXCEEDED)
_MOST_IDLE = 64
_ATTEMPTS = 2

Metadata = Sequence[tuple[str, str]]
Opened = Callable[[Any], None]
Route = Callable[
    [inference_pb2.GenerateRequest, float, Metadata, Opened | None],
    Awaitable[tuple[inference_pb2.RouteResponse, int]],
]
Report = Callable[[int | None, inference_pb2.ReportEndRequest], Coroutine[Any, Any, None]]
Progress = Callable[[int, inference_pb2.ReportProgressRequest], Awaitable[None]]

_BEHIND_S = 0.02
"""The word of a first token waits so long: the token itself goes first."""
_PROGRESS_SHARE = 1 / 3
"""Of the time in which a lease ends without a word: two words may be lost."""


@dataclass(slots=True)
class _Channel:
    grpc: grpc.aio.Channel
    streams: int = 0


class _Attempt:
    """One attempt, as far as its router has to know. `report` is kept up to date by who reads the stream."""

    def __init__(
        self,
        routed: inference_pb2.RouteResponse,
        progress: Callable[[inference_pb2.ReportProgressRequest], Awaitable[None]],
        report: Callable[[inference_pb2.ReportEndRequest], None],
    ) -> None:
        self.routed = routed
        self.end = inference_pb2.ReportEndRequest(attempt_id=routed.attempt_id)
        self.generated = 0
        self._progress, self._report = progress, report
        self._begun, self._ended = asyncio.Event(), False

    def first_token(self, after_s: float) -> None:
        """It has come."""
        self.end.ttft_s = after_s
        self._begun.set()

    def ended(self) -> None:
        """Report `end`, once.

        As soon as the last sequence has ended: who acts upon its last token meets a router that knows.
        """
        if not self._ended:
            self._ended = True
            self._report(self.end)

    async def keep(self) -> None:
        """Tell the router of the first token, then again and again that it goes on; until cancelled."""
        every_s = self.routed.expires_in_s * _PROGRESS_SHARE
        while True:
            try:
                async with asyncio.timeout(every_s):
                    await self._begun.wait()
            except TimeoutError:
                await self._tell()
            else:
                break
        await asyncio.sleep(_BEHIND_S)
        while True:
            await self._tell()
            await asyncio.sleep(every_s)

    async def _tell(self) -> None:
        report = inference_pb2.ReportProgressRequest(
            attempt_id=self.routed.attempt_id, generated_tokens=self.generated
        )
        await self._progress(report)


class LookasideStreams:
    """Streams from replicas. Keeps idle channels to at most 64 of them.

    Args:
        route: `Inference.Route` with a timeout in seconds, metadata, and who is told of the call; and which
            router answered.
        report: `Inference.ReportEnd` to that router, or to all; raises nothing.
        progress: `Inference.ReportProgress` to that router; raises nothing.
    """

    def __init__(self, route: Route, report: Report, progress: Progress) -> None:
        self._route, self._report, self._progress = route, report, progress
        self._channels: OrderedDict[str, _Channel] = OrderedDict()  # the one used last is last
        self._keepers, self._reports = TaskGroup(), TaskGroup()

    async def stream(
        self,
        request: inference_pb2.GenerateRequest,
        deadline: float,
        metadata: Metadata,
        opened: Opened | None = None,
    ) -> AsyncGenerator[common_pb2.GenerateResponse, None]:
        """The messages of one request, as `Inference.Generate` would send them. `deadline`: time.monotonic().

        Raises:
            KvorumError: refused by the router or the replica, or the stream broke.
        """
        sequences = max(request.sampling.n, 1) if request.sampling.HasField("n") else 1
        last: KvorumError | None = None
        for _ in range(_ATTEMPTS):
            attempt = await self._routed(request, deadline, metadata, opened)
            end = attempt.end
            kept = self._keepers.spawn("keep a lookaside lease", attempt.keep())
            try:
                async with aclosing(self._one(attempt, sequences, deadline, opened)) as stream:
                    async for message in stream:
                        yield message
            except (grpc.aio.AioRpcError, KvorumError) as failure:
                last = _as_told(failure, attempt)
                end.lost = last.code in _LOSS
                end.code, end.reason = last.code.value[0], last.reason
                # A replica that has restarted since knows nothing of the ticket; another route may help.
                # A constraint that brings a replica down must not be tried on the next one.
                again = last.reason == common_pb2.TICKET_INVALID or (
                    end.lost and not request.sampling.HasField("structured")
                )
                if end.HasField("ttft_s") or not again:
                    raise last from None
            else:
                return
            finally:
                kept.cancel()
                attempt.ended()
        assert last is not None
        raise last

    async def close(self) -> None:
        """Close every connection to a replica; first the last reports go out."""
        await self._keepers.cancel()
        await self._reports.finish()
        channels, self._channels = self._channels, OrderedDict()
        for channel in channels.values():
            await channel.grpc.close()

    async def _routed(
        self,
        request: inference_pb2.GenerateRequest,
        deadline: float,
        metadata: Metadata,
        opened: Opened | None,
    ) -> _Attempt:
        left_s = max(deadline - time.monotonic(), 0.0)
        attempt_id = uuid.uuid4().hex
        try:
            routed, router = await self._route(
                request, left_s, (*metadata, (ATTEMPT_KEY, attempt_id)), opened
            )
        except (asyncio.CancelledError, KvorumError) as error:
            if not isinstance(error, KvorumError) or error.code in _UNHEARD:
                # A router may have decided, and its word have come too late to be read.
                end = inference_pb2.ReportEndRequest(attempt_id=attempt_id)
                self._tell(None, end)
            raise
        return _Attempt(routed, partial(self._progress, router), partial(self._tell, router))

    def _tell(self, router: int | None, end: inference_pb2.ReportEndRequest) -> None:
        self._reports.spawn("report a lookaside end", self._report(router, end))

    async def _one(
        self, attempt: _Attempt, sequences: int, deadline: float, opened: Opened | None
    ) -> AsyncGenerator[common_pb2.GenerateResponse, None]:
        channel = self._channel(attempt.routed.address)
        channel.streams += 1
        try:
            await self._close_idle()
            async with aclosing(_messages(channel, attempt, sequences, deadline, opened)) as messages:
                async for message in messages:
                    yield message
        finally:
            channel.streams -= 1

    def _channel(self, address: str) -> _Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = _Channel(open_channel(address))
        self._channels.move_to_end(address)
        return channel

    async def _close_idle(self) -> None:
        idle = [address for address, channel in self._channels.items() if not channel.streams]
        closing = [self._channels.pop(address) for address in idle[: max(len(idle) - _MOST_IDLE, 0)]]
        for channel in closing:
            await channel.grpc.close()


async def _messages(
    channel: _Channel, attempt: _Attempt, sequences: int, deadline: float, opened: Opened | None
) -> AsyncGenerator[common_pb2.GenerateResponse, None]:
    routed, end = attempt.routed, attempt.end
    generate: Any = channel.grpc.unary_stream(
        GENERATE, response_deserializer=common_pb2.GenerateResponse.FromString
    )
    started = time.monotonic()
    call = generate(
        routed.replica_request,  # the very bytes that the ticket is for
        timeout=max(deadline - started, 0.0),
        metadata=((TICKET_KEY, routed.ticket), *routed.metadata.items()),
    )
    if opened is not None:
        opened(call)
    unfinished = sequences
    try:
        async for message in call:
            if not end.HasField("ttft_s"):
                attempt.first_token(time.monotonic() - started)
                message.served.CopyFrom(routed.served)
            if message.HasField("usage"):
                end.usage.CopyFrom(message.usage)
            if message.HasField("times"):
                end.times.CopyFrom(message.times)
            if message.HasField("kv_fetch"):
                end.kv_fetch.CopyFrom(message.kv_fetch)
            for choice in message.choices:
                attempt.generated += len(choice.token_ids)
                unfinished -= bool(choice.finish_reason)
            if unfinished <= 0:
                end.finished = True
                attempt.ended()
            yield message
    finally:
        call.cancel()
    if unfinished > 0:  # a broken stream never ends as if it had finished
        raise KvorumError(
            grpc.StatusCode.UNAVAILABLE,
            common_pb2.REPLICA_LOST,
            f"replica {routed.served.replica} ended its stream with {unfinished} sequences unfinished",
        )


def _as_told(failure: grpc.aio.AioRpcError | KvorumError, attempt: _Attempt) -> KvorumError:
    """As a router would tell it that forwarded the stream."""
    error = failure if isinstance(failure, KvorumError) else from_rpc_error(failure)
    served = attempt.routed.served
    if error.code is grpc.StatusCode.UNKNOWN:  # an exception in the replica: its text is for its log
        message = f"replica {served.replica} failed on request {served.request_id}"
        return KvorumError(grpc.StatusCode.INTERNAL, common_pb2.INTERNAL, message)
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"the deadline passed after {attempt.generated} generated tokens"
        return KvorumError(error.code, common_pb2.DEADLINE_EXCEEDED, message)
    if error.code in _LOSS and attempt.end.HasField("ttft_s"):
        return KvorumError(
            grpc.StatusCode.UNAVAILABLE,
            common_pb2.REPLICA_LOST,
            f"replica {served.replica} was lost after {attempt.generated} tokens ({error.message}); "
            "the stream is incomplete, send the request again",
            metadata={"replica": served.replica, "epoch": served.epoch},
        )
    return error
