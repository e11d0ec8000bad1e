"""One tensor-parallel rank: a vLLM worker inside a Ray actor."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from torch.distributed import TCPStore
from vllm.utils.network_utils import get_distributed_init_method
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc

from workers import plugin, step_tracing
from workers.gloo import favour_communication, keep_off_shared_memory
from workers.overlap.report import OverlapReport
from workers.pinning import pin_compute, release_others
from workers.placement import CONFIG_KEY, Collective, ReplicaPlacement, ShardInfo
from workers.queues import SHARD_SPIN_S, sleep_instead_of_spinning
from workers.seeded import keep_seeds

if TYPE_CHECKING:
    from workers.overlap.meter import StepMeter
    from workers.overlap.runtime import Runtime

log = logging.getLogger(__name__)


class Shard(RayWorkerProc):
    """One rank, in its actor (`workers.shard_actor`). Its main call, `run`, lasts as long as the shard.

    `describe` and `overlap` answer meanwhile, from other threads. On CPU the threads that compute are
    pinned to the shard's cores, all others are kept free to run elsewhere.
    """

    def __init__(self, *, cores: tuple[int, ...], collective: Collective, spin: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._allowed = os.sched_getaffinity(0)
        self._cores = tuple(sorted(self._allowed)[index % len(self._allowed)] for index in cores)
        self._indices = cores
        self._collective = collective
        self._spin = spin
        self._overlap: Runtime | None = None

    def place(self) -> tuple[str, str, list[int]]:
        """(node id, node ip, physical GPU ids) as Ray placed this actor."""
        context = ray.get_runtime_context()
        gpus = [int(g) for g in context.get_accelerator_ids().get("GPU", [])]
        return context.get_node_id(), ray.util.get_node_ip_address(), gpus

    def create_dist_init_method(self) -> str:
        """Where the ranks meet: a store that listens on this node's address only, not on every interface."""
        host = ray.util.get_node_ip_address()
        listener = socket.create_server((host, 0), backlog=128)
        port = listener.getsockname()[1]
        self._dist_init_store = TCPStore(
            host_name=host,
            port=port,
            world_size=self._parallel_config.world_size,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
        return str(get_distributed_init_method(host, port))

    def initialize_worker(self, *args: Any, **kwargs: Any) -> None:
        """Load this rank's weights; returns when the shard can run steps."""
        if self._collective == "gloo":
            keep_off_shared_memory()
        self._compute = pin_compute(self._indices)
        os.environ[plugin.SHARD_VARIABLE] = "1"
        super().initialize_worker(*args, **kwargs)
        keep_seeds(self.worker.worker.model_runner)
        self._attach_overlap()
        release_others(self._compute, self._allowed)
        if self._collective == "gloo" and not favour_communication():
            log.info("gloo's threads wait for their turn: this system gives no short time slices")

    def run(self) -> None:
        """Run steps until the shard ends. Must be in the thread that was pinned, which loaded the model."""
        if threading.get_native_id() not in self._compute:
            raise RuntimeError("Ray moved this shard to another thread than the one that loaded its model")
        try:
            super().run()
        finally:
            self._steps.shutdown()

    def _init_message_queues(self, input_shm_handle: Any, vllm_config: Any) -> None:
        super()._init_message_queues(input_shm_handle, vllm_config)
        if not self._spin:
            sleep_instead_of_spinning(self.rpc_broadcast_mq, SHARD_SPIN_S)

    def _attach_overlap(self) -> None:
        from workers.overlap.attach import attach  # noqa: PLC0415 - loads vLLM's models

        config = self._init_kwargs["vllm_config"]
        placement = ReplicaPlacement.from_config(config.additional_config[CONFIG_KEY])
        model = self.worker.worker.model_runner.get_model()
        self._steps = step_tracing.build(
            config.additional_config.get(step_tracing.TELEMETRY_KEY), placement, self._init_kwargs["rank"]
        )
        self._overlap = attach(
            model, config, mode=placement.overlap, collective=self._collective, observer=self._steps
        )
        self.worker.execute_model = announced(self.worker.execute_model, self._overlap.meter)

    def overlap(self) -> OverlapReport | None:
        """Which path steps take, and where their time went; answered amid a step. None while loading."""
        return self._overlap.report() if self._overlap else None

    def describe(self) -> ShardInfo:
        """Where this shard sits; answered while a step runs."""
        node_id, node_ip, gpus = self.place()
        return ShardInfo(
            rank=self._init_kwargs["rank"],
            pid=os.getpid(),
            node_id=node_id,
            node_ip=node_ip,
            cores=self._cores,
            gpus=tuple(gpus),
            collective=self._collective,
        )


def announced(execute: Callable[..., Any], meter: StepMeter) -> Callable[..., Any]:
    """Tell the meter which requests a step computes before it runs."""

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        meter.expect(tuple(scheduler_output.num_scheduled_tokens.items()))
        return execute(scheduler_output, *args, **kwargs)

    return execute_model
