"""How blocks come from another host's agent: behind a small interface, since faster ways than gRPC exist."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from protos import kvpool_pb2, kvpool_pb2_grpc
from protos.channels import bearer, open_channel
from protos.errors import from_rpc_error
from workers.kvpool.layout import Geometry
from workers.kvpool.wire import Assembler, Block, MalformedError

STALL_S: Final = 2.0
"""A peer from which nothing comes for so long is given up: it is stopped, cut off or gone."""
MOST_CHANNELS: Final = 64
"""Kept; of more, those used longest ago are closed."""


class PeerError(Exception):
    """A peer did not send what it was asked for; the message names it and says why."""


class FalseBlocksError(PeerError):
    """What it sent is not what was asked for, or does not fit."""


class Transport(Protocol):
    """Reads blocks of another host's arena. RDMA would be another one."""

    def read(
        self, source: str, namespace: str, names: Sequence[int], shape: Geometry, timeout_s: float
    ) -> AsyncGenerator[Block, None]:
        """The leading blocks that the peer has, in order; their checksums have not been looked at yet.

        Args:
            source: host:port of the agent.
            namespace: digest.
            names: the router's keys.
            shape: of the arena that the blocks are for.
            timeout_s: at most, over all.

        Raises PeerError: refused, gone, silent, or it sends what was not asked for.
        """
        ...

    async def close(self) -> None:
        """Give up all connections."""
        ...


class GrpcTransport:
    """Over one HTTP/2 connection for each peer; its flow control keeps a fast peer from flooding us.

    Args:
        token: the cluster's.
        stall_s: see `STALL_S`.
    """

    def __init__(self, token: str, stall_s: float = STALL_S) -> None:
        self._credential = bearer(token)
        self._stall_s = stall_s
        self._channels: dict[str, grpc.aio.Channel] = {}  # the one used last comes last
        self._reading: dict[str, int] = {}

    async def read(
        self, source: str, namespace: str, names: Sequence[int], shape: Geometry, timeout_s: float
    ) -> AsyncGenerator[Block, None]:
        """See `Transport`."""
        assembler = Assembler(len(names), shape)
        self._reading[source] = self._reading.get(source, 0) + 1
        call = None
        try:
            stub: Any = kvpool_pb2_grpc.KvAgentStub(await self._channel(source))
            request = kvpool_pb2.ReadRequest(namespace=namespace, router_keys=pack_names(names))
            call = stub.Read(request, timeout=timeout_s, metadata=self._credential)
            while True:
                async with asyncio.timeout(self._stall_s):
                    chunk = await call.read()
                if chunk is grpc.aio.EOF:
                    return
                if (block := assembler.add(chunk)) is not None:
                    yield block
        except grpc.aio.AioRpcError as error:
            raise PeerError(f"{source}: {from_rpc_error(error)}") from None
        except MalformedError as error:
            raise FalseBlocksError(f"{source}: {error}") from None
        except grpc.aio.UsageError as error:
            raise PeerError(f"{source}: {error}") from None
        except TimeoutError:
            raise PeerError(f"{source}: nothing came for {self._stall_s:.1f} s") from None
        finally:
            if call is not None:
                call.cancel()
            if self._reading[source] > 1:
                self._reading[source] -= 1
            else:
                del self._reading[source]

    async def close(self) -> None:
        """See `Transport`."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    async def _channel(self, source: str) -> grpc.aio.Channel:
        channel = self._channels.pop(source, None) or open_channel(source)
        self._channels[source] = channel
        idle = [peer for peer in self._channels if peer not in self._reading]
        if len(self._channels) > MOST_CHANNELS and idle:
            await self._channels.pop(idle[0]).close()
        return channel


def pack_names(names: Sequence[int]) -> bytes:
    """As `router_keys` of the messages: 8 bytes each, little endian."""
    return struct.pack(f"<{len(names)}Q", *names)


def unpack_names(packed: bytes) -> list[int]:
    """Raises ValueError when it is no whole number of them."""
    if len(packed) % 8:
        raise ValueError(f"router_keys takes 8 bytes each, and has {len(packed)} bytes")
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))
