"""`up`: from a configuration to a cluster that answers, in the order in which mistakes are cheapest.

Nothing is started before what can be checked without starting is checked. Whatever fails later, all that
was started is ended again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster import kv_pools, rayhost, serving, teardown, viewer_start
from cluster import state as states
from cluster.adminclient import AdminClient
from cluster.config import ClusterConfig
from cluster.display import ReplicaProgress, Steps, state_name
from cluster.failures import BadInput, RunFailed
from cluster.http_probe import ask_readiness
from cluster.interrupts import Interrupts
from cluster.placement import PlacementError
from cluster.ports import free_port
from cluster.preflight import (
    check_files,
    check_fits_here,
    check_http,
    check_kv_pool,
    check_ports,
    own_cores,
)
from cluster.processes import MARKER, ProcessMark, leftovers
from cluster.state import ClusterState
from protos import admin_pb2
from protos.errors import KvorumError

if TYPE_CHECKING:
    from cluster.controller import ControllerHandle
    from workers.checkpoint import PreparedModel

_EXCEPTION_NAME = re.compile(r"^[\w.]+(Error|Exception|Timeout)(\([\w.]+\))?: ")
_POLL_S = 0.5
_WATCH_S = 1.0
_GIVE_UP_AFTER = 2
"""Failed starts of a replica that never was ready: its next one will fail too."""
_SILENCE_S = 30.0
_DEAD_AFTER_S = 20.0
"""A controller that restarts is silent for seconds; one that is for longer, while launching, is lost."""


@dataclass
class Launch:
    """A cluster that this process brought up and may end again."""

    config: ClusterConfig
    state: ClusterState
    steps: Steps
    interrupts: Interrupts

    def watch(self) -> None:
        """Stay in the foreground, telling of replicas that fail and return, until somebody ends the cluster.

        Returns when `kvorum down` did; signals raise `Interrupted`.

        Raises:
            RunFailed: the private Ray died under the cluster.
        """
        known: dict[str, tuple[str, int]] = {}
        silent = False
        face = _FaceWatch(self.state, self.steps) if self.state.http_url else None
        while True:
            current = states.read(self.state.name)
            if current is None or current.id != self.state.id or current.phase == "stopping":
                self.steps.say("stopped by `kvorum down`")
                return
            if self.state.ray_head is not None and self.state.ray_head.process() is None:
                raise RunFailed("the private Ray ended unexpectedly, and with it the cluster: start it again")
            try:
                with AdminClient(self.state.admin_address, self.state.token) as admin:
                    status = admin.status()
                if silent:
                    self.steps.say("the controller answers again")
                silent = False
                self._tell_changes(status, known)
            except KvorumError as error:
                if not silent:
                    self.steps.say(f"the controller does not answer ({error.code.name}): waiting for it")
                silent = True
            if face is not None:
                face.look()
            time.sleep(_WATCH_S)

    def stop(self, grace_s: float | None = None) -> None:
        """End exactly what was started. Ctrl-C from here on skips the grace.

        Raises:
            RunFailed: some process would not die; it is named.
        """
        self.interrupts.defer()
        self.steps.say("stopping")
        grace_s = self.config.engine.drain_grace_s if grace_s is None else grace_s
        left = teardown.tear_down(
            self.state, grace_s=grace_s, say=self.steps.say, hurry=self.interrupts.hurry
        )
        if left:
            raise RunFailed(f"these processes would not end: {', '.join(left)}; end them by hand")
        self.steps.say("stopped; nothing is left running")

    def _tell_changes(self, status: admin_pb2.ClusterStatus, known: dict[str, tuple[str, int]]) -> None:
        for replica in status.replicas:
            now = (state_name(replica.state), replica.restarts)
            if replica.replica in known and known[replica.replica] != now:
                why = (
                    f": {replica.last_error}"
                    if replica.state == admin_pb2.FAILED and replica.last_error
                    else ""
                )
                self.steps.say(f"{time.strftime('%H:%M:%S')} {replica.replica} {now[0]}{why}")
            known[replica.replica] = now


class _FaceWatch:
    """Tells when an HTTP face that was ready no longer is, and when it is again."""

    def __init__(self, state: ClusterState, steps: Steps) -> None:
        self._state, self._steps, self._well = state, steps, True

    def look(self) -> None:
        now = ask_readiness(self._state.http_url, self._state.token)
        if now.ready != self._well:
            how = "ready again" if now.ready else now.phase or "does not answer"
            self._steps.say(f"{time.strftime('%H:%M:%S')} HTTP face {how}")
        self._well = now.ready


def launch(config: ClusterConfig, steps: Steps, interrupts: Interrupts) -> Launch:
    """Bring the cluster up and return when every replica is ready and the router listens.

    Raises:
        BadInput: the configuration cannot work here; nothing was started, or it is ended again.
        RunFailed: something broke on the way; everything started is ended, the logs are kept.
        Interrupted: a signal came; likewise.
    """
    config = config.model_copy(update={"telemetry": states.with_span_store(config.telemetry)})
    with states.locked(config.name):
        _refuse_second(config.name, steps)
        check_files(config)
        check_http(config)
        check_ports(config)
        check_fits_here(config)
        check_kv_pool(config)
        prepared = _prepare(config, steps)
        state = _begin(config)
        try:
            state = _bring_up(config, prepared, state, steps, interrupts)
        except BaseException as error:
            interrupts.defer()
            _undo(state, error, steps, interrupts)
            raise
    return Launch(config, state, steps, interrupts)


def _refuse_second(name: str, steps: Steps) -> None:
    old = states.read(name)
    if old is None:
        return
    if _is_alive(old):
        where = old.router_addresses[0] if old.router_addresses else "still starting"
        raise BadInput(
            f"cluster {name!r} is up already ({old.model} at {where}): "
            "`kvorum down` ends it, --name NAME starts another beside it"
        )
    steps.say(f"cleaning up after a cluster {name!r} that died")
    if left := teardown.tear_down(old, grace_s=0.0, say=steps.say):
        raise RunFailed(f"processes of a dead cluster {name!r} would not end: {', '.join(left)}")


def _is_alive(state: ClusterState) -> bool:
    if state.ray_head is not None:
        return state.ray_head.process() is not None
    if not state.admin_address:
        return False  # it died before its controller was; nobody holds the lock
    deadline = time.monotonic() + _DEAD_AFTER_S
    with AdminClient(state.admin_address, state.token) as admin:
        while True:
            try:
                admin.status()
                return True
            except KvorumError:  # a controller that died is away for some seconds
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.5)


def _prepare(config: ClusterConfig, steps: Steps) -> PreparedModel:
    from workers.checkpoint import CheckpointError, prepare  # noqa: PLC0415 - slow to import

    engine = config.engine
    started = time.monotonic()
    try:
        with steps.bar(f"preparing {engine.model}") as progress:
            prepared = prepare(engine.model, engine.tensor_parallel_size, progress=progress)
    except CheckpointError as error:
        raise BadInput(str(error)) from None
    note = f" ({prepared.note})" if prepared.note else ""
    steps.say(f"[green]✓[/] model {prepared.name}{note} [dim]{time.monotonic() - started:.1f} s[/]")
    return prepared


def _begin(config: ClusterConfig) -> ClusterState:
    """Write the state before the first process, so that `down` can end a launch that was killed."""
    cluster_id = secrets.token_hex(4)
    state = ClusterState(
        name=config.name,
        id=cluster_id,
        launcher=ProcessMark.of(os.getpid()),
        model=config.engine.served_name or config.engine.model,
        owns_ray=config.ray_address is None,
        ray_address=config.ray_address or "",
        token=secrets.token_hex(32),
        work_dir=rayhost.make_work_dir(cluster_id),
        span_store=config.telemetry.store_path,
        kv_pool_folder=kv_pools.folder_of(config.engine, cluster_id),
        api_keys_file=config.router.api_keys_file,
        router_ca=config.router.tls_cert,
    )
    states.write(state)
    return state


def _bring_up(
    config: ClusterConfig, prepared: PreparedModel, state: ClusterState, steps: Steps, interrupts: Interrupts
) -> ClusterState:
    # The check imports the engine (seconds) while Ray starts beside it; nothing is placed yet.
    head: rayhost.RayHead | None = None
    if state.owns_ray:
        head = rayhost.start(
            state.id, state.work_dir, cores=own_cores(), object_store_mib=config.object_store_mib
        )
        state = _noted(state, ray_head=head.mark)
        rayhost.enter(state.work_dir, "")
    with steps.step("checking the engine's arguments", "engine arguments are valid"):
        said = _check_engine(config, prepared)
    if said:
        steps.say(f"  {said}")
    with steps.step("starting a private Ray" if head else f"joining Ray at {config.ray_address}") as note:
        if head is not None:
            state = _noted(state, ray_address=head.wait_ready(config.ray_timeout_s))
        address = _connect(config, state)
        state = _noted(state, ray_address=address)
        note.text = f"private Ray at {address}" if head else f"joined Ray at {address}"
    try:
        interrupts.install()  # Ray took SIGTERM
        config = viewer_start.with_viewer(config, state.token)
        if config.viewer.enabled:
            target = config.viewer.target(state.token)
            page = {"viewer_url": config.viewer.url, "viewer_ca": config.viewer.tls_cert}
            state = _noted(state, **page, viewer_otlp=target.address)
        with steps.step("starting the controller", "controller is up"):
            handle = _start_controller(config, prepared, state)
        state = _noted(
            state, model=config.engine.served_name or prepared.name, admin_address=handle.admin_address
        )
        if config.http.enabled:  # beside the engines, which take longer
            with steps.step("starting the HTTP face", "HTTP face is starting"):
                state = _start_http(config, state, handle)
    finally:
        _disconnect()
        interrupts.install()  # Ray gave SIGTERM back to the system
    face = serving.Waiting(state.http_url, state.token) if state.http_url else None
    status = _wait_ready(config, state, steps, face)
    state = _noted(state, router_addresses=tuple(r.address for r in status.routers if r.alive))
    if config.router.tls_cert is None:  # with TLS its certificate may well not be for this name
        _wait_serving(state.router_addresses[0])
    if face is not None:
        with steps.step("waiting for the HTTP face", f"HTTP face at {state.http_url}"):
            _wait_http(config, state, face, interrupts)
    if state.viewer_url and not viewer_start.answers(state.viewer_url, state.viewer_ca):
        steps.say(f"[yellow]the viewer at {state.viewer_url} does not answer yet[/]; requests are served")
    return _noted(state, phase="running")


def _start_http(config: ClusterConfig, state: ClusterState, handle: ControllerHandle) -> ClusterState:
    """Deploy the face in the connected Ray; returns before it answers."""
    from ray.exceptions import RayError  # noqa: PLC0415

    settings = serving.settings_of(
        config,
        token=state.token,
        admin_address=handle.admin_address,
        router_address=handle.router_address,
        front_cores=handle.front_cores,
        scratch=state.work_dir,
    )
    serving.refuse_foreign()
    port = config.http.port or free_port(config.http.host)
    state = _noted(state, http_url=serving.address_of(config.http, port), owns_serve=True)
    try:
        serving.start(config, settings, port)
    except (RayError, RuntimeError, TimeoutError) as error:
        raise RunFailed(f"cannot start Ray Serve: {_last_line(error)}; --no-http goes without it") from None
    return state


def _wait_http(
    config: ClusterConfig, state: ClusterState, face: serving.Waiting, interrupts: Interrupts
) -> None:
    """Until the face is ready, which it usually is.

    Raises:
        RunFailed: it gave up, or is not ready in time; with what it or Ray Serve says.
    """
    if face.until_ready(config.engine.start_timeout_s):
        return
    said = face.phase
    if face.silent:
        _connect(config, state)
        try:
            said = serving.complaint()
        finally:
            _disconnect()
            interrupts.install()
    raise RunFailed(
        f"the HTTP face at {state.http_url} is not ready ({said or 'it does not answer'}): "
        "--no-http goes without it"
    )


def _noted(state: ClusterState, **changes: Any) -> ClusterState:
    state = state.model_copy(update=changes)
    states.write(state)
    return state


def _check_engine(config: ClusterConfig, prepared: PreparedModel) -> str:
    """Returns what the user should know of it."""
    os.environ.setdefault(
        "VLLM_LOGGING_LEVEL", "ERROR"
    )  # here only: the head has its own environment already
    from workers.engine_args import EngineArgsError, check, dtype_note  # noqa: PLC0415 - imports the engine

    try:
        check(config.engine, prepared)
    except EngineArgsError as error:
        raise BadInput(f"the engine refuses its arguments: {error}") from None
    if config.http.enabled and config.http.arguments:
        from cluster.openai.failures import IngressError  # noqa: PLC0415
        from cluster.openai.front_args import parse  # noqa: PLC0415 - imports vLLM's server

        try:
            parse(config.http.arguments)
        except IngressError as error:
            raise BadInput(f"http.arguments: {error}") from None
    return dtype_note(config.engine, prepared)


def _connect(config: ClusterConfig, state: ClusterState) -> str:
    import ray  # noqa: PLC0415 - after rayhost.enter
    from ray.exceptions import RayError  # noqa: PLC0415

    options: dict[str, Any] = {}
    if state.owns_ray:
        rayhost.enter(state.work_dir, state.ray_address)
    else:  # a private head passes the marker on by itself
        options["runtime_env"] = {"env_vars": {MARKER: state.id}}

    try:
        if state.ray_address != "auto":
            _reach(state.ray_address, config.ray_timeout_s)
        ray.init(
            address=state.ray_address,
            namespace=state.namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        advice = (
            "" if state.owns_ray else "; is it up, and is RAY_AUTH_TOKEN_PATH set if it asks for a token?"
        )
        raise RunFailed(f"cannot join Ray at {state.ray_address}: {_last_line(error)}{advice}") from None
    return str(ray.get_runtime_context().gcs_address)


def _reach(address: str, timeout_s: float) -> None:
    """Raises OSError at once where Ray itself would retry for long."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise BadInput(f"ray_address {address!r} is neither HOST:PORT nor auto")
    socket.create_connection((host, int(port)), timeout=timeout_s).close()


