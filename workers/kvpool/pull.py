"""Brings blocks of other hosts into this host's arenas: each once, a bounded number at a time, in time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Final

from workers.kvpool.agent_observer import Pulled
from workers.kvpool.byte_budget import ByteBudget
from workers.kvpool.errors import ArenaError
from workers.kvpool.host_arena import HostArena
from workers.kvpool.host_arenas import HostArenas
from workers.kvpool.peers import Peers
from workers.kvpool.transport import FalseBlocksError, PeerError, Transport
from workers.kvpool.wire import Block
from workers.kvpool.work_threads import WorkThreads

log = logging.getLogger(__name__)

_ROUNDS: Final = 2
"""The second is for what others were to bring and did not."""
_SETTLE_SHARE: Final = 0.1
_SETTLE_S: Final = 0.5
"""Of a pull's time, this share and no more than that is kept for storing what came last."""
_CLOSE_S: Final = 5.0
"""For cancelled transfers to end: what they do on threads has the arena's deadlines."""
_ANSWER_SHARE: Final = 0.02
_ANSWER_S: Final = 0.05
"""The same for telling what came."""


@dataclass(frozen=True)
class PullLimits:
    """What an agent takes on at once."""

    pulls: int = 64
    """Asked for; further ones are refused."""
    transfers: int = 8
    """From all peers together; further ones wait for their turn."""
    transfer_bytes: int = 64 << 20
    """Received and not stored yet, over all transfers."""
    batch_bytes: int = 4 << 20
    """Stored together, and a block at least. What was stored stays when the rest does not come."""
    longest_s: float = 60.0
    """Whatever a pull asks for."""


@dataclass(frozen=True)
class _Ask:
    """Of one pull."""

    source: str
    namespace: str
    names: tuple[int, ...]
    until: float


@dataclass(eq=False)
class _Transfer:
    """Blocks on their way from one peer, for one pull or several."""

    source: str
    namespace: str
    names: tuple[int, ...]
    until: float
    arena: HostArena
    arrived: dict[int, bytes] = field(default_factory=dict)
    """In the arena now: keys by names."""
    received: int = 0
    failed: str = ""
    waiting: int = 0
    """Pulls."""
    task: asyncio.Task[None] | None = None


