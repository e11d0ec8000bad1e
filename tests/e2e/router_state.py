"""What a running router knows, asked over its own admin service."""

from __future__ import annotations

import grpc

from protos import admin_pb2, admin_pb2_grpc
from protos.channels import bearer


def router_state(address: str, token: str) -> admin_pb2.RouterState:
    """The state of the router at this address, now."""
    with grpc.insecure_channel(address) as channel:
        stub = admin_pb2_grpc.RouterAdminStub(channel)
        return stub.GetRouterState(admin_pb2.GetRouterStateRequest(), timeout=5, metadata=bearer(token))
