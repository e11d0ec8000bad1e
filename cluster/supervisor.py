"""Keeps one replica alive: reserves its place, starts an epoch, waits for its end, starts the next."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ClusterConfig
from cluster.overlap import ask_shards, summary, to_message
from cluster.placement import PlacementError, Topology, allocate
from cluster.rayerrors import last_line
from protos import admin_pb2, common_pb2
from workers.kvpool.pool_config import unsuited
from workers.overlap.report import OverlapReport
from workers.placement import ReplicaPlacement, ShardInfo, ShardSlot, choose_collective
from workers.replica import ReplicaActor, ReplicaInfo, ReplicaSpec

log = logging.getLogger(__name__)

_BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_HEALTHY_FOR_S = 60.0
"""An epoch that lived this long starts the back-off from the beginning."""
_DESCRIBE_TIMEOUT_S = 2.0
_ADOPT_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 10.0
_CANCEL_TIMEOUT_S = 5.0
_PLACE_POLL_S = 0.5


@dataclass
class ReplicaRecord:
    """What is known of one replica; owned and written by its supervisor alone."""

    name: str
    epoch: str = ""
    state: admin_pb2.ReplicaState.ValueType = admin_pb2.PENDING
    since: float = field(default_factory=time.monotonic)
    created: float = field(default_factory=time.monotonic)
    info: ReplicaInfo | None = None
    slots: tuple[ShardSlot, ...] = ()
    shards: tuple[ShardInfo, ...] = ()
    overlap: str = ""
    """How this epoch splits its steps, in one line; empty until all its shards have said so."""
    restarts: int = 0
    last_error: str = ""
    pool_wanted: bool = False
    no_pool: str = ""
    """Why its settings or its place rule a KV pool out, if one is wanted."""


@dataclass(frozen=True)
class Surroundings:
    """What a supervisor needs to know of its cluster."""

    config: ClusterConfig
    topology: Topology
    device: str
    namespace: str
    ray_address: str
    token: str = field(repr=False)
    front_cores: tuple[int, ...]
    taken_cores: Callable[[str], list[tuple[str, int]]]
    """(node id, core) pairs held by replicas other than the named one."""
    changed: Callable[[], None]
    """Called after every change of a record."""
    kv_agent: Callable[[tuple[ShardSlot, ...]], Awaitable[str]] | None = None
    """Starts the KV pool's agent where these shards are; its host:port, empty when there is none."""


