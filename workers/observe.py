"""What tracing may see of a request at the replica; the default sees nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from vllm.outputs import RequestOutput

from protos import common_pb2, replica_pb2

Metadata = Iterable[tuple[str, str | bytes]]


class GenerateScope(Protocol):
    """One request's life at this replica."""

    def step(self, response: common_pb2.GenerateResponse, output: RequestOutput) -> None:
        """One message is about to be sent."""

    def finish(self, error: BaseException | None) -> None:
        """The request is over; called exactly once, whatever happened."""


class GenerateObserver(Protocol):
    """Opens a scope for each request."""

    def start(self, request: replica_pb2.ReplicaGenerateRequest, metadata: Metadata) -> GenerateScope:
        """A request has arrived with this gRPC metadata."""
