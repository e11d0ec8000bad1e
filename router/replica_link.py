"""One replica as this router sees it: a channel, a stream of its updates, and its standing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import grpc
import grpc.aio

from protos import admin_pb2, common_pb2, replica_pb2, replica_pb2_grpc
from protos.channels import bearer, open_channel
from router.backoff import Backoff
from router.group import Bytes, ReplicaGroup
from router.replica_view import DesyncError, ReplicaView
from router.seat import Seat, wrong_scheme

log = logging.getLogger(__name__)

SUSPECT_HEARTBEATS = 3
LOST_HEARTBEATS = 10
MOST_HEARTBEAT_S = 60.0
"""A replica that announces slower ones is suspect in between."""

_STEADY_S = 30.0
"""A view that held this long was no lie: if it breaks, the next snapshot is asked for at once again."""

GENERATE = "/kvorum.v1.Replica/Generate"


class Standing(IntEnum):
    """Whether a replica may be picked."""

    READY = 0
    SUSPECT = 1  # only when nothing is ready
    OUT = 2  # connection lost, draining, another model, or not heard of yet


class _ResyncError(DesyncError):
    """The view is void through no fault of the replica."""


class ReplicaLink:
    """Watches one replica and carries requests to it.

    A replica whose view was dropped (a gap, contradictory blocks) stays in service without cache credit
    while a fresh snapshot is on its way; one whose connection is lost does not.

    `on_change` is called (in the loop, must not block) when its standing or model changes.
    """

    def __init__(
        self,
        member: admin_pb2.Member,
        group: ReplicaGroup,
        on_change: Callable[[], None],
        *,
        token: str | None = None,
        heartbeat_s: float = 1.0,
        most_blocks: int = 4_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica, self.address = member.replica, member.address
        self.group = group
        self.views_dropped = 0
        self.why_ended = ""
        self._member = member
        self._on_change, self._clock = on_change, clock
        self._heartbeat_s, self._most_blocks = heartbeat_s, most_blocks
        self._credential = bearer(token)
        self._view = ReplicaView()
        self._connected = False
        self._heard_at = 0.0
        self._doubted = False
        self._desyncs = Backoff()
        self._synced_at = 0.0
        self._call: Any = None
        self._unanswered: set[Bytes] = set()
        self._resyncing = False
        self._told: tuple[Standing, str] | None = None
        self._seat = Seat(group, self, member.replica, member.epoch, most_blocks=most_blocks)
        self._channel = open_channel(member.address)
        self._stub: replica_pb2_grpc.ReplicaAsyncStub = replica_pb2_grpc.ReplicaStub(self._channel)
        # Bytes in, bytes out: the forwarding path parses each message once, for its own count.
        self._generate: Any = self._channel.unary_stream(GENERATE)

    @property
    def epoch(self) -> str:
        """The replica's own word, or the controller's until it has spoken."""
        return self._seat.epoch

    @property
    def key(self) -> str:
        """The key of its leases."""
        return self._seat.key

    @property
    def model(self) -> common_pb2.ModelInfo:
        """What it serves: its own word, or the controller's until it has spoken."""
        return self._view.model if self._view.epoch and not self._other_model() else self._member.model

    def standing(self) -> Standing:
        """Whether it may be picked now."""
        if self._why_out():
            return Standing.OUT
        return Standing.SUSPECT if self._doubted or self._silent_s() > self._allowed_s() else Standing.READY

    def state(self) -> admin_pb2.ReplicaView:
        """What this router knows of it, for people."""
        speeds = self.group.fleet.speeds
        errors = speeds.errors(self.replica)
        return admin_pb2.ReplicaView(
            replica=self.replica,
            epoch=self.epoch,
            standing=self.standing().name.lower(),
            degraded=self._why_out() or self._seat.degraded(self._view),
            blocks=self._seat.blocks,
            block_size=self._view.block_size,
            views_dropped=self.views_dropped,
            leases=self.group.leases.load(self.key).requests,
            ttft_error_ms=errors.ttft_ms,
            cached_error_tokens=errors.cached_tokens,
            prefill_ms_per_token=speeds.of(self.replica).a,
        )

    def is_for(self, member: admin_pb2.Member) -> bool:
        """Whether `member` is the engine this link watches; the controller may learn a new epoch later."""
        return member.address == self.address and member.epoch in {self.epoch, self._member.epoch}

    def update_member(self, member: admin_pb2.Member) -> None:
        """The controller said something new of the same engine."""
        self._member = member
        self.refresh()

    def doubt(self) -> None:
        """A request failed here: prefer others until the replica speaks again."""
        self._doubted = True
        self.refresh()

    def resync(self) -> None:
        """Drop the view of its blocks and ask for a fresh snapshot."""
        self._seat.forget_blocks("its blocks are being read anew")
        if self._call is not None:
            self._resyncing = True
            self._call.cancel()

    def refresh(self) -> None:
        """Tell the fleet its present standing; silence changes it without any event."""
        now = (self.standing(), self.epoch)
        self._seat.stand(
            self._view,
            usable=now[0] is not Standing.OUT,
            suspect=now[0] is Standing.SUSPECT,
            why_out=self._why_out(),
        )
        if now != self._told:
            self._told = now
            self._on_change()

    def generate(self, request: bytes, *, timeout_s: float, metadata: tuple[tuple[str, str], ...]) -> Bytes:
        """Start `Replica.Generate` with a serialised request; the stream yields serialised responses.

        Fails at once with UNAVAILABLE when there is no connection.
        """
        call: Bytes = self._generate(request, timeout=timeout_s, metadata=self._credential + metadata)
        self._unanswered.add(call)
        call.add_done_callback(self._unanswered.discard)
        return call

    def answered(self, call: Bytes) -> None:
        """Its first message is here: from now on only the connection's own end, or its client, ends it."""
        self._unanswered.discard(call)

    async def watch(self) -> None:
        """Follow the replica's updates until cancelled; reconnect with growing pauses."""
        backoff = Backoff()
        while True:
            pauses = backoff
            try:
                why = await self._watch_once(backoff)
            except DesyncError as error:
                pauses = self._desyncs
                self._drop_view(str(error), fault=not isinstance(error, _ResyncError))
            else:
                if self._connected:
                    log.warning("replica %s at %s lost: %s", self.key, self.address, why)
                self._connected = False
                self._view.lose()
                self._seat.forget_blocks("its connection was lost")
            self.refresh()
            await asyncio.sleep(pauses.pause_s())

    async def _watch_once(self, backoff: Backoff) -> str:
        """Follow one stream to its end; says why it ended.

        Raises:
            DesyncError: an update that cannot be right.
        """
        call = self._call = self._stub.WatchReplica(
            replica_pb2.WatchReplicaRequest(), metadata=self._credential
        )
        try:
            while True:
                silence_s = self._allowed_s() / SUSPECT_HEARTBEATS * LOST_HEARTBEATS
                async with asyncio.timeout(silence_s):
                    update = await call.read()
                if not isinstance(update, replica_pb2.ReplicaUpdate):  # grpc.aio.EOF
                    return "it ended the stream of its updates"
                self._take(update)
                backoff.reset()
        except DesyncError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._resyncing and not (task and task.cancelling()):  # the call was cancelled, not this task
                raise _ResyncError("most replicas have another block size now") from None
            raise
        except TimeoutError:
            why = f"silent for {LOST_HEARTBEATS} heartbeats"
            self._end_unanswered(why)
            return why
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"
        except Exception as error:  # a fault of ours must not leave the replica unwatched
            log.exception("cannot take the updates of %s", self.key)
            return str(error)
        finally:
            self._call, self._resyncing = None, False
            call.cancel()

    def _take(self, update: replica_pb2.ReplicaUpdate) -> None:
        self._connected = True
        self._heard_at = self._clock()
        self._view.apply(update)
        self._doubted = False
        if self._view.epoch != self._seat.epoch:
            self._seat.leave()
            self._seat = Seat(self.group, self, self.replica, self._view.epoch, most_blocks=self._most_blocks)
        if update.HasField("snapshot"):
            self._synced_at = self._heard_at
            self.views_dropped += bool(self._other_model() or wrong_scheme(self._view))
        elif self._heard_at - self._synced_at > _STEADY_S:
            self._desyncs.reset()
        if not self._other_model():
            self._seat.take(update, self._view)
        elif update.HasField("snapshot"):
            self._seat.forget_blocks(self._other_model())
        self.refresh()

    def _end_unanswered(self, why: str) -> None:
        """Let the requests that await their first message here go to another replica.

        Of a host that vanished the connection itself tells only when its keepalive gives up, much later.
        Where nothing else could take them they go on waiting: the replica may only have been held up.
        """
        members = [member for member in self.group.fleet.members if member is not None]
        if not any(m.usable and not m.suspect and m.key != self.key for m in members):
            return
        self.why_ended = f"was {why} while the request awaited its first message"
        for call in tuple(self._unanswered):
            call.cancel()

    def _drop_view(self, why: str, *, fault: bool) -> None:
        """No credit until a fresh snapshot; `fault`: because what it published cannot be right."""
        if fault:
            self.views_dropped += 1
            log.warning("view of replica %s dropped (%d so far): %s", self.key, self.views_dropped, why)
        self._view.lose()
        self._seat.forget_blocks(f"unsynced: {why}")

    def retire(self) -> None:
        """It gets no new requests."""
        self._seat.leave()

    async def close(self, linger_s: float) -> None:
        """Let the requests that run on it finish for at most `linger_s`, then close the channel."""
        self.retire()
        key = self.key
        try:
            if self.group.leases.sequences(key):
                async with asyncio.timeout(linger_s):
                    await self.group.leases.idle(key)
        except TimeoutError:
            log.warning("closing %s with requests still running after %.0f s", key, linger_s)
        finally:
            self.why_ended = "was withdrawn, and the time to finish what ran on it is over"
            await self._channel.close()

    def _why_out(self) -> str:
        """Why it may not be picked; empty: it may."""
        if self._view.draining or self._member.state == admin_pb2.DRAINING:
            return "draining"
        if not self._connected:
            return "not connected"
        return self._other_model()

    def _other_model(self) -> str:
        """Why its own word on its model cannot be reconciled with the controller's; empty: it can."""
        if not self._view.epoch:
            return ""
        says, listed = self._view.model, self._member.model
        for name in ("name", "tokenizer_digest", "revision"):
            ours, theirs = getattr(listed, name), getattr(says, name)
            if ours and ours != theirs:
                return f"it says it serves {name} {theirs!r}, the controller says {ours!r}"
        return ""

    def _silent_s(self) -> float:
        return self._clock() - self._heard_at

    def _allowed_s(self) -> float:
        """The silence that is not yet suspect; a replica may beat slower than this router expects."""
        return SUSPECT_HEARTBEATS * max(self._heartbeat_s, min(self._view.heartbeat_s, MOST_HEARTBEAT_S))
