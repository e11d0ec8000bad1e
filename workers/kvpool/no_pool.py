"""In the place of a pool that an engine cannot have: finds and stores nothing."""

from __future__ import annotations

from collections.abc import Collection

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)

from workers.kvpool.slots import ArenaSlots


class NoPool(OffloadingManager):
    def __init__(self, why: str) -> None:
        self.why = why

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ArenaSlots:
        return ArenaSlots.of("", [None] * len(keys))

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        return PrepareStoreOutput([], ArenaSlots.of("", []), evicted_keys=[])
