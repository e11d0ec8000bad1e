"""vLLM executor whose workers are Ray actors, one per rank, gang-placed in one placement group.

vLLM's own Ray executor serves GPUs only and places by itself. This one takes the placement that
the controller reserved, works on CPU too, pins CPU ranks, and joins the cluster's Ray rather than
ever starting one. It runs in the EngineCore process.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from vllm import envs
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerHandle

from telemetry.logs import configure_logging
from workers.placement import CONFIG_KEY, ReplicaPlacement, ShardSlot
from workers.queues import sleep_instead_of_spinning
from workers.shard_actor import ShardActor
from workers.step_tracing import TELEMETRY_KEY

# What a shard inherits from the EngineCore, where its host does not say otherwise.
_INHERITED = ("VLLM_", "NCCL_", "GLOO_", "HF_", "TORCH", "KMP_")
_NOT_INHERITED = ("VLLM_HOST_IP", "VLLM_DIST_IDENT")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
# Read when the process starts, so Ray must set it; Ray logs it, so nothing secret may be in it.
_AT_START = ("LD_PRELOAD", "VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING", "KVORUM_CLUSTER_ID")
_PARENT_CHECK_S = 0.5
_HUGE_PAGES = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
"""Weights in pages of 2 MiB, where the system gives them to those who ask (`madvise`, as usual): each
step reads all weights, and misses the translation cache less. Decode steps take 4 % less time."""


class RayShardExecutor(RayExecutorV2):
    """One Ray actor per rank; a rank's death fails the engine at once."""

    uses_ray: bool = True
    supports_pp: bool = True

    def _init_executor(self) -> None:
        self._finalizer = weakref.finalize(self, self.shutdown)
        self.is_failed = False
        self.failure_callback = None
        self.shutting_down = False
        self.shutdown_lock = threading.Lock()
        self.placement = ReplicaPlacement.from_config(self.vllm_config.additional_config[CONFIG_KEY])
        if (telemetry := self.vllm_config.additional_config.get(TELEMETRY_KEY)) is not None:
            configure_logging("kvorum.engine", format=telemetry["log_format"])
        self._get_parallel_sizes()
        if self.world_size != len(self.placement.slots):
            raise ValueError(f"{self.world_size} ranks but {len(self.placement.slots)} slots were reserved")

        die_with_parent()
        self._join_ray()
        node_here = ray.get_runtime_context().get_node_id()
        local = sum(1 for slot in self.placement.slots if slot.node_id == node_here)
        self.rpc_broadcast_mq = MessageQueue(
            self.world_size,
            local,
            max_chunk_bytes=envs.VLLM_MQ_MAX_CHUNK_BYTES_MB * 1024 * 1024,
            connect_ip=ray.util.get_node_ip_address(),
        )
        self.ray_worker_handles = [self._create_shard(slot, node_here) for slot in self.placement.slots]
        self._load_shards()
        self._open_queues()
        self.futures_queue: deque[Any] = deque()
        self._post_init_executor()
        self.start_worker_monitor()
        self.output_rank = self._get_output_rank()

    def _join_ray(self) -> None:
        if not ray.is_initialized():
            ray.init(
                address=self.placement.ray_address,
                namespace=self.placement.namespace,
                log_to_driver=False,
                configure_logging=False,
            )

    def _get(self, refs: Any) -> Any:
        return ray.get(refs, timeout=self.placement.start_timeout_s)

    def _spin(self) -> bool:
        """On CPU a spinning wait would take a core from the computing shards."""
        return self.placement.device != "cpu"

    def _create_shard(self, slot: ShardSlot, node_here: str) -> RayWorkerHandle:
        on_cpu = self.placement.device == "cpu"
        env = {name: os.environ[name] for name in _AT_START if name in os.environ}
        if on_cpu:
            env["OMP_NUM_THREADS"] = str(max(1, len(slot.cores)))
            name, value = _HUGE_PAGES
            env[name] = os.environ.get(name, value)
            if self.vllm_config.model_config.enforce_eager:
                # Some of vLLM's sampling helpers are compiled even so, on first use: seconds in which
                # every stream of the shard stands still, to speed up what takes microseconds here.
                env["TORCH_COMPILE_DISABLE"] = "1"
        else:
            env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.parallel_config.placement_group,
            placement_group_bundle_index=slot.bundle,
        )
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0 if on_cpu else 1}
        actor = (
            ray.remote(concurrency_groups={"health": 1})(ShardActor)
            .options(
                name=self.placement.shard_name(slot.rank),
                scheduling_strategy=strategy,
                runtime_env={"env_vars": env},
                max_restarts=0,
                **options,
            )
            .remote(
                cores=slot.cores,
                collective=self.placement.collective,
                spin=self._spin(),
                vllm_config=self.vllm_config,
                rank=slot.rank,
                input_shm_handle=self.rpc_broadcast_mq.export_handle(),
                is_driver_worker=self._is_driver_worker(slot.rank),
                is_driver_node=slot.node_id == node_here,
            )
        )
        return RayWorkerHandle(
            actor=actor, rank=slot.rank, local_rank=-1, node_id=slot.node_id, bundle_id_idx=slot.bundle
        )

    def _load_shards(self) -> None:
        places = self._get([h.actor.place.remote() for h in self.ray_worker_handles])
        ranks_on: dict[str, list[int]] = defaultdict(list)
        gpus_on: dict[str, list[int]] = defaultdict(list)
        for handle, (node_id, _, gpus) in zip(self.ray_worker_handles, places, strict=True):
            ranks_on[node_id].append(handle.rank)
            gpus_on[node_id] += gpus
        inherited = _inherited()
        init_method = self._get(self.ray_worker_handles[0].actor.create_dist_init_method.remote())
        loads = []
        for handle, (node_id, node_ip, _) in zip(self.ray_worker_handles, places, strict=True):
            handle.local_rank = ranks_on[node_id].index(handle.rank)
            gpus = sorted(gpus_on[node_id]) if self.placement.device == "cuda" else None
            env = {"VLLM_HOST_IP": node_ip}
            loads.append(
                handle.actor.initialize_worker.remote(
                    handle.local_rank, env, init_method, inherited, assigned_physical_gpu_ids=gpus
                )
            )
        self._get(loads)

    def _open_queues(self) -> None:
        ready = self._get([h.actor.wait_for_init.remote() for h in self.ray_worker_handles])
        self.response_mqs = [MessageQueue.create_from_handle(r["handle"], 0) for r in ready]
        for queue in self.response_mqs:
            if not self._spin():
                sleep_instead_of_spinning(queue)
        # Shards subscribe inside run(); waiting before it starts would deadlock.
        for handle in self.ray_worker_handles:
            handle.run()
        self.rpc_broadcast_mq.wait_until_ready()
        for queue in self.response_mqs:
            queue.wait_until_ready()


def _inherited() -> dict[str, str]:
    """This host's settings for shards on hosts that have none of their own; no secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_INHERITED) and name not in _NOT_INHERITED and not any(s in name for s in _SECRET)
    }


def die_with_parent() -> None:
    """End this process when its parent has died, however it died.

    An EngineCore that outlived its replica would keep its shards, and their memory, for ever.
    Ray ends the shards once this process, their owner, is gone.
    """
    spawner = multiprocessing.parent_process()
    parent = spawner.pid if spawner is not None and spawner.pid else os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="kvorum-parent-watch").start()
