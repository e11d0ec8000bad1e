"""Which blocks this replica's engine holds, by block key, as its KV events tell. Pure.

Beside them, in the tier HOST, those of the pool that it shares with other engines of its host (`PoolKeys`).

What is published. A hit needs a prefix's blocks in *every* KV group of the model, but the groups differ
in what they keep. A full-attention group keeps every block of a prefix, so "this block is resident" means
something by itself: a key is published when each full-attention group of its tier holds it, once, however
many groups and copies there are. A sliding-window, chunked or Mamba group drops blocks that it will not
read again while the prefix stays usable, and what it needs depends on where the prompt ends, which no set
of keys can say. Those groups are followed (their removals are theirs) and do not publish; where one lacks
its last window the engine reuses less than published, and the router's measured error says so. A model
without any full-attention group publishes what all its groups hold, an underestimate.

What is not published: a block whose parent, tokens or extra keys are not fully known (images, embeddings,
unknown parents). A wrong key would promise a hit in another tenant's namespace; a missing one costs a hit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protos import blockkeys
from protos.blockkeys import Keys
from workers.kv_messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, Hash, cache_salt
from workers.kvpool.pool_keys import PoolKeys

DEVICE, HOST, STORAGE = 0, 1, 2
"""Numbers of kvorum.v1.Tier."""

_TIERS = {None: DEVICE, "GPU": DEVICE, "CPU": HOST, "STORAGE": STORAGE}
_FULL = (None, "full_attention", "mla_attention", "sink_full_attention")


class Changes(Protocol):
    """Hears every true transition of the published set."""

    def store(self, tier: int, key: int) -> None: ...
    def remove(self, tier: int, key: int) -> None: ...
    def clear(self, tier: int) -> None: ...


@dataclass
class Counters:
    """Blocks, unless named otherwise, that events spoke of and the set could not follow."""

    unknown_parents: int = 0
    unkeyed: int = 0
    """Images, embeddings, placeholders without tokens."""
    partial: int = 0
    """Of another size than the model's blocks."""
    contradictions: int = 0
    """One engine hash, two different prefixes."""
    unknown_removals: int = 0
    before_reset: int = 0
    overflow: int = 0
    unknown_tiers: int = 0
    relearned: int = 0
    """Times that the block size turned out larger."""
    cleared: int = 0
    """Times that the engine's prefix cache was reset."""


class _Group:
    """How many copies of each block one KV group holds in one tier."""

    __slots__ = ("copies", "full")

    def __init__(self, full: bool) -> None:
        self.full = full
        self.copies: dict[Hash, int] = {}


