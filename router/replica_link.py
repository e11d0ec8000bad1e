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
from router.leases import LeaseTable
from router.picker import Candidate
from router.replica_view import DesyncError, ReplicaView

log = logging.getLogger(__name__)

SUSPECT_HEARTBEATS = 3
LOST_HEARTBEATS = 10

GENERATE = "/kvorum.v1.Replica/Generate"

Bytes = grpc.aio.UnaryStreamCall[bytes, bytes]


class Standing(IntEnum):
    """Whether a replica may be picked."""

    READY = 0
    SUSPECT = 1  # only when nothing is ready
    OUT = 2  # connection lost, draining, or not heard of yet


class ReplicaLink:
    """Watches one replica and carries requests to it.

    `on_change` is called (in the loop, must not block) when its standing or model changes.
    """

    def __init__(
        self,
        member: admin_pb2.Member,
        leases: LeaseTable,
        on_change: Callable[[], None],
        *,
        token: str | None = None,
        heartbeat_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica, self.address = member.replica, member.address
        self._member = member
        self._leases, self._on_change, self._clock = leases, on_change, clock
        self._heartbeat_s = heartbeat_s
        self._credential = bearer(token)
        self._view = ReplicaView()
        self._heard_at = 0.0
        self._leased_at_report = 0
        self._doubted = False
        self._channel = open_channel(member.address)
        self._stub: replica_pb2_grpc.ReplicaAsyncStub = replica_pb2_grpc.ReplicaStub(self._channel)
        # Bytes in, bytes out: the forwarding path parses each message once, for its own count.
        self._generate: Any = self._channel.unary_stream(GENERATE)

    @property
    def epoch(self) -> str:
        """The replica's own word, or the controller's until it has spoken."""
        return self._view.epoch or self._member.epoch

    @property
    def key(self) -> str:
        """The key of its candidate and its leases."""
        return f"{self.replica}@{self.epoch}"

    @property
    def model(self) -> common_pb2.ModelInfo:
        """What it serves: its own word, or the controller's until it has spoken."""
        return self._view.model if self._view.epoch else self._member.model

    def standing(self) -> Standing:
        """Whether it may be picked now."""
        draining = self._view.draining or self._member.state == admin_pb2.DRAINING
        if not self._view.synced or draining:
            return Standing.OUT
        return Standing.SUSPECT if self._doubted or self._silent_s() > self._allowed_s() else Standing.READY

    def candidate(self) -> Candidate:
        """Its load as plain values, for the policies."""
        load = self._view.load
        return Candidate(
            replica=self.replica,
            epoch=self.epoch,
            reported=load.running + load.waiting,
            leased=self._leases.sequences(self.key),
            leased_at_report=self._leased_at_report,
            kv_usage=load.kv_usage,
            suspect=self.standing() is Standing.SUSPECT,
        )

    def is_for(self, member: admin_pb2.Member) -> bool:
        """Whether `member` is the engine this link watches; the controller may learn a new epoch later."""
        return member.address == self.address and member.epoch in {self.epoch, self._member.epoch}

    def update_member(self, member: admin_pb2.Member) -> None:
        """The controller said something new of the same engine."""
        self._member = member

    def doubt(self) -> None:
        """A request failed here: prefer others until the replica speaks again."""
        self._doubted = True
        self._on_change()

    def generate(self, request: bytes, *, timeout_s: float, metadata: tuple[tuple[str, str], ...]) -> Bytes:
        """Start `Replica.Generate` with a serialised request; the stream yields serialised responses.

        Fails at once with UNAVAILABLE when there is no connection.
        """
        call: Bytes = self._generate(request, timeout=timeout_s, metadata=self._credential + metadata)
        return call

    async def watch(self) -> None:
        """Follow the replica's updates until cancelled; reconnect with growing pauses."""
        backoff = Backoff()
        while True:
            why = await self._watch_once(backoff)
            was_synced = self._view.synced
            self._view.lose()
            if was_synced:
                log.warning("replica %s at %s lost: %s", self.key, self.address, why)
                self._on_change()
            await asyncio.sleep(backoff.pause_s())

    async def _watch_once(self, backoff: Backoff) -> str:
        """Follow one stream to its end; says why it ended."""
        call = self._stub.WatchReplica(replica_pb2.WatchReplicaRequest(), metadata=self._credential)
        try:
            while True:
                silence_s = self._allowed_s() / SUSPECT_HEARTBEATS * LOST_HEARTBEATS
                async with asyncio.timeout(silence_s):
                    update = await call.read()
                if not isinstance(update, replica_pb2.ReplicaUpdate):  # grpc.aio.EOF
                    return "it ended the stream of its updates"
                self._take(update)
                backoff.reset()
        except DesyncError as error:
            return str(error)
        except TimeoutError:
            return f"silent for {LOST_HEARTBEATS} heartbeats"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"
        except Exception as error:  # a fault of ours must not leave the replica unwatched
            log.exception("cannot take the updates of %s", self.key)
            return str(error)
        finally:
            call.cancel()

    def _take(self, update: replica_pb2.ReplicaUpdate) -> None:
        before = (self.standing(), self.epoch)
        self._view.apply(update)
        self._heard_at = self._clock()
        self._doubted = False
        self._leased_at_report = self._leases.sequences(self.key)
        if (self.standing(), self.epoch) != before:
            self._on_change()

    async def close(self, linger_s: float) -> None:
        """Let the requests that run on it finish for at most `linger_s`, then close the channel."""
        try:
            if self._leases.sequences(self.key):
                async with asyncio.timeout(linger_s):
                    await self._leases.idle(self.key)
        except TimeoutError:
            log.warning("closing %s with requests still running after %.0f s", self.key, linger_s)
        finally:
            await self._channel.close()

    def _silent_s(self) -> float:
        return self._clock() - self._heard_at

    def _allowed_s(self) -> float:
        """The silence that is not yet suspect; a replica may beat slower than this router expects."""
        return SUSPECT_HEARTBEATS * max(self._heartbeat_s, self._view.heartbeat_s)
