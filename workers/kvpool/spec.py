"""Where vLLM's offloading connector gets the pool's two halves from."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from workers.kvpool.admission import Policy
from workers.kvpool.arena import Arena, Timing
from workers.kvpool.copier import Copier
from workers.kvpool.errors import ArenaBusy, ArenaError
from workers.kvpool.header import Header, file_name
from workers.kvpool.layout import Geometry
from workers.kvpool.manager import ArenaManager
from workers.kvpool.no_pool import NoPool
from workers.kvpool.owners import OwnerKind
from workers.kvpool.pages import BlockPages
from workers.kvpool.pool_config import PoolConfig
from workers.kvpool.stats import COUNTERS, GAUGES, metric

log = logging.getLogger(__name__)

NAMESPACE: Final = "kvorum_namespace"
"""In the connector's extra configuration, on the scheduler's side: see `keys.namespace`."""

TIMING: Final = Timing(lookup_s=0.01, other_s=0.05)
"""Of the scheduler, for which all requests of the engine wait. The ranks' deadlines are the arena's own."""

ATTACH_WITHIN_S: Final = 10.0


class ArenaSpec(OffloadingSpec):
    """One arena's slot holds one block: `blocks_per_chunk` is 1."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.offload_prompt_only = False  # a chat's next turn holds this turn's answer
        self._pool = PoolConfig.from_extra(config.extra_config)

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        counters = {metric(name): OffloadingCounterMetadata(about) for name, about in COUNTERS.items()}
        return counters | {metric(name): OffloadingGaugeMetadata(about) for name, about in GAUGES.items()}

    def get_manager(self) -> OffloadingManager:
        """Makes the arena, if no neighbour has, which takes a second for each GiB or so.

        An engine that cannot have it runs without: a pool is no reason to refuse requests.
        """
        if (groups := len(self.config.groups)) > 1:
            return _no_pool(f"the model has {groups} KV groups, and a pool holds blocks of one only")
        if not self.config.worker_kv_bytes_per_block:
            return _no_pool("vLLM does not tell how many bytes a block of this model has")
        try:
            arena = Arena.create(self._path(), self._header(), TIMING)
            _attach(arena)
        except ArenaError as error:
            return _no_pool(str(error))
        log.info("KV pool: %d slots in %s", arena.header.geometry.slots, arena.path)
        return ArenaManager(arena)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Copier:
        """Raises NotImplementedError on another device than the CPU."""
        parallel = self.config.parallel
        return Copier(BlockPages.of(kv_caches), parallel.rank, parallel.world_size, self._pool.copy_cores)

    def _path(self) -> Path:
        return Path(self._pool.folder) / file_name(self.extra_config[NAMESPACE])

    def _header(self) -> Header:
        """Raises ArenaTooSmallError, with the bytes needed."""
        ranks, rank_bytes = self.config.parallel.world_size, self.config.worker_kv_bytes_per_block
        return Header(
            Geometry.fit(self._pool.budget_bytes, ranks, rank_bytes),
            self.extra_config[NAMESPACE],
            Policy[self._pool.admission.upper()],
        )


def _attach(arena: Arena) -> None:
    """Closes it when that fails. Neighbours that are busy are waited for: now is the only time.

    Raises ArenaError.
    """
    until = time.monotonic() + ATTACH_WITHIN_S
    while True:
        try:
            return arena.attach(OwnerKind.ENGINE)
        except ArenaBusy:
            if time.monotonic() < until:
                continue  # each try waits for its deadline, so this does not spin
            arena.close()
            raise
        except ArenaError:
            arena.close()
            raise


def _no_pool(why: str) -> NoPool:
    log.warning("this engine runs without a KV pool: %s", why)
    return NoPool(why)
