"""The controller actor: desired state in, replicas and routers out. Served by `admin.proto`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.admin import AdminServicer, serve_admin
from cluster.checkpoint_files import read_small_files
from cluster.config import ClusterConfig
from cluster.kv_agents import KvAgents, RayActors
from cluster.placement import Topology, fit
from cluster.ports import free_port
from cluster.processes import MARKER
from cluster.router_actor import RouterSupervisor
from cluster.state import CONTROLLER_NAME
from cluster.supervisor import ReplicaSupervisor, Surroundings, to_status
from cluster.viewer_actor import ViewerSpec, start_viewer, stop_viewer, viewer_spec
from cluster.watch import LoadWatch
from protos import admin_pb2, common_pb2
from telemetry.logs import configure_logging
from workers.checkpoint import PreparedModel
from workers.engine_args import resolve_device
from workers.kvpool.agent_actor import AgentSpec
from workers.kvpool.pool_config import pool_folder
from workers.pinning import pin_process

log = logging.getLogger(__name__)

_SHARDS_REFRESH_S = 2.0
_CREATE_TIMEOUT_S = 60.0
_LAST_WORDS_S = 2.0


@dataclass(frozen=True)
class ControllerSpec:
    """All that a controller is made from; Ray hands it to a restarted one again."""

    config: ClusterConfig
    model_name: str
    bundle: Path
    """The TokenizerBundle file, read here and handed to routers."""
    checkpoint: Path
    """The checkpoint's folder; its small files are handed to HTTP ingresses."""
    device: str
    topology: Topology
    front_cores: tuple[int, ...]
    namespace: str
    ray_address: str
    admin_port: int
    router_port: int
    viewer: ViewerSpec | None
    token: str = field(repr=False)


@dataclass(frozen=True)
class ControllerHandle:
    """What the launcher needs of a controller it created."""

    admin_address: str
    router_address: str
    front_cores: tuple[int, ...]
    """Cores that no shard computes on; none where there are no such cores."""


