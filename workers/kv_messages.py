"""vLLM's KV cache events, as far as Kvorum reads them. Fields it does not read are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

Hash = bytes | int
"""vLLM's own name of a block: chained over everything before it, and its extra keys."""


class BlockStored(msgspec.Struct, tag=True, gc=False, kw_only=True):
    """Blocks became findable in one KV group. Consecutive, except where a group keeps only some."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """Per block: the LoRA's name if any, (image id, offset) pairs, the cache salt (a prompt's first
    block only), digests of embeddings."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None

    @property
    def whole(self) -> bool:
        """Every block comes with its tokens; not so for placeholders and for groups that skip blocks."""
        tokens = len(self.token_ids)
        return self.block_size > 0 and tokens == len(self.block_hashes) * self.block_size


class BlockRemoved(msgspec.Struct, tag=True, gc=False, kw_only=True):
    """One copy of each of these blocks is gone from one KV group."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The prefix cache was reset: nothing is findable any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of one engine step, in order."""

    ts: float
    events: list[Event]


def cache_salt(extra: Sequence[Any] | None, lora: str | None, *, first: bool) -> str | None:
    """The cache salt among one block's extra keys, "" for none; None when they hold more than is known here.

    Args:
        lora: of the event; comes first among the extra keys when there is one.
        first: whether this is a prompt's first block, the only one that may have a salt.
    """
    rest = list(extra or ())
    if lora is not None:
        if not rest or rest[0] != lora:
            return None
        rest = rest[1:]
    if not rest:
        return ""
    if first and len(rest) == 1 and isinstance(rest[0], str):
        return rest[0]
    return None


_decoder = msgspec.msgpack.Decoder(EventBatch)


def decode(payload: bytes) -> list[Event]:
    """The events of one published batch.

    Raises:
        ValueError: the payload is not what vLLM 0.32 publishes.
    """
    try:
        return _decoder.decode(payload).events
    except msgspec.MsgspecError as error:
        raise ValueError(f"an unreadable batch of {len(payload)} bytes: {error}") from error
