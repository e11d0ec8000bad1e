"""Where the viewer gets the state of the fleet and the engines' own metrics from, when it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
import grpc.aio

from cluster.display import to_plain
from protos import admin_pb2, admin_pb2_grpc, replica_pb2, replica_pb2_grpc
from protos.channels import ClientTls, bearer, open_channel
from protos.errors import KvorumError, from_rpc_error

_STATUS_TIMEOUT_S = 1.0
_ROUTER_TIMEOUT_S = 1.0
_METRICS_TIMEOUT_S = 2.0


class ClusterSources:
    """Asks controller, routers and replicas, each with a deadline; who does not answer holds up nobody.

    Channels are kept while their servers are members. Made and used within one event loop.
    """

    def __init__(self, admin_address: str, token: str, *, router_tls: ClientTls | None = None) -> None:
        self._credential = bearer(token)
        self._router_tls = router_tls
        self._admin = open_channel(admin_address)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def fleet(self) -> dict[str, Any]:
        """The cluster as `kvorum status --json` shows it: the controller's status, `routing` by router.

        Raises:
            KvorumError: the controller does not answer.
        """
        status = await self._status()
        routers = {router.name: router.address for router in status.routers if router.alive}
        states = await asyncio.gather(*(self._routing(address) for address in routers.values()))
        plain: dict[str, Any] = to_plain(status)
        return plain | {"routing": dict(zip(routers, states, strict=True))}

    async def scrape(self) -> Mapping[str, str]:
        """Prometheus text of vLLM's own metrics, by replica; of those that answer.

        Raises:
            KvorumError: the controller does not answer.
        """
        status = await self._status()
        ready = {r.replica: r.address for r in status.replicas if r.state == admin_pb2.READY and r.address}
        texts = await asyncio.gather(*(self._metrics(address) for address in ready.values()))
        return {name: text for name, text in zip(ready, texts, strict=True) if text}

    async def close(self) -> None:
        """Close every channel."""
        for channel in (self._admin, *self._channels.values()):
            await channel.close()

    async def _status(self) -> admin_pb2.ClusterStatus:
        stub: Any = admin_pb2_grpc.AdminStub(self._admin)
        try:
            status: admin_pb2.ClusterStatus = await stub.GetStatus(
                admin_pb2.GetStatusRequest(), timeout=_STATUS_TIMEOUT_S, metadata=self._credential
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        members = {replica.address for replica in status.replicas} | {r.address for r in status.routers}
        for address in self._channels.keys() - members:
            await self._channels.pop(address).close()
        return status

    async def _routing(self, address: str) -> Any:
        try:
            stub: Any = admin_pb2_grpc.RouterAdminStub(self._channel(address, self._router_tls))
            return to_plain(
                await stub.GetRouterState(
                    admin_pb2.GetRouterStateRequest(), timeout=_ROUTER_TIMEOUT_S, metadata=self._credential
                )
            )
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, OSError) as error:
            return {"error": f"no answer: {_why(error)}"}

    async def _metrics(self, address: str) -> str:
        try:
            stub: Any = replica_pb2_grpc.ReplicaStub(self._channel(address, None))
            answer: replica_pb2.GetMetricsResponse = await stub.GetMetrics(
                replica_pb2.GetMetricsRequest(), timeout=_METRICS_TIMEOUT_S, metadata=self._credential
            )
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return ""
        return answer.text

    def _channel(self, address: str, tls: ClientTls | None) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, tls=tls)
        return self._channels[address]


def _why(error: Exception) -> str:
    known = from_rpc_error(error) if isinstance(error, grpc.aio.AioRpcError) else None
    return known.message if isinstance(known, KvorumError) and known.message else str(error)
