"""Ends a cluster, whatever is left of it: politely through its controller, then by process, then by file."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from cluster import state as states
from cluster.adminclient import AdminClient
from cluster.processes import describe, kill_all
from cluster.rayhost import stop_head
from cluster.state import ClusterState
from protos import admin_pb2
from protos.errors import KvorumError

_ANSWER_S = 3.0
"""A controller that is silent for so long is taken for dead."""
_OVER_GRACE_S = 15.0
"""On top of the grace, for the actors to end after their last request."""
_LOG_BYTES = 64 * 2**20

Say = Callable[[str], None]


def tear_down(
    state: ClusterState, *, grace_s: float, say: Say, hurry: threading.Event | None = None
) -> list[str]:
    """End everything of this cluster on this machine; returns what would not end, best empty.

    Running requests get `grace_s`; when `hurry` is set the rest of it is skipped. Safe to repeat,
    and when the controller, Ray or both are dead already.
    """
    hurry = hurry or threading.Event()
    states.write(state.model_copy(update={"phase": "stopping"}))
    ended = bool(state.admin_address) and not hurry.is_set() and _drain(state, grace_s, say, hurry)
    if state.ray_head is not None:
        stop_head(state.ray_head, 0.5 if hurry.is_set() else 5.0)
    elif state.ray_address and not ended:
        _end_actors(state, say)
    survivors = kill_all(state.id, state.marks, grace_s=0.0 if hurry.is_set() else 3.0)
    if survivors:
        return [describe(process) for process in survivors]
    states.remove(state.name)
    shutil.rmtree(state.work_dir, ignore_errors=True)
    return []


def keep_logs(state: ClusterState) -> Path | None:
    """Copy the logs of a failed launch out of the folder that is about to go; None when there are none."""
    target = states.state_dir() / "logs" / state.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True, mode=0o700)
    sources = [
        state.work_dir / "ray-head.log",
        *(state.work_dir / "ray" / "session_latest" / "logs").glob("*.*"),
    ]
    room = _LOG_BYTES
    for source in sources:
        with contextlib.suppress(OSError):
            size = source.stat().st_size
            if source.is_file() and 0 < size <= room:
                shutil.copy(source, target / source.name)
                room -= size
    return target if any(target.iterdir()) else None


def _drain(state: ClusterState, grace_s: float, say: Say, hurry: threading.Event) -> bool:
    """True when the controller ended its actors; says how many requests are still running meanwhile."""
    with AdminClient(state.admin_address, state.token) as admin:
        try:
            admin.status(_ANSWER_S)
        except KvorumError as error:
            say(
                f"the controller at {state.admin_address} does not answer ({error.code.name}): "
                "ending its processes"
            )
            return False
        timeout_s = grace_s + _OVER_GRACE_S
        deadline = time.monotonic() + timeout_s
        future = admin.begin_shutdown(grace_s, timeout_s)
        told = -1
        while not _settled(future) and not hurry.is_set() and time.monotonic() < deadline:
            running = _running(admin)
            if running not in (told, None, 0):
                say(f"draining: {running} running; Ctrl-C again ends them now")
                told = running
        if hurry.is_set():
            future.cancel()
            return False
        try:
            future.result(timeout=_ANSWER_S)
        except (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
            say("the controller did not finish the shutdown: ending its processes")
            return False
        return True


def _settled(future: grpc.Future[admin_pb2.ShutdownResponse]) -> bool:
    with contextlib.suppress(grpc.FutureTimeoutError, grpc.RpcError):
        future.result(timeout=0.2)
    return bool(future.done())


def _running(admin: AdminClient) -> int | None:
    try:
        status = admin.status(1.0)
    except KvorumError:
        return None
    busy = [replica.load for replica in status.replicas if replica.state != admin_pb2.STOPPED]
    return sum(load.running + load.waiting for load in busy)


def _end_actors(state: ClusterState, say: Say) -> None:
    """Remove the named actors and placement groups of this cluster from a Ray that is not ours."""
    host, _, port = state.ray_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError):
        say(f"the Ray cluster at {state.ray_address} is gone")
        return
    import ray  # noqa: PLC0415 - seconds; rarely needed
    from ray.exceptions import RayError  # noqa: PLC0415
    from ray.util.placement_group import get_placement_group, remove_placement_group  # noqa: PLC0415

    try:
        ray.init(
            address=state.ray_address, namespace=state.namespace, log_to_driver=False, logging_level="ERROR"
        )
    except (ConnectionError, RuntimeError, RayError) as error:
        say(
            f"cannot reach the Ray cluster at {state.ray_address} ({type(error).__name__}); "
            "its actors may live on"
        )
        return
    try:
        for name in ray.util.list_named_actors():
            with contextlib.suppress(ValueError, RayError):
                ray.kill(ray.get_actor(name, state.namespace), no_restart=True)
        for group in ray.util.placement_group_table().values():
            if group["name"].startswith(f"{state.namespace}-") and group["state"] != "REMOVED":
                with contextlib.suppress(ValueError, RayError):
                    remove_placement_group(get_placement_group(group["name"]))
    finally:
        ray.shutdown()
