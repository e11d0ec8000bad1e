"""What one engine's pool did, carried by vLLM's connector statistics from the EngineCore to the replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

_PREFIX: Final = "kvorum:kv_pool_"
_VLLM: Final = {
    "loaded_bytes": "vllm:kv_offload_load_bytes",
    "stored_bytes": "vllm:kv_offload_store_bytes",
    "load_seconds": "vllm:kv_offload_load_time",
}
"""Those that vLLM's connector counts itself, over all ranks."""


@dataclass(frozen=True)
class PoolStats:
    """Blocks, unless named otherwise. Since the engine started; the last five: the whole arena's, now."""

    hits: int = 0
    """Found when this engine asked. A request counts once, however often it is considered."""
    misses: int = 0
    loaded: int = 0
    """Given to the ranks to load, those that were lost among them."""
    lost: int = 0
    """Evicted before some rank had loaded them, or damaged: they were computed instead."""
    stored: int = 0
    dropped: int = 0
    """Given a slot, but not stored: a rank had too much to copy, or lost the slot."""
    refused: int = 0
    """Not given a slot: there already, not admitted, or no room."""
    busy: int = 0
    """Times that the arena did not answer in time, or at all; it was then left alone for a while."""
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_seconds: float = 0.0
    """Summed over ranks, which load side by side."""

    slots: int = 0
    """0: the engine has no pool, and its log says why."""
    ready: int = 0
    evicted: int = 0
    corrupt: int = 0
    reclaimed: int = 0
    """Slots that dead writers left."""

    def plus(self, step: Mapping[str, Any] | None) -> PoolStats:
        """With what one step told (`SchedulerStats.kv_connector_stats`)."""
        told: Mapping[str, Mapping[Any, int | float]] = (step or {}).get("data", {})
        new: dict[str, Any] = {}
        for field in fields(self):
            name = _VLLM.get(field.name, _PREFIX + field.name)
            if name in told:
                before = getattr(self, field.name)
                value = type(before)(sum(told[name].values()))
                new[field.name] = value if field.name in GAUGES else before + value
        return replace(self, **new)


GAUGES: Final = {
    "slots": "blocks that fit in the arena",
    "ready": "blocks in the arena that can be loaded",
    "evicted": "blocks evicted from the arena since it was made",
    "corrupt": "blocks of the arena freed since their bytes were not what was written",
    "reclaimed": "slots of the arena that dead writers left",
}
COUNTERS: Final = {
    "hits": "blocks found in the pool",
    "misses": "blocks not found in the pool",
    "loaded": "blocks to be loaded from the pool",
    "lost": "blocks found in the pool that could not be loaded and were computed",
    "stored": "blocks stored in the pool",
    "dropped": "blocks given a slot in the pool but not stored",
    "refused": "blocks not given a slot in the pool",
    "busy": "times that the arena did not answer in time",
}


def metric(field: str) -> str:
    """The name under which a field of PoolStats travels."""
    return _PREFIX + field
