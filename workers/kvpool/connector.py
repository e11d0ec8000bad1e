"""vLLM's offloading connector, with the pool behind it; vLLM finds it by name, in EngineCore and shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from workers.kvpool.copier import Copier
from workers.kvpool.keys import Build, namespace
from workers.kvpool.manager import ArenaManager, router_keys_of
from workers.kvpool.pool_config import PoolConfig
from workers.kvpool.spec import NAMESPACE
from workers.kvpool.stats import metric

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KvPoolConnector(OffloadingConnector):
    """Adds what the offloading connector lacks: loads that fail are told, block by block, and recomputed
    (`kv_load_failure_policy="recompute"`)."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._pool = PoolConfig.from_extra(extra)
        self._told: set[int] = set()  # blocks whose loads failed, of loads that are not done
        if role == KVConnectorRole.SCHEDULER:
            # The specification, which super() makes, sees no other part of vLLM's configuration.
            extra[NAMESPACE] = _namespace(vllm_config, kv_cache_config, self._pool)
        super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> OffloadPromMetrics:
        """vLLM forgets its own metrics before it registers them again, for another engine in this process."""
        for collector in list(REGISTRY._collector_to_names):
            if str(getattr(collector, "_name", "")).startswith(metric("")):
                REGISTRY.unregister(collector)
        return super().build_prom_metrics(*args, **kwargs)

    def on_new_request(self, request: Request) -> None:
        manager, config = self.scheduler.manager, self.scheduler.config
        if isinstance(manager, ArenaManager):
            names = router_keys_of(request, self._pool.revision, config.kv_group_configs[0].tokens_per_block)
            manager.announce(request.request_id, names)
        super().on_new_request(request)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        manager = self.scheduler.manager
        if (failed := connector_output.invalid_block_ids - self._told) and isinstance(manager, ArenaManager):
            manager.failed(len(failed))
        # The ranks of a load tell of it in the same step or in others; it is done when the last has.
        self._told = set() if connector_output.finished_recving else self._told | failed
        super().update_connector_output(connector_output)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """This rank's, since the last call; vLLM calls it after `get_finished`, in the same step."""
        copier = self.connector_worker.worker if self.connector_worker is not None else None
        return copier.take_failed() if isinstance(copier, Copier) else set()


def _namespace(config: VllmConfig, kv_cache: KVCacheConfig, pool: PoolConfig) -> dict[str, str | int]:
    algorithm = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    build = Build(
        vllm=str(vllm.__version__),
        torch=str(torch.__version__),
        kernels=_kernels(config),
        hash_seed=resolve_none_hash_seed(algorithm),
    )
    return namespace(config, build_offloading_config(config, kv_cache), pool.revision, pool.adapters, build)


def _kernels(config: VllmConfig) -> str:
    """Such as "x86_64 amx": the CPU's attention packs keys for the instructions it uses."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415

    model, cache = config.model_config, config.cache_config
    isa = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return f"{current_platform.get_cpu_architecture().name.lower()} {isa}"
