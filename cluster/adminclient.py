"""The controller's admin API as the command line calls it: blocking, every call with a deadline."""

from __future__ import annotations

from types import TracebackType

import grpc

from protos import admin_pb2, admin_pb2_grpc
from protos.channels import bearer
from protos.errors import from_rpc_error


class AdminClient:
    """Calls raise `KvorumError`; of an unreachable controller UNAVAILABLE or DEADLINE_EXCEEDED."""

    def __init__(self, address: str, token: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = admin_pb2_grpc.AdminStub(self._channel)
        self._metadata = bearer(token)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def status(self, timeout_s: float = 3.0) -> admin_pb2.ClusterStatus:
        """The cluster as the controller sees it now."""
        try:
            return self._stub.GetStatus(
                admin_pb2.GetStatusRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def overlap(self, timeout_s: float = 5.0) -> admin_pb2.OverlapStatus:
        """What each shard says of its AllReduces now; a shard has 2 s to answer."""
        try:
            return self._stub.GetOverlap(
                admin_pb2.GetOverlapRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def begin_shutdown(self, grace_s: float, timeout_s: float) -> grpc.Future[admin_pb2.ShutdownResponse]:
        """Start draining and ending everything; the future is done when it has ended, or failed."""
        request = admin_pb2.ShutdownRequest(grace_s=grace_s)
        return self._stub.Shutdown.future(request, timeout=timeout_s, metadata=self._metadata)
