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
import psutil

from cluster import kv_pools, serving
from cluster import state as states
from cluster.adminclient import AdminClient
from cluster.processes import describe, kill_all, leftovers
from cluster.rayhost import stop_head
from cluster.state import CONTROLLER_NAME, ClusterState
from protos import admin_pb2
from protos.errors import KvorumError
from telemetry.config import TelemetryConfig
from telemetry.recovery import settle

_ANSWER_S = 3.0
"""A controller that is silent for so long is taken for dead."""
_OVER_GRACE_S = 15.0
"""On top of the grace, for the actors to end after their last request."""
_LOG_BYTES = 64 * 2**20
_SERVE_PROCESSES = ("ray::Serve", "ray::Proxy")
_LAST_WORDS_S = 0.3
_ROUNDS = 2
"""The second finds what the controller started while it was being ended itself."""

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
        if state.owns_serve:
            _end_serve(state)
        stop_head(state.ray_head, 0.5 if hurry.is_set() else 5.0)
    elif state.ray_address and (state.owns_serve or not ended):
        _end_in_foreign_ray(state, say, actors=not ended)
    survivors = kill_all(state.id, state.marks, grace_s=0.0 if hurry.is_set() else 3.0)
    if survivors:
        return [describe(process) for process in survivors]
    if state.span_store is not None:
        settle(TelemetryConfig(store_path=state.span_store))
    kv_pools.remove_here(state, say)
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
        *(state.work_dir / "ray" / "session_latest" / "logs" / "serve").glob("*.log"),
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


def _end_serve(state: ClusterState) -> None:
    """End Serve's processes in a private Ray; its head would wait for them until it is killed itself."""
    serve = []
    for process in leftovers(state.id, state.marks):
        with contextlib.suppress(psutil.Error):
            if process.name().startswith(_SERVE_PROCESSES):
                process.terminate()
                serve.append(process)
    # Streams have ended by now; what they said last is on its way.
    _gone, living = psutil.wait_procs(serve, timeout=_LAST_WORDS_S)
    for process in living:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _end_in_foreign_ray(state: ClusterState, say: Say, *, actors: bool) -> None:
    """In a Ray that is not ours, end the Serve that is, and with `actors` all else of this cluster."""
    host, _, port = state.ray_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError):
        say(f"the Ray cluster at {state.ray_address} is gone")
        return
    import ray  # noqa: PLC0415 - seconds; rarely needed
    from ray.exceptions import RayError  # noqa: PLC0415

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
        if state.owns_serve:
            serving.stop()
        if actors:
            _end_actors(state.namespace)
            kv_pools.remove_everywhere(state, say)
    finally:
        ray.shutdown()


def _end_actors(namespace: str) -> None:
    """Remove the named actors and placement groups of the cluster in that namespace."""
    import ray  # noqa: PLC0415
    from ray.exceptions import RayError  # noqa: PLC0415
    from ray.util.placement_group import get_placement_group, remove_placement_group  # noqa: PLC0415

    for _ in range(_ROUNDS):
        # The controller first: it would start new ones in place of those that go.
        for name in sorted(ray.util.list_named_actors(), key=lambda name: name != CONTROLLER_NAME):
            with contextlib.suppress(ValueError, RayError):
                ray.kill(ray.get_actor(name, namespace), no_restart=True)
    for group in ray.util.placement_group_table().values():
        if group["name"].startswith(f"{namespace}-") and group["state"] != "REMOVED":
            with contextlib.suppress(ValueError, RayError):
                remove_placement_group(get_placement_group(group["name"]))