class ControllerActor:
    """Named, detached, restarted by Ray. Its state is rebuilt from Ray and the replicas."""

    def __init__(self, spec: ControllerSpec) -> None:
        configure_logging("kvorum.controller", format=spec.config.telemetry.log_format)
        self._spec = spec
        self._version = 0
        self._changed = asyncio.Event()
        self._supervisors: list[ReplicaSupervisor] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._viewer: Any = None
        self.bundle = admin_pb2.TokenizerBundle.FromString(spec.bundle.read_bytes())
        self._served = common_pb2.ModelInfo(name=spec.model_name, tokenizer_digest=self.bundle.digest)
        self._started = asyncio.ensure_future(self._start())
        self._started.add_done_callback(_exit_if_failed)

    async def ready(self) -> ControllerHandle:
        """Wait until the admin API listens.

        Raises:
            OSError: a port is taken. PlacementError: the topology does not fit this Ray cluster.
        """
        await asyncio.shield(self._started)
        spec = self._spec
        return ControllerHandle(
            f"{spec.config.admin_host}:{spec.admin_port}",
            f"{spec.config.router.host}:{spec.router_port}",
            spec.front_cores,
        )

    async def _start(self) -> None:
        spec = self._spec
        pin_process(spec.front_cores)
        self._kv_agents = KvAgents(self._agent_spec, RayActors(spec.namespace))
        around = Surroundings(
            config=spec.config,
            topology=spec.topology,
            device=spec.device,
            namespace=spec.namespace,
            ray_address=spec.ray_address,
            token=spec.token,
            front_cores=spec.front_cores,
            taken_cores=self._taken_cores,
            changed=self.touch,
            kv_agent=self._kv_agents.address,
        )
        self._supervisors = [ReplicaSupervisor(f"replica-{i}", around) for i in range(spec.topology.replicas)]
        self._loads = LoadWatch(spec.token)
        self._router = RouterSupervisor(
            "router-0",
            spec.config,
            namespace=spec.namespace,
            port=spec.router_port,
            admin_address=f"{spec.config.admin_host}:{spec.admin_port}",
            token=spec.token,
            front_cores=spec.front_cores,
        )
        # Adopt first: a watcher that were shown an empty membership would drop replicas that serve.
        await asyncio.gather(
            self._router.adopt(), self._kv_agents.adopt(), *(s.adopt() for s in self._supervisors)
        )
        self._server = await serve_admin(
            AdminServicer(self), spec.config.admin_host, spec.admin_port, spec.token
        )
        for supervisor in self._supervisors:
            self._own(supervisor.run(), supervisor.record.name)
        self._own(self._router.run(), "router-0")
        self._own(self._refresh(), "refresh")
        if spec.viewer is not None:  # at once, as it is in nobody's way while engines load
            self._viewer = await asyncio.to_thread(start_viewer, spec.viewer)

    def _own(self, work: Any, name: str) -> None:
        """Run a background task whose unexpected end takes the controller down, to be restarted by Ray."""
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                log.critical("task %s ended: restarting the controller", name, exc_info=error)
                logging.shutdown()
                os._exit(1)

        task.add_done_callback(ended)

    async def _refresh(self) -> None:
        while True:
            ready = [s for s in self._supervisors if s.record.state == admin_pb2.READY and s.record.info]
            self._loads.follow({s.record.name: s.record.info.address for s in ready if s.record.info})
            await asyncio.gather(self._kv_agents.refresh(), *(s.refresh_shards() for s in ready))
            await asyncio.sleep(_SHARDS_REFRESH_S)

    def touch(self) -> None:
        """Membership changed: wake every watcher."""
        self._version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_change(self, version: int, timeout_s: float) -> None:
        """Return when the membership is newer than `version`, or after the timeout."""
        if self._version == version:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()

    def members(self) -> admin_pb2.Members:
        """What routers are told."""
        members, model = admin_pb2.Members(version=self._version), self._model()
        for record in (s.record for s in self._supervisors):
            members.members.add(
                replica=record.name,
                epoch=record.epoch,
                address=record.info.address if record.info else "",
                state=record.state,
                model=model,
            )
        return members

    def _model(self) -> common_pb2.ModelInfo:
        """What is served: a replica's word once one was ready, and kept while none is."""
        for record in (s.record for s in self._supervisors):
            if record.info is not None:
                self._served.ParseFromString(record.info.model)
        return self._served

    def status(self) -> admin_pb2.ClusterStatus:
        """What operators are shown."""
        engine = self._spec.config.engine
        status = admin_pb2.ClusterStatus(
            name=self._spec.config.name,
            tensor_parallel_size=engine.tensor_parallel_size,
            pipeline_parallel_size=engine.pipeline_parallel_size,
            controller_pid=os.getpid(),
            model=self._model(),
        )
        for supervisor in self._supervisors:
            record = supervisor.record
            status.replicas.append(to_status(record, self._loads.load(record.name)))
        status.routers.append(self._router.status())
        status.kv_pools.extend(self._kv_agents.status())
        return status

    async def overlap(self) -> admin_pb2.OverlapStatus:
        """What each shard says of its AllReduces now; every one is asked at once."""
        return admin_pb2.OverlapStatus(
            name=self._spec.config.name,
            tensor_parallel_size=self._spec.config.engine.tensor_parallel_size,
            replicas=await asyncio.gather(*(s.overlap() for s in self._supervisors)),
        )

    async def model_files(self) -> admin_pb2.ModelFiles:
        """What an HTTP ingress needs to render and parse as the engines do.

        Raises:
            KvorumError: the checkpoint cannot be read, or one message cannot carry its files.
        """
        spec, engine = self._spec, self._spec.config.engine
        return admin_pb2.ModelFiles(
            model=spec.model_name,
            files=await asyncio.to_thread(read_small_files, spec.checkpoint),
            max_model_len=self._model().max_model_len or engine.max_model_len or 0,
            dtype=engine.dtype,
            engine_args_json={
                name: json.dumps(value, default=str) for name, value in engine.engine_args.items()
            },
        )

    async def restart_replica(self, name: str, grace_s: float) -> bool:
        """Drain and replace one replica; False when there is none of that name."""
        for supervisor in self._supervisors:
            if supervisor.record.name == name:
                await supervisor.restart(grace_s)
                return True
        return False

    async def shutdown(self, grace_s: float) -> None:
        """End routers, replicas and the viewer. The caller then kills this actor."""
        stops = (s.stop(grace_s) for s in self._supervisors)
        await asyncio.gather(self._router.stop(grace_s), *stops)
        await self._kv_agents.stop()  # they remove what replicas had open
        if self._viewer is not None:  # last, for the others' last metrics
            await stop_viewer(self._viewer)
        self._loads.close()

    def exit_soon(self) -> None:
        """Leave Ray once the current call has been answered."""

        async def leave() -> None:
            await asyncio.sleep(0.2)
            await self._server.stop(grace=0.5)
            controller = ray.get_actor(CONTROLLER_NAME, self._spec.namespace)
            ray.kill(controller, no_restart=True)

        self._leaving = asyncio.create_task(leave())

    def _agent_spec(self, node_id: str, host: str) -> AgentSpec:
        spec = self._spec
        return AgentSpec(
            node_id=node_id,
            host=host,
            cluster_id=os.environ.get(MARKER, ""),
            folder=str(pool_folder(spec.config.engine)),
            front_cores=spec.front_cores,
            telemetry=spec.config.telemetry,
            token=spec.token,
        )

    def _taken_cores(self, asking: str) -> list[tuple[str, int]]:
        return [
            (slot.node_id, core)
            for record in (s.record for s in self._supervisors)
            if record.name != asking
            for slot in record.slots
            for core in slot.cores
        ]


