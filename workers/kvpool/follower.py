"""Keeps a replica's published set of pooled blocks equal to what its host's arena holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from protos import replica_pb2
from workers.kvpool.agent_port import AgentAddress
from workers.kvpool.arena_tail import ArenaTail, find
from workers.kvpool.errors import ArenaBusy, ArenaError
from workers.kvpool.pool_keys import PoolKeys, Transitions

log = logging.getLogger(__name__)

POLL_S: Final = 0.1
SEARCH_S: Final = 5.0
"""Between two looks for an arena that was lost."""
SILENCE_S: Final = 3.0
"""After which an arena that does not answer is taken to hold nothing: its engines get no answer either, and
compute (`Patience`)."""
AGENT_S: Final = 1.0
"""Between two looks at where the host's agent is."""
FIND_S: Final = 5.0
ANSWER_S: Final = 5.0
"""Far beyond the arena's own deadlines: whatever takes longer is stuck."""

_AT_ONCE: Final = 2048
"""Keys published before others on the event loop have their turn."""


class PoolFollower:
    """Reads in threads, publishes on the event loop that it runs on.

    Args:
        folder: of the host's arenas.
        core_pid: of the replica's EngineCore, which owns one of them.
        agent: of the host, for those who are told of the pool; another one makes `pool` another one.
        keys: kept equal to what is ready in the arena; empty while that is not known.
        changed: called after `keys` or `pool` has changed.
    """

    def __init__(
        self, folder: Path, core_pid: int, agent: AgentAddress, keys: PoolKeys, changed: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._core_pid = core_pid
        self._agent = agent
        self._keys = keys
        self._changed = changed
        self._tail: ArenaTail | None = None
        self._heard_at = 0.0
        self._agent_asked_at = 0.0
        self._complaint = ""
        self.pool: replica_pb2.KvPool | None = None
        """What watchers are told of the arena; None while there is none. Replaced, never changed."""
        self.part_bytes = 0
        """Of one rank's part of one block."""

    async def find(self) -> bool:
        """Look for the arena, within `FIND_S`. False when the engine has none, and never will.

        To be called when the engine has started: by then it owns its arena, or runs without.
        """
        until = asyncio.get_running_loop().time() + FIND_S
        while asyncio.get_running_loop().time() < until:
            try:
                await self._search()
            except (ArenaError, OSError) as error:  # TimeoutError is an OSError
                log.debug("looking for the KV pool again: %s", error)
                await asyncio.sleep(POLL_S)
            else:
                return self._tail is not None
        return True  # `run` looks on

    async def run(self) -> None:
        """Follow until cancelled, then close the arena. Ends by itself on a fault of its own alone, after
        which no block of the pool is published."""
        try:
            while True:
                pause_s = await self._turn()
                await asyncio.sleep(pause_s)
        except Exception as error:
            log.exception("the follower of the KV pool failed")
            self._lose(str(error))
        finally:
            self._drop()

    async def _turn(self) -> float:
        """One look at the arena; returns the seconds until the next."""
        loop = asyncio.get_running_loop()
        try:
            if self._tail is None:
                await self._search()
            if self._tail is None:
                return SEARCH_S
            async with asyncio.timeout(ANSWER_S):
                await self._look_for_agent()
                change = await asyncio.to_thread(self._tail.read)
        except ArenaBusy:
            if self._tail is None:
                return SEARCH_S
            if loop.time() - self._heard_at > SILENCE_S and len(self._keys):
                log.warning("the KV pool has not answered for %.0f s: its blocks count as gone", SILENCE_S)
                self._keys.clear()
                self._tail.start_over()
                self._changed()
            return POLL_S
        except (ArenaError, OSError) as error:
            self._lose(str(error) or f"it did not answer for {ANSWER_S:.0f} s")
            return SEARCH_S
        self._heard_at = loop.time()
        await self._publish(change)
        return POLL_S

    async def _search(self) -> None:
        async with asyncio.timeout(ANSWER_S):
            agent = await asyncio.to_thread(self._agent.now)
            tail = await asyncio.to_thread(find, self._folder, self._core_pid)
        if tail is None:
            return
        self._tail, self._complaint = tail, ""
        self._heard_at = self._agent_asked_at = asyncio.get_running_loop().time()
        shape = tail.arena.header.geometry
        self.part_bytes = shape.rank_bytes
        self.pool = replica_pb2.KvPool(
            arena=tail.name, namespace=tail.namespace, agent=agent, block_bytes=shape.slot_bytes
        )
        self._changed()

    async def _look_for_agent(self) -> None:
        """One that came back at another port has another address from now on, for all who are told."""
        now, pool = asyncio.get_running_loop().time(), self.pool
        if pool is None or now - self._agent_asked_at < AGENT_S:
            return
        self._agent_asked_at = now
        agent = await asyncio.to_thread(self._agent.now)
        if agent == pool.agent:
            return
        log.info("this host's KV pool agent is at %s, and was at %s", agent, pool.agent or "no port")
        self.pool = replica_pb2.KvPool(
            arena=pool.arena, namespace=pool.namespace, agent=agent, block_bytes=pool.block_bytes
        )
        self._changed()

    async def _publish(self, change: Transitions) -> None:
        for piece in _pieces(change):
            self._keys.apply(piece)
            self._changed()
            await asyncio.sleep(0)

    def _lose(self, why: str) -> None:
        """No block of the pool is known from here on; told once for each reason."""
        if why != self._complaint:
            log.warning("the KV pool is lost to this replica, which goes on without: %s", why)
        self._complaint = why
        self._drop()
        self._keys.clear()
        self._changed()

    def _drop(self) -> None:
        tail, self._tail, self.pool = self._tail, None, None
        if tail is not None:
            tail.close()


def _pieces(change: Transitions) -> Iterator[Transitions]:
    """Removals first, so that a set of bounded size stays so."""
    for some in _slices(change.removed):
        yield Transitions([], some)
    for some in _slices(change.stored):
        yield Transitions(some, [])


def _slices(keys: Sequence[int]) -> Iterator[list[int]]:
    return (list(keys[start : start + _AT_ONCE]) for start in range(0, len(keys), _AT_ONCE))
