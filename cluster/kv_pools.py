"""The end of a cluster's KV pools: the folders of its arenas on all hosts, and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.rayerrors import last_line
from cluster.state import ClusterState
from workers.kvpool.folder import folder_of_cluster, remove_folder

if TYPE_CHECKING:
    from workers.config import EngineConfig

_SWEEP_TIMEOUT_S = 20.0


def folder_of(engine: EngineConfig, cluster_id: str) -> Path | None:
    """Where such a cluster keeps its pool on each host; None when it has none."""
    return folder_of_cluster(engine, cluster_id) if engine.kv_pool_gib else None


def remove_here(state: ClusterState, say: Callable[[str], None]) -> None:
    """On this machine, once the cluster's processes have ended; twice is fine."""
    if state.kv_pool_folder is None:
        return
    try:
        remove_folder(state.kv_pool_folder, state.id)
    except OSError as error:
        say(f"the KV pool in {state.kv_pool_folder} is left: {error.strerror}; remove it by hand")


def remove_everywhere(state: ClusterState, say: Callable[[str], None]) -> None:
    """On each node of the connected Ray, when its agents could not be asked to: they may be dead."""
    if state.kv_pool_folder is None:
        return
    import ray  # noqa: PLC0415 - seconds; rarely needed
    from ray.exceptions import RayError  # noqa: PLC0415
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    removing: dict[Any, str] = {}
    remove = ray.remote(remove_folder)
    for node in (node for node in ray.nodes() if node["Alive"]):
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = remove.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        removing[task.remote(state.kv_pool_folder, state.id)] = node["NodeManagerAddress"]
    done, late = ray.wait(list(removing), num_returns=len(removing), timeout=_SWEEP_TIMEOUT_S)
    left = [f"{removing[ref]} (no answer)" for ref in late]
    for ref in done:
        try:
            ray.get(ref)
        except (RayError, OSError) as error:
            left.append(f"{removing[ref]} ({last_line(error)})")
    if left:
        say(f"the KV pool may be left in {state.kv_pool_folder} on {', '.join(sorted(left))}")