def _exit_if_failed(started: asyncio.Future[None]) -> None:
    """Leave a controller that could not start to Ray, which restarts it; first let `ready` say why."""
    if not started.cancelled() and started.exception() is not None:
        log.critical("the controller could not start", exc_info=started.exception())
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, os._exit, 1)


def start_controller(config: ClusterConfig, prepared: PreparedModel, token: str) -> ControllerHandle:
    """Create the controller in the connected Ray (and namespace); it creates everything else. Blocks.

    Raises:
        PlacementError: the topology does not fit this Ray cluster.
        BadInput: the viewer's key file or the router's certificate cannot be read.
        ray.exceptions.RayError: the controller could not start; its cause says why.
    """
    context = ray.get_runtime_context()
    device = resolve_device(config.engine.device)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = [int(resources.get("CPU", 0)) for resources in nodes]
    gpus = int(sum(resources.get("GPU", 0) for resources in nodes))
    topology = fit(config, cores, gpus, device)
    front_cores = topology.front_cores(cores)
    admin_port = config.admin_port or free_port(config.admin_host)
    spec = ControllerSpec(
        config=config,
        model_name=config.engine.served_name or prepared.name,
        bundle=prepared.bundle,
        checkpoint=prepared.path,
        device=device,
        topology=topology,
        front_cores=front_cores,
        namespace=context.namespace,
        ray_address=context.gcs_address,
        # Fixed here, so that restarted controllers and routers come back where their clients look.
        admin_port=admin_port,
        router_port=config.router.port or free_port(config.router.host),
        viewer=viewer_spec(config, f"{config.admin_host}:{admin_port}", front_cores, token),
        token=token,
    )
    options: dict[str, Any] = {
        "name": CONTROLLER_NAME,
        "namespace": spec.namespace,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 256,
        # Where the tokenizer bundle is; a restarted controller must come back to the same address.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False),
    }
    actor = ray.remote(ControllerActor).options(**options).remote(spec)
    handle: ControllerHandle = ray.get(actor.ready.remote(), timeout=_CREATE_TIMEOUT_S)
    return handle
