"""The client's half of lookaside: a router decides, the tokens come straight from the replica.

Routers then do no work per token. Each attempt asks a router for a replica and a ticket, streams from
the replica, and reports how it ended; a replica lost before its first token is replaced once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from protos import common_pb2, inference_pb2, replica_pb2
from protos.channels import open_channel
from protos.errors import KvorumError, from_rpc_error
from protos.tickets import TICKET_KEY

GENERATE = "/kvorum.v1.Replica/Generate"

_LOSS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_MOST_IDLE = 64
_ATTEMPTS = 2

Metadata = Sequence[tuple[str, str]]
Route = Callable[
    [inference_pb2.GenerateRequest, float, Metadata], Awaitable[tuple[inference_pb2.RouteResponse, int]]
]
Report = Callable[[int, inference_pb2.ReportEndRequest], Awaitable[None]]


@dataclass(slots=True)
class _Channel:
    grpc: grpc.aio.Channel
    streams: int = 0


class LookasideStreams:
    """Streams from replicas. Keeps idle channels to at most 64 of them.

    Args:
        route: `Inference.Route` with a timeout in seconds and metadata, and which router answered.
        report: `Inference.ReportEnd` to that router.
    """

    def __init__(self, route: Route, report: Report) -> None:
        self._route, self._report = route, report
        self._channels: OrderedDict[str, _Channel] = OrderedDict()  # the one used last is last

    async def stream(
        self, request: inference_pb2.GenerateRequest, deadline: float, metadata: Metadata
    ) -> AsyncGenerator[common_pb2.GenerateResponse, None]:
        """The messages of one request, as `Inference.Generate` would send them. `deadline`: time.monotonic().

        Raises:
            KvorumError: refused by the router or the replica, or the stream broke.
        """
        last: KvorumError | None = None
        for _ in range(_ATTEMPTS):
            left_s = max(deadline - time.monotonic(), 0.0)
            routed, router = await self._route(request, left_s, metadata)
            end = inference_pb2.ReportEndRequest(attempt_id=routed.attempt_id)
            try:
                async with aclosing(self._one(routed, end, deadline)) as stream:
                    async for message in stream:
                        yield message
            except (grpc.aio.AioRpcError, KvorumError) as failure:
                last = failure if isinstance(failure, KvorumError) else from_rpc_error(failure)
                end.lost = last.code in _LOSS
                # A replica that has restarted since knows nothing of the ticket; another route may help.
                # A constraint that brings a replica down must not be tried on the next one.
                again = last.reason == common_pb2.TICKET_INVALID or (
                    end.lost and not request.sampling.HasField("structured")
                )
                if end.HasField("ttft_s") or not again:
                    raise last from None
            else:
                end.finished = True
                return
            finally:
                await self._tell(router, end)
        assert last is not None
        raise last

    async def close(self) -> None:
        """Close every connection to a replica."""
        channels, self._channels = self._channels, OrderedDict()
        for channel in channels.values():
            await channel.grpc.close()

    async def _one(
        self, routed: inference_pb2.RouteResponse, end: inference_pb2.ReportEndRequest, deadline: float
    ) -> AsyncGenerator[common_pb2.GenerateResponse, None]:
        channel = self._channel(routed.address)
        channel.streams += 1
        try:
            await self._close_idle()
            async with aclosing(self._messages(channel, routed, end, deadline)) as messages:
                async for message in messages:
                    yield message
        finally:
            channel.streams -= 1

    async def _messages(
        self,
        channel: _Channel,
        routed: inference_pb2.RouteResponse,
        end: inference_pb2.ReportEndRequest,
        deadline: float,
    ) -> AsyncGenerator[common_pb2.GenerateResponse, None]:
        generate: Any = channel.grpc.unary_stream(
            GENERATE, response_deserializer=common_pb2.GenerateResponse.FromString
        )
        started = time.monotonic()
        call = generate(
            routed.replica_request,  # the very bytes that the ticket is for
            timeout=max(deadline - started, 0.0),
            metadata=((TICKET_KEY, routed.ticket), *routed.metadata.items()),
        )
        wanted = max(_sequences(routed), 1)
        try:
            async for message in call:
                if not end.HasField("ttft_s"):
                    end.ttft_s = time.monotonic() - started
                    message.served.CopyFrom(routed.served)
                if message.HasField("usage"):
                    end.usage.CopyFrom(message.usage)
                if message.HasField("times"):
                    end.times.CopyFrom(message.times)
                wanted -= sum(bool(choice.finish_reason) for choice in message.choices)
                yield message
        finally:
            call.cancel()
        if wanted > 0:  # a broken stream never ends as if it had finished
            raise KvorumError(
                grpc.StatusCode.UNAVAILABLE,
                common_pb2.REPLICA_LOST,
                f"replica {routed.served.replica} ended its stream with {wanted} sequences unfinished",
            )

    async def _tell(self, router: int, end: inference_pb2.ReportEndRequest) -> None:
        """Best effort: without it the lease ends by itself when the ticket expires."""
        with suppress(KvorumError):
            await asyncio.shield(asyncio.ensure_future(self._report(router, end)))

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


def _sequences(routed: inference_pb2.RouteResponse) -> int:
    sampling = replica_pb2.ReplicaGenerateRequest.FromString(routed.replica_request).sampling
    return sampling.n if sampling.HasField("n") else 1