class ReplicaSupervisor:
    """One asyncio task per replica; the only place that starts or kills its actors."""

    def __init__(self, name: str, around: Surroundings) -> None:
        self.record = ReplicaRecord(name)
        self._around = around
        self._group: PlacementGroup | None = None
        self._actor: Any = None
        self._task: asyncio.Task[None] | None = None
        self._asked_to_restart = False

    async def run(self) -> None:
        """Until stopped: watch what was adopted, else start epochs, one after another."""
        self._task = asyncio.current_task()
        failures = 0
        while True:
            started = time.monotonic()
            try:
                actor = self._actor or await self._start_epoch()
                reason = await actor.wait_closed.remote()
            except PlacementError as error:
                reason = str(error)
            except Exception as error:  # whatever ended this epoch, the answer is the next one
                reason = last_line(error)
            if self._asked_to_restart:
                self._asked_to_restart = False
                await self._discard_epoch()
                continue
            failures = 0 if time.monotonic() - started > _HEALTHY_FOR_S else failures
            self.record.restarts += 1
            self.record.last_error = reason
            self._move(admin_pb2.FAILED)
            log.error("%s epoch %s ended: %s", self.record.name, self.record.epoch, reason)
            await self._discard_epoch()
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1

    async def restart(self, grace_s: float) -> None:
        """Drain this epoch and let `run` start a fresh one."""
        actor = self._actor
        if actor is None or self.record.state != admin_pb2.READY:
            return  # a fresh epoch is on its way already
        self._asked_to_restart = True
        self._move(admin_pb2.DRAINING)
        await self._drain(actor, grace_s)
        await _end(actor)

    async def stop(self, grace_s: float) -> None:
        """Drain, end the actors and give the reserved place back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=_CANCEL_TIMEOUT_S)
        self._move(admin_pb2.DRAINING)
        await self._drain(self._actor, grace_s)
        await self._discard_epoch()
        group = self._group or await asyncio.to_thread(_find_group, self.record.name)
        if group is not None:
            await asyncio.to_thread(remove_placement_group, group)
        self._group = None
        self._move(admin_pb2.STOPPED)

    async def refresh_shards(self) -> None:
        """Ask each shard where it sits; a shard that does not answer counts as not alive."""
        record, epoch = self.record, self.record.epoch
        placement = self._placement(epoch, record.slots)
        asked = [self._describe_shard(placement.shard_name(slot.rank)) for slot in record.slots]
        found = await asyncio.gather(*asked)
        # How steps are split is decided before an epoch is ready, and once.
        overlap = record.overlap or summary(await self._ask_overlap())
        if record.epoch == epoch:  # what an earlier one's shards said is nothing of this one's
            record.shards = tuple(info for info in found if info is not None)
            record.overlap = overlap

    async def overlap(self) -> admin_pb2.ReplicaOverlap:
        """What each shard of a ready replica says of its AllReduces now."""
        record = self.record
        epoch, state = record.epoch, record.state
        answers = await self._ask_overlap() if state == admin_pb2.READY else {}
        return to_message(record.name, epoch, state, answers)

    async def _ask_overlap(self) -> dict[int, OverlapReport | str]:
        placement = self._placement(self.record.epoch, self.record.slots)
        return await ask_shards(
            {
                slot.rank: partial(ray.get_actor, placement.shard_name(slot.rank), placement.namespace)
                for slot in placement.slots
            }
        )

    async def _describe_shard(self, name: str) -> ShardInfo | None:
        try:
            async with asyncio.timeout(_DESCRIBE_TIMEOUT_S):
                actor = await asyncio.to_thread(ray.get_actor, name, self._around.namespace)
                info: ShardInfo = await actor.describe.remote()
                return info
        except (ValueError, RayError, TimeoutError):
            return None

    async def _drain(self, actor: Any, grace_s: float) -> None:
        if actor is None or self.record.info is None:
            return
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(grace_s + 5.0):
                await actor.drain.remote(grace_s)

    async def adopt(self) -> None:
        """Take over a live replica that a controller before us started. Call it before `run`."""
        prefix = f"{self.record.name}-epoch-"
        actors = await asyncio.to_thread(ray.util.list_named_actors)
        for name in (n for n in actors if n.startswith(prefix)):
            try:
                actor = await asyncio.to_thread(ray.get_actor, name, self._around.namespace)
                async with asyncio.timeout(_ADOPT_TIMEOUT_S):
                    ready = await actor.phase.remote() == admin_pb2.READY
                    info: ReplicaInfo | None = await actor.describe.remote()
                    slots: tuple[ShardSlot, ...] = await actor.slots.remote()
            except (ValueError, RayError, TimeoutError):
                ready, info = False, None
            if not ready or info is None:  # loading or draining under nobody's eyes: start afresh
                with contextlib.suppress(ValueError, RayError):
                    ray.kill(ray.get_actor(name, self._around.namespace))
                continue
            self._actor = actor
            self.record.epoch, self.record.info = info.epoch, info
            self._group = await asyncio.to_thread(_find_group, self.record.name)
            self.record.slots = slots
            self._look_for_pool()
            await self.refresh_shards()
            self._move(admin_pb2.READY)
            return

    async def _start_epoch(self) -> Any:
        around, record = self._around, self.record
        self._move(admin_pb2.PENDING)
        group = await self._reserve()
        record.epoch, record.overlap = secrets.token_hex(4), ""
        placed, cores_of = await asyncio.to_thread(_places, group)
        # No await between looking and taking: other replicas are being placed at the same time.
        taken = around.taken_cores(record.name)
        record.slots = allocate(placed, around.topology.cores_per_shard, taken, cores_of)
        self._move(admin_pb2.PLACED)
        placement = self._placement(record.epoch, record.slots)
        if self._look_for_pool() and around.kv_agent is not None:
            placement = replace(placement, kv_agent=await around.kv_agent(record.slots))
        spec = ReplicaSpec(
            engine=around.config.engine,
            telemetry=around.config.telemetry,
            placement=placement,
            host=record.slots[0].node_ip,
            token=around.token,
        )
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group,
            placement_group_bundle_index=record.slots[0].bundle,
            placement_group_capture_child_tasks=True,
        )
        options: dict[str, Any] = {
            "name": f"{record.name}-epoch-{record.epoch}",
            "namespace": around.namespace,
            "lifetime": "detached",
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": 64,
            "scheduling_strategy": strategy,
        }
        actor = self._actor = ray.remote(ReplicaActor).options(**options).remote(spec)
        start = asyncio.ensure_future(_awaited(actor.start.remote()))
        limit_s = around.config.engine.start_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                await _born(actor, group)
                self._move(admin_pb2.LOADING)
                while not start.done():
                    await asyncio.wait({start}, timeout=_PLACE_POLL_S)
                    await self._follow_phase(actor)
            record.info = start.result()
        except TimeoutError:
            if not limit.expired():
                raise  # the replica's own: Ray raises an actor's TimeoutError as one
            raise PlacementError(
                f"not ready after {limit_s:.0f} s: raise --start-timeout-s if the machine is slow"
            ) from None
        finally:
            start.cancel()
        await self.refresh_shards()
        self._move(admin_pb2.READY)
        return actor

    async def _follow_phase(self, actor: Any) -> None:
        """Show warming as such; the loop of a loading replica does not answer."""
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(0.2):
                phase = await actor.phase.remote()
                if phase == admin_pb2.WARMING and self.record.state == admin_pb2.LOADING:
                    self._move(admin_pb2.WARMING)

    async def _reserve(self) -> PlacementGroup:
        group: Any = self._group or await asyncio.to_thread(_find_group, self.record.name)
        if group is not None and await asyncio.to_thread(_lost_a_node, group):
            # Ray 2.60 tries to place such a group again without any pause: until there is room, its head and
            # the head's agent take a core each. A new group waits quietly, and nothing of this replica runs.
            await asyncio.to_thread(remove_placement_group, group)
            group = None
        if group is None:
            around = self._around
            group = await asyncio.to_thread(
                placement_group,
                around.topology.bundles(),
                strategy="SPREAD" if around.config.placement == "spread" else "PACK",
                name=f"{around.namespace}-{self.record.name}",
                lifetime="detached",
            )
        self._group = group
        ready = group.ready()
        try:
            async with asyncio.timeout(self._around.config.engine.start_timeout_s):
                await ready
        except TimeoutError as error:
            need = self._around.topology.bundles()
            raise PlacementError(
                f"no room in the Ray cluster for {need}: add nodes or lower --replicas"
            ) from error
        return group

    def _placement(self, epoch: str, slots: tuple[ShardSlot, ...]) -> ReplicaPlacement:
        device = "cuda" if self._around.device == "cuda" else "cpu"
        return ReplicaPlacement(
            replica=self.record.name,
            epoch=epoch,
            namespace=self._around.namespace,
            ray_address=self._around.ray_address,
            device=device,  # type: ignore[arg-type]
            collective=choose_collective(device, slots, self._around.config.engine.collective)
            if slots
            else "none",
            slots=slots,
            start_timeout_s=self._around.config.engine.start_timeout_s,
            front_cores=self._around.front_cores,
            overlap=self._around.config.engine.overlap,
        )

    def _look_for_pool(self) -> bool:
        """Whether an engine placed like this can have a KV pool, as far as that is known here."""
        engine, record = self._around.config.engine, self.record
        record.pool_wanted = engine.kv_pool_gib > 0
        placement = self._placement(record.epoch, record.slots)
        record.no_pool = unsuited(engine, placement.device, placement) if record.pool_wanted else ""
        return record.pool_wanted and not record.no_pool

    async def _discard_epoch(self) -> None:
        actor, self._actor = self._actor, None
        self.record.info = None
        self.record.shards = ()
        if actor is None:
            return
        await _end(actor)
        # Shards are owned by the EngineCore; make sure before their cores are given out again.
        placement = self._placement(self.record.epoch, self.record.slots)
        for slot in self.record.slots:
            with contextlib.suppress(RayError, ValueError):
                shard = await asyncio.to_thread(
                    ray.get_actor, placement.shard_name(slot.rank), placement.namespace
                )
                await asyncio.to_thread(ray.kill, shard)

    def _move(self, state: admin_pb2.ReplicaState.ValueType) -> None:
        self.record.state = state
        self.record.since = time.monotonic()
        self._around.changed()


def to_status(record: ReplicaRecord, load: common_pb2.ReplicaLoad | None) -> admin_pb2.ReplicaStatus:
    """The record as the admin API shows it."""
    now = time.monotonic()
    info = record.info
    status = admin_pb2.ReplicaStatus(
        replica=record.name,
        epoch=record.epoch,
        state=record.state,
        state_for_s=now - record.since,
        age_s=now - record.created,
        address=info.address if info else "",
        pid=info.pid if info else 0,
        engine_core_pid=info.core_pid if info else 0,
        node=info.node_ip if info else (record.slots[0].node_ip if record.slots else ""),
        load=load,
        restarts=record.restarts,
        last_error=record.last_error,
        overlap=record.overlap if record.state == admin_pb2.READY else "",
        no_pool=_no_pool(record, load),
    )
    known = {shard.rank: shard for shard in record.shards}
    for slot in record.slots:
        shard = known.get(slot.rank)
        status.shards.add(
            rank=slot.rank,
            node=slot.node_ip,
            pid=shard.pid if shard else 0,
            cores=shard.cores if shard else slot.cores,
            gpus=shard.gpus if shard else (),
            collective=shard.collective if shard else "",
            alive=shard is not None,
        )
    return status


def _no_pool(record: ReplicaRecord, load: common_pb2.ReplicaLoad | None) -> str:
    """Why it shares no blocks although it was to; empty when it does, or has not said yet."""
    if record.no_pool or not record.pool_wanted or record.state != admin_pb2.READY or load is None:
        return record.no_pool
    return "" if load.pool_slots else "its engine could not have one, and its log says why"


def _find_group(replica: str) -> PlacementGroup | None:
    namespace = ray.get_runtime_context().namespace
    try:
        group: PlacementGroup = ray.util.get_placement_group(f"{namespace}-{replica}")
    except ValueError:
        return None
    return group


def _lost_a_node(group: PlacementGroup) -> bool:
    """Whether Ray looks for another place for a part of it."""
    return bool(ray.util.placement_group_table(group).get("state") == "RESCHEDULING")


async def _born(actor: Any, group: PlacementGroup) -> None:
    """Return once the actor runs.

    Raises:
        PlacementError: a node of its group is gone. Ray would start it wherever there is room, at some time,
            while its cores and its addresses are those of that node.
        RayError: it died.
    """
    phase = asyncio.ensure_future(_awaited(actor.phase.remote()))
    try:
        while not (await asyncio.wait({phase}, timeout=_PLACE_POLL_S))[0]:
            if await asyncio.to_thread(_lost_a_node, group):
                raise PlacementError("a node of this replica went before it had started")
        phase.result()
    finally:
        phase.cancel()


def _places(group: PlacementGroup) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """(node id, node ip) of each bundle, and the cores of each node.

    Raises:
        PlacementError: a bundle's node has gone.
    """
    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    if any(node_id not in nodes for node_id in table.values()):
        raise PlacementError("a node of this replica has gone; it is placed anew")
    placed = [(table[bundle], nodes[table[bundle]]["NodeManagerAddress"]) for bundle in sorted(table)]
    return placed, {node_id: int(node["Resources"].get("CPU", 0)) for node_id, node in nodes.items()}


async def _end(actor: Any) -> None:
    """Ask a replica to stop, which flushes its spans; kill it in any case."""
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            await actor.stop.remote()
    with contextlib.suppress(RayError, ValueError):
        await asyncio.to_thread(ray.kill, actor)


async def _awaited(ref: Any) -> Any:
    return await ref