class Puller:
    """Asks peers for blocks that this host lacks. Use it within one event loop.

    Two pulls of one block wait for one transfer. A transfer that nobody waits for any more is given up.

    Args:
        arenas: of this host.
        transport: to other hosts; closed by whoever made it.
        threads: for all that blocks.
        clock: of `peers`.
    """

    def __init__(
        self,
        arenas: HostArenas,
        transport: Transport,
        peers: Peers,
        threads: WorkThreads,
        *,
        limits: PullLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arenas = arenas
        self._transport = transport
        self._peers = peers
        self._threads = threads
        self._limits = limits or PullLimits()
        self._clock = clock
        self._turns = asyncio.Semaphore(self._limits.transfers)
        self._budget = ByteBudget(self._limits.transfer_bytes)
        self._coming: dict[tuple[str, int], _Transfer] = {}  # by namespace and name
        self.running = 0
        """Pulls."""
        self.received = 0
        """Blocks, since the start."""
        self.received_bytes = 0
        """Of these blocks."""
        self.refused = 0
        """Blocks that were not what they were said to be."""

    async def pull(self, source: str, namespace: str, names: Sequence[int], timeout_s: float) -> Pulled:
        """Bring these blocks (the router's keys, in the prompt's order) here from the agent `source`.

        Answers within `timeout_s`, with what came until then. Raises nothing but ValueError, for a namespace
        that is none, and CancelledError.
        """
        started = asyncio.get_running_loop().time()
        timeout_s = min(timeout_s, self._limits.longest_s)
        late = started + timeout_s
        if self.running >= self._limits.pulls:
            return Pulled(0, 0, 0.0, f"this agent is busy with {self.running} pulls", refused=True)
        self.running += 1
        came: dict[int, bytes] = {}
        size = 0
        try:
            async with asyncio.timeout_at(late):  # only should the threads be late, which all wait for
                arena = await self._threads.run(self._arenas.get, namespace)
                size = arena.geometry.slot_bytes
                wanted = tuple(dict.fromkeys(names))[: arena.geometry.slots]
                until = late - min(_ANSWER_S, _ANSWER_SHARE * timeout_s)
                failed = await self._bring(arena, _Ask(source, namespace, wanted, until), came)
            if not failed and len(wanted) < len(set(names)):
                failed = f"the arena here has room for {len(wanted)} of {len(names)} blocks"
        except TimeoutError:
            failed = "the arena here did not answer by the deadline"
        except ArenaError as error:
            failed = str(error)
        finally:
            self.running -= 1
        seconds = asyncio.get_running_loop().time() - started
        return Pulled(len(came), len(came) * size, seconds, failed)

    async def close(self) -> None:
        """Give up all transfers."""
        tasks = {transfer.task for transfer in self._coming.values() if transfer.task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)

    async def _bring(self, arena: HostArena, ask: _Ask, came: dict[int, bytes]) -> str:
        """Fills `came`; returns why something is missing. Raises ArenaError."""
        loop = asyncio.get_running_loop()
        source, namespace, until = ask.source, ask.namespace, ask.until
        settle_s = min(_SETTLE_S, _SETTLE_SHARE * (until - loop.time()))
        why = ""
        for _ in range(_ROUNDS):
            missing = await self._threads.run(arena.missing, ask.names)
            # No await between looking and joining: others look at the same time.
            others = {found for name in missing if (found := self._coming.get((namespace, name)))}
            fresh = [name for name in missing if (namespace, name) not in self._coming]
            why = self._peers.avoided(source) if fresh else ""
            transfers = set(others)
            if fresh and not why:
                transfers.add(self._start(arena, source, namespace, fresh, until - settle_s))
            await self._wait_for(transfers, until)
            for transfer in transfers:
                came |= {name: transfer.arrived[name] for name in missing if name in transfer.arrived}
            if came.keys() >= set(missing):
                return ""
            why = why or next((transfer.failed for transfer in transfers if transfer.failed), "")
            if not others or loop.time() >= until - settle_s:
                break
        return why or f"{source} did not send all by the deadline"

    def _start(
        self, arena: HostArena, source: str, namespace: str, names: Sequence[int], until: float
    ) -> _Transfer:
        transfer = _Transfer(source, namespace, tuple(names), until, arena)
        for name in names:
            self._coming[namespace, name] = transfer
        transfer.task = asyncio.create_task(self._carry(transfer), name=f"blocks from {source}")
        # Not at the end of the task, which may be cancelled before its beginning.
        transfer.task.add_done_callback(lambda _: self._forget(transfer))
        return transfer

    def _forget(self, transfer: _Transfer) -> None:
        for name in transfer.names:
            del self._coming[transfer.namespace, name]

    async def _wait_for(self, transfers: Iterable[_Transfer], until: float) -> None:
        """Until they are done, or it is late. One that nobody waits for then is cancelled."""
        waited = list(transfers)
        for transfer in waited:
            transfer.waiting += 1
        try:
            tasks = {transfer.task for transfer in waited if transfer.task is not None}
            if tasks:
                await asyncio.wait(tasks, timeout=max(0.0, until - asyncio.get_running_loop().time()))
        finally:
            for transfer in waited:
                transfer.waiting -= 1
                if not transfer.waiting and transfer.task is not None:
                    transfer.task.cancel()

    async def _carry(self, transfer: _Transfer) -> None:
        """One transfer, from its turn to its last block. Raises CancelledError only."""
        try:
            async with AsyncExitStack() as held:
                async with asyncio.timeout_at(transfer.until):
                    await held.enter_async_context(self._turns)
                    await held.enter_async_context(self._budget.holding(self._batch_bytes(transfer)))
                await self._receive(transfer)
        except TimeoutError:
            transfer.failed = f"{self._limits.transfers} other transfers took until the deadline"
        except ArenaError as error:
            transfer.failed = str(error)
        except Exception as error:
            log.exception("a transfer from %s failed in an unforeseen way", transfer.source)
            transfer.failed = f"{type(error).__name__}: {error}"

    async def _receive(self, transfer: _Transfer) -> None:
        """Read to the end, the deadline or the first mistake. Raises ArenaError."""
        source, asked_at = transfer.source, self._clock()
        if why := self._peers.avoided(source):  # since it was this transfer's turn
            transfer.failed = why
            return
        if fault := await self._read(transfer):
            transfer.failed = fault
            self._peers.failed(source, fault, asked_at)
        elif transfer.received:
            size = transfer.received * transfer.arena.geometry.slot_bytes
            self._peers.served(source, transfer.received, size, self._clock() - asked_at)
        if transfer.arrived:  # they came in batches; the prefix's first shall be evicted last
            await self._threads.run(transfer.arena.used, list(transfer.arrived.values()))

    async def _read(self, transfer: _Transfer) -> str:
        """Store what comes; returns what the peer did wrong, empty: nothing. Raises ArenaError."""
        loop, source, wanted = asyncio.get_running_loop(), transfer.source, len(transfer.names)
        shape = transfer.arena.geometry
        # The call's own deadline is for the case that this process is stopped: as a rule ours comes first.
        left_s = transfer.until - loop.time() + 1.0
        blocks = self._transport.read(source, transfer.namespace, transfer.names, shape, left_s)
        batch: list[Block] = []
        fault = ""
        try:
            async with aclosing(blocks):
                while not fault and not transfer.failed:
                    async with asyncio.timeout_at(transfer.until):
                        block = await anext(blocks, None)
                    if block is None:
                        break
                    batch.append(block)
                    transfer.received += 1
                    if len(batch) * shape.slot_bytes >= self._limits.batch_bytes:
                        whole, batch = batch, []
                        fault = await self._store(transfer, whole)
        except TimeoutError:
            transfer.failed = f"{source} had sent {transfer.received} of {wanted} blocks by the deadline"
            fault = "" if transfer.received else transfer.failed
        except PeerError as error:
            fault = str(error)
            self.refused += isinstance(error, FalseBlocksError)
        fault = await self._store(transfer, batch) or fault
        if not fault and not transfer.failed and transfer.received < wanted:
            transfer.failed = f"{source} has {transfer.received} of {wanted} blocks only"
        return fault

    async def _store(self, transfer: _Transfer, batch: Sequence[Block]) -> str:
        """What was wrong with the blocks; empty: nothing. Raises ArenaError."""
        if not batch:
            return ""
        names = [transfer.names[block.position] for block in batch]
        written = await self._threads.run(transfer.arena.write, batch, names)
        transfer.arrived |= written.there
        self.received += len(written.there)
        self.received_bytes += len(written.there) * transfer.arena.geometry.slot_bytes
        if written.false:
            self.refused += 1
            return f"{transfer.source} sent a block that is not what its checksum says"
        if len(written.there) < len(batch):
            transfer.failed = f"the arena here took {len(written.there)} of {len(batch)} blocks that came"
        return ""

    def _batch_bytes(self, transfer: _Transfer) -> int:
        return max(self._limits.batch_bytes, transfer.arena.geometry.slot_bytes)
