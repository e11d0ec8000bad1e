"""What the engine can ask of all its shards at once, between two steps (vLLM's `collective_rpc`)."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from workers.overlap import runtime as runtimes
from workers.overlap.plan_store import PlanStore

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)


class OverlapWorker:
    """Added to vLLM's worker class by `worker_extension_cls`; no state of its own."""

    vllm_config: VllmConfig
    model_runner: Any

    @torch.inference_mode()
    def plan_overlap(self) -> str:
        """Load or measure this replica's plan and begin to use it; returns a line about it.

        Raises:
            RuntimeError: a rank or its link is gone; the replica cannot start.
        """
        runtime = runtimes.current()
        if runtime is None or not runtime.splittable or runtime.mode != runtimes.AUTO:
            return runtime.report().reason if runtime else "no overlap in this process"
        from vllm.forward_context import set_forward_context  # noqa: PLC0415

        from workers.overlap.attach import measurable  # noqa: PLC0415 - needs the worker's groups
        from workers.overlap.planner import Planner  # noqa: PLC0415

        began = time.monotonic()
        measured, agreement = measurable(self.model_runner.get_model(), runtime, self.vllm_config)
        store = PlanStore(self.vllm_config, runtime, agreement)
        planner = Planner(measured, agreement)
        plan, why = store.recall(planner)
        if plan is None:
            with set_forward_context(None, self.vllm_config):  # where experts look for their own layer
                plan, samples = planner.plan(store.max_tokens, log.info)
            if planner.steady:
                store.keep(plan, samples)
            else:
                why = f"on a busy machine, so not kept{'; ' if why else ''}{why}"
            why = f"measured in {time.monotonic() - began:.1f} s" + (f"; {why}" if why else "")
        runtime.set_plan(plan, why)
        line = runtime.report().reason
        log.info("overlap: %s; splits from %s tokens on", line, plan.threshold)
        return line

    def set_overlap(self, mode: str) -> None:
        """Change the mode of this rank; only ever called on all ranks at once.

        Raises:
            ValueError: not auto, off or a number of chunks.
        """
        runtime = runtimes.current()
        if runtime is None:
            return
        runtime.set_mode(mode)
        if mode == runtimes.AUTO and not runtime.planned:
            self.plan_overlap()

    def bypass_overlap(self, on: bool) -> None:
        """For benchmarks alone: let steps take vLLM's path, untimed, as if Kvorum were not there."""
        from vllm.distributed.parallel_state import get_tp_group  # noqa: PLC0415

        runtime = runtimes.current()
        if runtime is None or runtime.bypassed == on:
            return
        runtime.bypassed = on
        communicator = get_tp_group().device_communicator
        if communicator is not None and self.vllm_config.model_config.enforce_eager:
            (runtime.meter.unwatch if on else runtime.meter.watch)(communicator)
