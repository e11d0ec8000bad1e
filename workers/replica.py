"""The replica actor: one engine, one epoch, one gRPC server.

The controller imports this module for the actor's class, so vLLM is imported only inside `start`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import admin_pb2, blockkeys, common_pb2, replica_pb2, replica_pb2_grpc
from protos.channels import bind, create_server
from protos.tickets import TicketCheck
from telemetry import spans
from telemetry.config import TelemetryConfig
from telemetry.host import watch_host
from telemetry.logs import configure_logging
from telemetry.setup import configure
from workers.checkpoint import prepare
from workers.config import EngineConfig
from workers.pinning import cpus_of, pin_process, widen
from workers.placement import ReplicaPlacement, ShardSlot

if TYPE_CHECKING:
    from workers.engine import Engine, EngineInfo
    from workers.kvpool.prefetch import Prefetcher
    from workers.servicer import ReplicaServicer

log = logging.getLogger(__name__)

SERVICE = replica_pb2.DESCRIPTOR.services_by_name["Replica"].full_name


@dataclass(frozen=True)
class ReplicaSpec:
    """Everything one epoch of a replica is started with."""

    engine: EngineConfig
    telemetry: TelemetryConfig
    placement: ReplicaPlacement
    host: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class ReplicaInfo:
    """What the controller learns once a replica is ready."""

    replica: str
    epoch: str
    address: str
    pid: int
    core_pid: int
    node_ip: str
    model: bytes
    """A serialized kvorum.v1.ModelInfo."""


class ReplicaActor:
    """Hosts one engine in a Ray actor. `start`, then `wait_closed` until the engine or we are done."""

    def __init__(self, spec: ReplicaSpec) -> None:
        configure_logging("kvorum.replica", format=spec.telemetry.log_format)
        if spec.telemetry.log_format == "json":  # vLLM's records, and those of the processes it starts
            os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
        self._spec = spec
        placement = spec.placement
        facts: dict[str, str | int] = {spans.REPLICA: placement.replica, spans.EPOCH: placement.epoch}
        self._telemetry = configure(
            "kvorum.replica", f"{placement.replica}/{placement.epoch}", spec.telemetry, facts
        )
        self._servicer: ReplicaServicer | None = None
        self._prefetcher: Prefetcher | None = None
        self._engine: Engine | None = None
        self._info: ReplicaInfo | None = None
        self._closed: asyncio.Future[str] | None = None
        self._phase = admin_pb2.LOADING

    async def start(self) -> ReplicaInfo:
        """Prepare the checkpoint on this host, load the engine, warm it up and listen."""
        from workers.engine import Engine  # noqa: PLC0415
        from workers.feed import HEARTBEAT_S  # noqa: PLC0415
        from workers.kvpool.prefetch import Prefetcher  # noqa: PLC0415
        from workers.metrics import MeasuringObserver, ReplicaMetrics  # noqa: PLC0415
        from workers.servicer import ReplicaServicer  # noqa: PLC0415
        from workers.tracing import ReplicaTracing  # noqa: PLC0415

        spec = self._spec
        near_engine = self._cpus_near_engine()
        pin_process(spec.placement.front_cores)  # before the EngineCore is spawned, which inherits it
        prepared = await asyncio.to_thread(prepare, spec.engine.model, spec.engine.tensor_parallel_size)
        self._engine = Engine(spec.engine, prepared, spec.placement, spec.telemetry)
        info, load = self._engine.start(), self._engine.load
        if spec.placement.front_cores:
            # It plans a step while the shards' cores idle. On the front cores alone it would wait there for
            # those who stream the last step's tokens, and the shards for it.
            widen(info.core_pid, near_engine)
        self._phase = admin_pb2.WARMING
        await self._engine.warm_up()

        bundle = await asyncio.to_thread(_read_bundle, prepared.bundle)
        model = common_pb2.ModelInfo(
            name=spec.engine.served_name or prepared.name,
            revision=prepared.revision,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            tokenizer_digest=bundle.digest,
            lora_adapters=sorted(spec.engine.lora_modules),
            max_logprobs=info.max_logprobs,
        )
        snapshot = replica_pb2.ReplicaSnapshot(
            replica=spec.placement.replica, model=model, heartbeat_s=HEARTBEAT_S, key_scheme=blockkeys.SCHEME
        )
        watch_host(self._telemetry.meters)
        observer = MeasuringObserver(
            ReplicaTracing(self._telemetry, spec.placement, model.name),
            ReplicaMetrics(self._telemetry.meters, model.name, lambda: load.last_step, lambda: load.pool),
        )
        if spec.engine.kv_pool_gib:
            self._prefetcher = Prefetcher(spec.token, spec.engine.kv_pool_pull_timeout_s)
        self._servicer = ReplicaServicer(
            self._engine, snapshot, spec.placement.epoch, observer, self._prefetcher
        )
        await self._listen(model, info)
        self._closed = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch_engine())
        self._phase = admin_pb2.READY
        assert self._info is not None
        return self._info

    async def describe(self) -> ReplicaInfo | None:
        """This replica's info once ready; a restarted controller adopts replicas by it."""
        return self._info

    async def slots(self) -> tuple[ShardSlot, ...]:
        """Where this replica's ranks were placed."""
        return self._spec.placement.slots

    async def phase(self) -> int:
        """An admin_pb2.ReplicaState; not answered while the engine loads, which holds the loop."""
        return int(self._phase)

    async def wait_closed(self) -> str:
        """Return the reason once this replica can serve no more. The controller's sentinel."""
        assert self._closed is not None
        return await asyncio.shield(self._closed)

    async def drain(self, grace_s: float) -> int:
        """Refuse new requests, let the running ones finish; returns how many were cut off."""
        if self._servicer is None:
            return 0
        self._phase = admin_pb2.DRAINING
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        return await self._servicer.drain(grace_s)

    async def set_overlap(self, mode: str) -> None:
        """Switch the overlap of all shards between two steps: auto, off, or a number of chunks."""
        assert self._engine is not None
        await self._engine.set_overlap(mode)

    async def bypass_overlap(self, on: bool) -> None:
        """For benchmarks alone: let steps take vLLM's path, untimed, as if Kvorum were not there."""
        assert self._engine is not None
        await self._engine.bypass_overlap(on)

    async def plan_overlap(self) -> str:
        """Look at the link again, and measure anew if it has changed; steps wait meanwhile."""
        assert self._engine is not None
        return await self._engine.plan_overlap()

    async def stop(self) -> None:
        """End the server, the engine and its shards, and flush telemetry."""
        if self._engine is None:
            return
        if self._info is not None:
            await self._server.stop(grace=0.5)
        if self._prefetcher is not None:
            await self._prefetcher.close()
        await self._engine.stop_following()
        await asyncio.to_thread(self._engine.shutdown)
        await asyncio.to_thread(self._telemetry.shutdown)

    def _cpus_near_engine(self) -> set[int]:
        """The front cores, and those of this replica's shards on this host."""
        placement, here = self._spec.placement, ray.get_runtime_context().get_node_id()
        own = [core for slot in placement.slots if slot.node_id == here for core in slot.cores]
        return cpus_of((*placement.front_cores, *own))

    async def _listen(self, model: common_pb2.ModelInfo, info: EngineInfo) -> None:
        assert self._servicer is not None
        spec = self._spec
        check = TicketCheck(spec.token, spec.placement.replica, spec.placement.epoch)
        self._server = create_server(tokens=[spec.token], ticketed={f"/{SERVICE}/Generate": check})
        replica_pb2_grpc.add_ReplicaServicer_to_server(self._servicer, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        port = bind(self._server, spec.host, 0)
        await self._server.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._info = ReplicaInfo(
            replica=spec.placement.replica,
            epoch=spec.placement.epoch,
            address=f"{spec.host}:{port}",
            pid=os.getpid(),
            core_pid=info.core_pid,
            node_ip=ray.util.get_node_ip_address(),
            model=model.SerializeToString(),
        )

    async def _watch_engine(self) -> None:
        assert self._engine is not None
        assert self._closed is not None
        try:
            reason = await self._engine.wait_dead()
        except Exception as error:
            reason = f"lost sight of the engine: {error}"
        log.error("%s: %s", self._spec.placement.replica, reason)
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        self._closed.set_result(reason)


def _read_bundle(path: Path) -> admin_pb2.TokenizerBundle:
    return admin_pb2.TokenizerBundle.FromString(path.read_bytes())