class ResidentBlocks:
    """Follows the engine's events, in order, and keeps the published set.

    Args:
        revision: the model's, the first part of every namespace.
        changes: told of every key that joins or leaves the published set.
        max_blocks: distinct blocks that the engine can hold over all tiers; what events claim beyond
            that is nonsense, counted and dropped. Known, and set, once the engine has started.
    """

    def __init__(self, revision: str, changes: Changes, max_blocks: int = 1 << 20) -> None:
        self._revision = revision
        self._changes = changes
        self.max_blocks = max_blocks
        self._tiers: dict[int, dict[int, _Group]] = defaultdict(dict)
        self._published: dict[int, dict[int, Hash]] = defaultdict(dict)
        self._keys: dict[Hash, int] = {}
        self._full_known = False
        self._clears_due = 0
        self._failed = ""
        self._gap = ""
        self.block_size = 0
        """Tokens per block, learned from the events; 0 before the first."""
        self.counters = Counters()
        self.pool = PoolKeys(changes, HOST)
        """What the engine will load instead of computing it, whoever stored it. An engine with a pool tells
        of no blocks in host memory by its events."""

    @property
    def degraded(self) -> str:
        """Why blocks may be missing from the set; empty when it is the whole truth."""
        return self._failed or self._gap

    @property
    def can_mend(self) -> bool:
        """Whether an engine whose prefix cache is reset would make the set whole again."""
        return bool(self._gap) and not self._failed

    def apply(self, events: Iterable[Event]) -> None:
        """Take in one batch. Batches must come in order, each once (see InOrder)."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.counters.cleared += 1
                self._forget()
                self._gap = ""
            elif self.counters.cleared < self._clears_due:
                # A reset is done but its event comes with the engine's next step; until then
                # everything that arrives happened before it.
                self.counters.before_reset += len(event.block_hashes)
            elif isinstance(event, BlockStored):
                self._store(event)
            else:
                self._remove(event)

    @property
    def resets(self) -> int:
        """Resets of the engine's prefix cache known by now; take it before asking for another."""
        return max(self.counters.cleared, self._clears_due)

    def reset_done(self, resets_before: int) -> None:
        """The engine's prefix cache was reset on our request, sent when `resets` was that.

        The engine publishes the reset with its next step, which may be hours away, so the set is
        emptied now, unless the event was quicker than the answer to the request.
        """
        if self.counters.cleared <= resets_before:
            self._forget()
            self._clears_due, self._gap = resets_before + 1, ""

    def lost_events(self, what: str) -> None:
        """Some events are lost for good: start from nothing, because an underestimate is safe.

        Blocks stored from here on are followed again where their parents are known. The set is the
        whole truth again once the engine's prefix cache has been reset.
        """
        self._forget()
        self._clears_due, self._gap = 0, what

    def fail(self, why: str) -> None:
        """No more events will come; nothing is published from here on."""
        self._forget()
        self._failed = why

    def blocks(self, tier: int = DEVICE) -> int:
        """Published keys of a tier."""
        return len(self._published[tier]) + (len(self.pool) if tier == HOST else 0)

    def tiers(self) -> list[int]:
        """The tiers that hold something."""
        held = {tier for tier, published in self._published.items() if published}
        return sorted(held | {HOST} if len(self.pool) else held)

    def keys(self, tier: int = DEVICE) -> Keys:
        """A copy of a tier's published keys, in no particular order."""
        published = self._published[tier]
        found = np.fromiter(published, np.uint64, len(published))
        return np.concatenate((found, self.pool.keys())) if tier == HOST else found

    def prompt_keys(self, tokens: NDArray[Any], lora: str = "", salt: str = "") -> list[int]:
        """The keys of a prompt's full blocks; none before the block size is known."""
        if not self.block_size or len(tokens) < self.block_size:
            return []
        root = blockkeys.root(self._revision, lora, salt)
        keys: list[int] = blockkeys.keys(tokens, self.block_size, root).tolist()
        return keys

    def prefix(self, keys: Sequence[int], start: int = 0, tier: int = DEVICE) -> int:
        """How many leading keys are resident, given that the first `start` are."""
        published, end = self._published[tier], len(keys)
        while start < end and keys[start] in published:
            start += 1
        return start

    def local_prefix(self, keys: Sequence[int], start: int = 0) -> int:
        """How many leading keys need not be computed: the engine's own and, where these end, the pool's."""
        return self.pool.prefix(keys, self.prefix(keys, start))

    def _store(self, event: BlockStored) -> None:
        tier = _TIERS.get(event.medium, -1)
        if tier < 0:
            self.counters.unknown_tiers += len(event.block_hashes)
            return
        full = event.kv_cache_spec_kind in _FULL
        if full and not event.whole:
            self.counters.unkeyed += len(event.block_hashes)
            return
        if full and not self._full_known:
            self._full_known = True
            self._relearn(0)  # what was learned before came from groups that do not publish
        group = self._group(tier, event.group_idx or 0, full)
        if group.full != self._full_known:
            self._count(group, event.block_hashes)
            return
        if event.block_hashes and event.whole and event.block_size > self.block_size:
            self._relearn(event.block_size)
        if not event.whole:
            self.counters.unkeyed += len(event.block_hashes)
        elif event.block_size != self.block_size:
            self.counters.partial += len(event.block_hashes)
        else:
            self._hold(tier, group, event.block_hashes, self._keys_of(event))

    def _count(self, group: _Group, blocks: list[Hash]) -> None:
        for block in blocks:
            if len(group.copies) >= self.max_blocks:
                self.counters.overflow += 1
            else:
                group.copies[block] = group.copies.get(block, 0) + 1

    def _hold(self, tier: int, group: _Group, blocks: list[Hash], keys: list[int]) -> None:
        groups, published = self._publishing(tier), self._published[tier]
        for block, key in zip(blocks, keys, strict=False):
            known = self._keys.get(block)
            if known is None:
                if len(self._keys) >= self.max_blocks:
                    self.counters.overflow += 1
                    self._gap = f"the engine's events claim more than its {self.max_blocks} blocks"
                    return
                self._keys[block] = key
            elif known != key:
                self.counters.contradictions += 1
                return  # what follows in this event is chained to it
            copies = group.copies.get(block, 0)
            group.copies[block] = copies + 1
            if not copies and key not in published and all(block in g.copies for g in groups):
                published[key] = block
                self._changes.store(tier, key)

    def _remove(self, event: BlockRemoved) -> None:
        tier = _TIERS.get(event.medium, -1)
        group = self._tiers[tier].get(event.group_idx or 0) if tier >= 0 else None
        for block in event.block_hashes:
            copies = group.copies.get(block, 0) if group is not None else 0
            if group is None or not copies:
                self.counters.unknown_removals += 1
            elif copies > 1:
                group.copies[block] = copies - 1
            else:
                del group.copies[block]
                if group.full == self._full_known:
                    self._drop(tier, block)

    def _drop(self, tier: int, block: Hash) -> None:
        key = self._keys[block]
        if self._published[tier].get(key) == block:
            del self._published[tier][key]
            self._changes.remove(tier, key)
        if not any(block in group.copies for tier in self._tiers for group in self._publishing(tier)):
            del self._keys[block]

    def _publishing(self, tier: int) -> list[_Group]:
        return [group for group in self._tiers[tier].values() if group.full == self._full_known]

    def _group(self, tier: int, index: int, full: bool) -> _Group:
        groups = self._tiers[tier]
        if index not in groups:
            groups[index] = _Group(full)
            if full == self._full_known:  # it holds nothing yet, so nothing is resident everywhere
                self._unpublish(tier)
        return groups[index]

    def _keys_of(self, event: BlockStored) -> list[int]:
        """Keys of the event's leading blocks that can be named; those that cannot are counted."""
        count, extras = len(event.block_hashes), event.extra_keys
        if event.parent_block_hash is not None:
            parent = self._keys.get(event.parent_block_hash)
            if parent is None:
                self.counters.unknown_parents += count
                return []
        else:
            parent = None
        salt, named = "", 0
        if extras is not None and len(extras) == count:
            for index, extra in enumerate(extras):
                first = parent is None and index == 0
                found = cache_salt(extra, event.lora_name, first=first)
                if found is None:
                    break
                salt, named = found if first else salt, index + 1
        self.counters.unkeyed += count - named
        if not named:
            return []
        start = blockkeys.root(self._revision, event.lora_name or "", salt) if parent is None else parent
        tokens = np.asarray(event.token_ids[: named * event.block_size], dtype=np.int64)
        keys: list[int] = blockkeys.keys(tokens, event.block_size, start).tolist()
        return keys

    def _relearn(self, block_size: int) -> None:
        if self._keys:
            self.counters.relearned += 1
        self._forget()
        self.block_size = block_size

    def _forget(self) -> None:
        for groups in self._tiers.values():
            for group in groups.values():
                group.copies.clear()
        for tier in self._published:
            self._unpublish(tier)
        self._keys.clear()

    def _unpublish(self, tier: int) -> None:
        if self._published[tier]:
            self._published[tier].clear()
            self._changes.clear(tier)
