"""A controller that answers the admin API from a script, and state files of a test's own."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from cluster import state as states
from cluster.processes import ProcessMark
from cluster.state import ClusterState
from protos import admin_pb2, admin_pb2_grpc
from protos.channels import AUTH_KEY

Script = Callable[[int], admin_pb2.ClusterStatus]


class FakeController(admin_pb2_grpc.AdminServicer):
    """`script(n)` is the status of the n-th call; Shutdown waits for `may_end`."""

    def __init__(self, script: Script, token: str) -> None:
        self._script, self._token = script, token
        self.asked = 0
        self.overlap = admin_pb2.OverlapStatus()
        self.files = admin_pb2.ModelFiles()
        self.files_asked = 0
        self.files_refused = 0
        """So many calls for the files are answered with UNAVAILABLE."""
        self.grace_s: float | None = None
        self.may_end = threading.Event()
        self.may_end.set()

    def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Any) -> admin_pb2.ClusterStatus:  # noqa: N802
        self._check(context)
        self.asked += 1
        return self._script(self.asked - 1)

    def GetModelFiles(self, request: admin_pb2.GetModelFilesRequest, context: Any) -> admin_pb2.ModelFiles:  # noqa: N802
        self._check(context)
        self.files_asked += 1
        if self.files_asked <= self.files_refused:
            context.abort(grpc.StatusCode.UNAVAILABLE, "still starting")
        return self.files

    def GetOverlap(self, request: admin_pb2.GetOverlapRequest, context: Any) -> admin_pb2.OverlapStatus:  # noqa: N802
        self._check(context)
        return self.overlap

    def Shutdown(self, request: admin_pb2.ShutdownRequest, context: Any) -> admin_pb2.ShutdownResponse:  # noqa: N802
        self._check(context)
        self.grace_s = request.grace_s
        self.may_end.wait(20)
        return admin_pb2.ShutdownResponse()

    def _check(self, context: Any) -> None:
        if (AUTH_KEY, f"Bearer {self._token}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")


@contextmanager
def fake_controller(script: Script, token: str = "fake-token") -> Iterator[tuple[FakeController, str]]:
    """A running one and its address."""
    controller = FakeController(script, token)
    server = grpc.server(ThreadPoolExecutor(4))
    admin_pb2_grpc.add_AdminServicer_to_server(controller, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield controller, f"127.0.0.1:{port}"
    finally:
        controller.may_end.set()
        server.stop(None).wait()


def fake_status(*replicas: admin_pb2.ReplicaState.ValueType, running: int = 0) -> admin_pb2.ClusterStatus:
    """A cluster with replicas in these states and one router."""
    status = admin_pb2.ClusterStatus(name="kvorum", tensor_parallel_size=1)
    for index, state in enumerate(replicas):
        replica = status.replicas.add(replica=f"replica-{index}", epoch="e0", state=state)
        replica.load.running = running
    status.routers.add(name="router-0", address="127.0.0.1:50051", alive=True)
    return status


def fake_state(work_dir: Path, **changes: object) -> ClusterState:
    """The state of a cluster launched by this process, written to the state folder."""
    fields: dict[str, object] = {
        "name": "kvorum",
        "id": secrets.token_hex(4),
        "phase": "running",
        "launcher": ProcessMark.of(os.getpid()),
        "token": "fake-token",
        "work_dir": work_dir,
    }
    state = ClusterState.model_validate(fields | changes)
    states.write(state)
    return state
