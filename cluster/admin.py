"""The admin API over a controller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import admin_pb2, admin_pb2_grpc, common_pb2
from protos.channels import bind, create_server
from protos.errors import KvorumError, to_status

SERVICE = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
HEARTBEAT_S = 2.0
_DEFAULT_GRACE_S = 30.0


class Controller(Protocol):
    """What the admin API needs of a controller."""

    bundle: admin_pb2.TokenizerBundle

    def status(self) -> admin_pb2.ClusterStatus: ...
    def members(self) -> admin_pb2.Members: ...
    async def model_files(self) -> admin_pb2.ModelFiles: ...
    async def overlap(self) -> admin_pb2.OverlapStatus: ...
    async def wait_change(self, version: int, timeout_s: float) -> None: ...
    async def restart_replica(self, name: str, grace_s: float) -> bool: ...
    async def shutdown(self, grace_s: float) -> None: ...
    def exit_soon(self) -> None: ...


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Answers operators, routers and the command line."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ClusterStatus:
        return self._controller.status()

    async def WatchMembers(  # noqa: N802
        self, request: admin_pb2.WatchMembersRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[admin_pb2.Members]:
        while True:
            members = self._controller.members()
            yield members
            await self._controller.wait_change(members.version, HEARTBEAT_S)

    async def GetTokenizer(  # noqa: N802
        self, request: admin_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.TokenizerBundle:
        bundle = self._controller.bundle
        if request.digest and request.digest != bundle.digest:
            await _refuse(context, f"no tokenizer with digest {request.digest}; there is {bundle.digest}")
        return bundle

    async def GetModelFiles(  # noqa: N802
        self, request: admin_pb2.GetModelFilesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ModelFiles:
        try:
            return await self._controller.model_files()
        except KvorumError as error:
            await context.abort_with_status(to_status(error))
            raise

    async def GetOverlap(  # noqa: N802
        self, request: admin_pb2.GetOverlapRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.OverlapStatus:
        return await self._controller.overlap()

    async def RestartReplica(  # noqa: N802
        self, request: admin_pb2.RestartReplicaRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.RestartReplicaResponse:
        if not await self._controller.restart_replica(request.replica, request.grace_s or _DEFAULT_GRACE_S):
            await _refuse(context, f"no replica {request.replica!r}: `kvorum status` lists them")
        return admin_pb2.RestartReplicaResponse()

    async def Shutdown(  # noqa: N802
        self, request: admin_pb2.ShutdownRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.ShutdownResponse:
        await self._controller.shutdown(request.grace_s)
        self._controller.exit_soon()
        return admin_pb2.ShutdownResponse()


async def serve_admin(servicer: AdminServicer, host: str, port: int, token: str) -> grpc.aio.Server:
    """Start the admin server.

    Raises:
        OSError: the port is taken.
    """
    server = create_server(tokens=[token])
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bind(server, host, port)
    await server.start()
    for name in ("", SERVICE):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], message: str) -> None:
    await context.abort_with_status(
        to_status(KvorumError(grpc.StatusCode.NOT_FOUND, common_pb2.NOT_FOUND, message))
    )
