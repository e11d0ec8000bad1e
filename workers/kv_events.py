"""Subscribes to the engine's KV events and feeds them, in order, to the resident set.

The publisher is a thread of the EngineCore, on this host; both sockets are in a folder that only this
user can enter. A missing batch is asked for again at the replay socket, which only that thread answers:
it is also how a publisher that died silently is noticed.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import zmq
import zmq.asyncio

from workers.kv_messages import decode
from workers.kv_order import InOrder
from workers.resident import ResidentBlocks

log = logging.getLogger(__name__)

REPLAY_BATCHES = 2_000
"""Batches the engine keeps for replay; its memory for them is a few kB each."""

_LONGEST_PATH = 107
"""Bytes in the path of a Unix socket."""
_RECEIVE_LIMIT = 10_000
_REPLAY_TIMEOUT_S = 3.0
_CHECK_S = 10.0
_MEND_S = 1.0
_END = (-1).to_bytes(8, "big", signed=True)


class KvEvents:
    """One engine's events. `open` before the engine starts, then `run` for as long as it lives.

    Args:
        resident: fed with every batch, in order.
        changed: called after batches were applied, or when the view has degraded.
        mend: asked, while events are lost and nothing arrives, to reset the engine's prefix cache.
    """

    def __init__(
        self, resident: ResidentBlocks, changed: Callable[[], None], mend: Callable[[], Awaitable[bool]]
    ) -> None:
        self._resident = resident
        self._changed = changed
        self._mend = mend
        self._order = InOrder()
        self._replaying = asyncio.Lock()
        self._unchecked = False
        self._folder: Path | None = None
        self._context: zmq.asyncio.Context | None = None

    def open(self) -> tuple[str, str]:
        """Make the sockets' folder and connect; returns the endpoints that the engine is to bind.

        Raises:
            OSError: no folder for temporary files, or its path is too long for a socket.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="kvorum-kv-"))
        paths = self._folder / "events", self._folder / "replay"
        if len(bytes(paths[0])) > _LONGEST_PATH:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise OSError(
                f"{paths[0]}: too long for a socket ({_LONGEST_PATH} bytes); set TMPDIR to a shorter path"
            )
        self._context = context = zmq.asyncio.Context()
        self._events = context.socket(zmq.SUB)
        self._events.set_hwm(_RECEIVE_LIMIT)
        self._events.subscribe(b"")
        self._replay = context.socket(zmq.DEALER)
        self._replay.set_hwm(_RECEIVE_LIMIT)
        endpoints = f"ipc://{paths[0]}", f"ipc://{paths[1]}"
        self._events.connect(endpoints[0])
        self._replay.connect(endpoints[1])
        return endpoints

    async def run(self) -> None:
        """Follow the events until cancelled. A view that cannot be trusted is emptied and says why.

        Ends only on a fault of its own, after which the resident set says that it has failed.
        """
        try:
            while True:
                await self._next()
                if self._order.missing:
                    await self._fill()
        except Exception as error:
            log.exception("the subscriber to the engine's KV events failed")
            self._resident.fail(f"the subscriber to the engine's KV events failed: {error}")
            self._changed()

    async def catch_up(self) -> None:
        """Return when everything that the engine had published at the time of the call is applied.

        Raises:
            TimeoutError: the publisher did not answer.
        """
        async with self._replaying:
            while await self._ask_again():
                pass
        self._unchecked = False

    def forget_folder(self) -> None:
        """Remove the sockets' names, once both ends are connected: no file outlives a killed replica."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def close(self) -> None:
        """Close the sockets; safe to call twice."""
        self.forget_folder()
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)

    async def _next(self) -> None:
        """Wait for one batch; when none comes, see whether something is wrong."""
        wait_s = _MEND_S if self._resident.can_mend else _CHECK_S
        if not await self._events.poll(wait_s * 1000):
            if self._resident.can_mend:
                await self._try_to_mend()
            elif self._unchecked:
                await self.check()
            return
        frames = await self._events.recv_multipart()
        self._unchecked = True
        self._take(frames)

    async def _try_to_mend(self) -> None:
        try:
            if await self._mend():
                log.info("the engine's prefix cache was reset, because events of it had been lost")
        except Exception as error:
            log.warning("the engine's prefix cache could not be reset: %s", error)

    async def check(self) -> None:
        """`catch_up`, to find a lost last batch; a publisher that does not answer is a loss."""
        try:
            await self.catch_up()
        except TimeoutError:
            self._lost("the engine's publisher of KV events does not answer")

    async def _fill(self) -> None:
        """Ask for the missing batches; what cannot be had is given up."""
        first = self._order.next
        try:
            await self.catch_up()
        except TimeoutError:
            log.warning("the replay of KV events from batch %d timed out", first)
        if self._order.missing:
            self._give_up()

    def _give_up(self) -> None:
        """Go on without the missing batches."""
        first = self._order.next
        lost, ready = self._order.give_up()
        self._lost(f"{lost} batches of KV events from number {first} are lost")
        self._apply(ready)

    async def _ask_again(self) -> bool:
        """One replay request. Whether it brought something new and something is still missing.

        The replay is cut short when it is larger than the sockets' buffers: then it is asked for again.
        """
        before = self._order.next
        async with asyncio.timeout(_REPLAY_TIMEOUT_S):
            while await self._replay.poll(0):  # the rest of one that timed out
                await self._replay.recv_multipart()
            await self._replay.send_multipart([b"", before.to_bytes(8, "big")])
            while True:
                frames = (await self._replay.recv_multipart())[1:]
                if len(frames) == 3 and frames[1] == _END:
                    return self._order.next > before and self._order.missing
                self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._lost(f"the engine published {len(frames)} frames that are no batch of KV events")
            return
        self._apply(self._order.take(int.from_bytes(frames[1], "big"), frames[2]))
        if self._order.overfull:
            self._give_up()

    def _apply(self, batches: list[bytes]) -> None:
        for payload in batches:
            try:
                self._resident.apply(decode(payload))
            except ValueError as error:
                self._lost(f"KV events: {error}")
        if batches:
            self._changed()

    def _lost(self, what: str) -> None:
        log.warning("%s: the resident set starts from nothing (%s)", what, self._resident.counters)
        self._resident.lost_events(what)
        self._changed()