def _start_controller(
    config: ClusterConfig, prepared: PreparedModel, state: ClusterState
) -> ControllerHandle:
    from ray.exceptions import RayError  # noqa: PLC0415

    from cluster.controller import start_controller  # noqa: PLC0415 - imports ray and the engine

    try:
        return start_controller(config, prepared, state.token)
    except PlacementError as error:
        raise BadInput(_last_line(error)) from None
    except (RayError, OSError) as error:
        raise RunFailed(f"the controller did not start: {_last_line(error)}") from None


def _disconnect() -> None:
    import ray  # noqa: PLC0415

    ray.shutdown()


def _wait_ready(
    config: ClusterConfig, state: ClusterState, steps: Steps, face: serving.Waiting | None
) -> admin_pb2.ClusterStatus:
    deadline = time.monotonic() + config.engine.start_timeout_s
    heard = time.monotonic()
    with AdminClient(state.admin_address, state.token) as admin, ReplicaProgress(steps.console) as progress:
        while True:
            try:
                status = admin.status()
            except KvorumError as error:
                if time.monotonic() - heard > _SILENCE_S:
                    raise RunFailed(f"the controller fell silent for {_SILENCE_S:.0f} s: {error}") from None
                time.sleep(_POLL_S)
                continue
            heard = time.monotonic()
            progress.show(status)
            if face is not None:
                face.look()  # one that gave up ends the launch now
            for replica in status.replicas:
                if replica.restarts >= _GIVE_UP_AFTER:
                    raise RunFailed(
                        f"{replica.replica} failed {replica.restarts} times: {replica.last_error}"
                    )
            ready = [replica.state == admin_pb2.READY for replica in status.replicas]
            if ready and all(ready) and any(router.alive for router in status.routers):
                return status
            if time.monotonic() > deadline:
                states_now = ", ".join(f"{r.replica} {state_name(r.state)}" for r in status.replicas)
                raise RunFailed(
                    f"not ready after {config.engine.start_timeout_s:.0f} s ({states_now or 'no replicas'}): "
                    "raise --start-timeout-s if the machine is slow"
                )
            time.sleep(_POLL_S)


def _wait_serving(address: str) -> None:
    """Until the router has heard of a replica, so that the first request after `up` is not refused.

    Raises:
        RunFailed: it never did.
    """
    deadline = time.monotonic() + _SILENCE_S
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            time.sleep(_POLL_S / 5)
    raise RunFailed(f"the router at {address} saw no ready replica within {_SILENCE_S:.0f} s")


def _undo(state: ClusterState, error: BaseException, steps: Steps, interrupts: Interrupts) -> None:
    if not isinstance(error, BadInput | KeyboardInterrupt):
        kept = teardown.keep_logs(state)
        if kept is not None:
            steps.say(f"logs are kept in {kept}")
    current = states.read(state.name) or state
    left = teardown.tear_down(current, grace_s=0.0, say=lambda _line: None, hurry=interrupts.hurry)
    if left or leftovers(state.id, current.marks):
        steps.say(f"[red]these processes would not end: {', '.join(left)}[/]")


def _last_line(error: BaseException) -> str:
    """Ray puts a remote traceback before what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _EXCEPTION_NAME.sub("", lines[-1]) if lines else type(error).__name__
