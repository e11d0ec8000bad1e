"""Which topology fits a machine, and which cores each shard gets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.placement import ShardSlot

if TYPE_CHECKING:
    from cluster.config import ClusterConfig

DEFAULT_REPLICAS = 2
"""Enough to survive one; more is a decision about memory that is the operator's."""


class PlacementError(ValueError):
    """The configuration asks for more than there is; the message says what to change."""


@dataclass(frozen=True)
class Topology:
    """What will be placed. `cores_per_shard` is 0 when shards share cores or run on GPUs."""

    replicas: int
    ranks: int
    cores_per_shard: int
    bundle: Mapping[str, float]
    """Ray resources of one shard."""

    def bundles(self) -> list[dict[str, float]]:
        """The placement group of one replica."""
        return [dict(self.bundle) for _ in range(self.ranks)]

    def front_cores(self, cores: Sequence[int]) -> tuple[int, ...]:
        """Cores that `allocate` will give to no shard, where one node has them all; else none.

        A shard that is preempted by a router or a front end in mid-step delays all its streams.
        """
        if not self.cores_per_shard or len(cores) != 1:
            return ()
        return tuple(range(self.replicas * self.ranks * self.cores_per_shard, cores[0]))


def fit(config: ClusterConfig, node_cores: Sequence[int], gpus: int = 0, device: str = "cpu") -> Topology:
    """The topology for a cluster whose nodes have these CPU cores, and that many GPUs in all.

    Raises:
        PlacementError: shards would outnumber cores (and spin on them) or GPUs.
    """
    engine, cores = config.engine, sum(node_cores)
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if device == "cuda":
        replicas = config.replicas or max(1, min(DEFAULT_REPLICAS, gpus // ranks))
        if replicas * ranks > gpus:
            raise PlacementError(_too_many(replicas, ranks, gpus, "GPU"))
        return Topology(replicas, ranks, 0, {"GPU": 1.0, "CPU": 1.0})

    replicas = config.replicas or max(1, min(DEFAULT_REPLICAS, cores // ranks))
    shards = replicas * ranks
    most = _most_cores_each(shards, node_cores)
    if most == 0:
        if engine.collective == "gloo" and engine.cores_per_shard is None:
            return Topology(replicas, ranks, 0, {"CPU": round(cores / shards, 4) * 0.99})
        advice = "; --collective gloo allows shards to share cores, slowly"
        raise PlacementError(_too_many(replicas, ranks, cores, "CPU core") + advice)
    if (engine.cores_per_shard or 1) > most:
        raise PlacementError(
            f"{shards} shard(s) of {engine.cores_per_shard} cores do not fit the {cores} core(s) there are: "
            f"use --cores-per-shard {most} or leave it out"
        )
    # A core of each node is left to the router and the engines' front ends where there is one to spare.
    spared = _most_cores_each(shards, [count - 1 for count in node_cores])
    per_shard = engine.cores_per_shard or spared or most
    return Topology(replicas, ranks, per_shard, {"CPU": float(per_shard)})


def _most_cores_each(shards: int, node_cores: Sequence[int]) -> int:
    """The largest share of cores that every shard can have on some one node; 0 when there are too few."""
    most = max(node_cores, default=0)
    return next((k for k in range(most, 0, -1) if sum(n // k for n in node_cores) >= shards), 0)


def _too_many(replicas: int, ranks: int, have: int, what: str) -> str:
    fewer = have // ranks
    advice = (
        f"use --replicas {fewer} or a smaller --tensor-parallel-size"
        if fewer
        else f"use --tensor-parallel-size {max(1, have)} or less"
    )
    return (
        f"{replicas} replica(s) of {ranks} shard(s) need {replicas * ranks} {what}s, "
        f"there {'is' if have == 1 else 'are'} {have}: {advice}"
    )


def allocate(
    nodes: Sequence[tuple[str, str]],
    cores_per_shard: int,
    taken: Iterable[tuple[str, int]],
    cores_of: Mapping[str, int],
) -> tuple[ShardSlot, ...]:
    """Give each rank its own cores on its node.

    Args:
        nodes: (node id, node ip) of bundle 0, 1, ... as Ray placed them.
        cores_per_shard: 0 for unpinned shards.
        taken: (node id, core index) pairs other replicas hold.
        cores_of: cores of each node.

    Ranks are numbered so that neighbours share a node: collectives between them are the cheap ones.

    Raises:
        PlacementError: a node has fewer free cores than Ray thought.
    """
    held: dict[str, set[int]] = {}
    for node_id, core in taken:
        held.setdefault(node_id, set()).add(core)
    first = nodes[0][0]
    order = sorted(range(len(nodes)), key=lambda b: (nodes[b][0] != first, nodes[b][0], b))
    slots = []
    for rank, bundle in enumerate(order):
        node_id, node_ip = nodes[bundle]
        busy = held.setdefault(node_id, set())
        free = [core for core in range(cores_of.get(node_id, 0)) if core not in busy]
        if len(free) < cores_per_shard:
            raise PlacementError(
                f"rank {rank} needs {cores_per_shard} core(s) on node {node_ip}, which has {len(free)} left"
            )
        cores = tuple(free[:cores_per_shard])
        busy.update(cores)
        slots.append(ShardSlot(rank, bundle, node_id, node_ip, cores))
    return tuple(slots)
