"""One engine's life in its group: a row of the fleet, kept in step with what the replica publishes."""

from __future__ import annotations

from protos import blockkeys, common_pb2, replica_pb2
from router.block_view import BlockView
from router.fleet import LoadReport
from router.group import Link, ReplicaGroup
from router.pool import Share
from router.replica_view import ReplicaView

_MOST_NAME_CHARS = 256
_MOST_BLOCK_BYTES = 1 << 40


class Seat:
    """Joins the fleet when made; `leave` once it is over. Owns the row's blocks, load and standing."""

    def __init__(
        self, group: ReplicaGroup, link: Link, replica: str, epoch: str, *, most_blocks: int
    ) -> None:
        self._group, self._fleet = group, group.fleet
        self.key, self.epoch = f"{replica}@{epoch}", epoch
        self.row = self._fleet.join(replica, epoch)
        self._blocks = BlockView(self._fleet.index, self.row, most=most_blocks)
        self._distrust = "its blocks are not known yet"
        self._left = False
        group.attach(self.key, link)

    @property
    def blocks(self) -> int:
        """Keys indexed for this row."""
        return self._blocks.count

    def take(self, update: replica_pb2.ReplicaUpdate, view: ReplicaView) -> None:
        """Take load and blocks of an update that `view` has accepted.

        Raises:
            DesyncError: its blocks contradict what is held; all of them are forgotten.
        """
        if update.HasField("snapshot"):
            self._fleet.set_pool(self.row, _share(update.snapshot))
        self._fleet.report(self.row, _report(view.load), self._group.clock())
        if update.HasField("snapshot"):
            self._distrust = wrong_scheme(view)
            if self._distrust:
                self._blocks.forget()
        if self._distrust:
            return
        self._group.offer_block_size(self.key, view.block_size)
        if self._fits(view):
            self._blocks.apply(update)
        elif self._blocks.count:
            self._blocks.forget()

    def stand(self, view: ReplicaView, *, usable: bool, suspect: bool, why_out: str = "") -> None:
        """Tell the fleet whether it may be picked, and with which credit."""
        if self._left:
            return
        degraded = why_out or self.degraded(view)
        self._fleet.set_standing(self.row, usable=usable, suspect=suspect, degraded=degraded)
        if not usable:
            self._group.gather.let_go(self.key)  # what is held for it learns of the loss, and goes elsewhere
        self._group.changed()

    def forget_blocks(self, why: str) -> None:
        """Nothing that this replica said of its blocks counts until its next snapshot."""
        self._blocks.forget()
        self._distrust = why

    def degraded(self, view: ReplicaView) -> str:
        """Why this replica gets less cache credit than it may deserve; empty: it is known exactly."""
        if self._distrust:
            return self._distrust
        if not self._fits(view):
            return (
                f"its blocks have {view.block_size} tokens, those of most replicas {self._fleet.block_size}"
            )
        return view.blocks_degraded

    def leave(self) -> None:
        """The engine is gone, and its blocks with it. Idempotent."""
        if self._left:
            return
        self._left = True
        self._group.detach(self.key)
        self._fleet.leave(self.row)

    def _fits(self, view: ReplicaView) -> bool:
        return not view.block_size or view.block_size == self._fleet.block_size


def wrong_scheme(view: ReplicaView) -> str:
    """Why its block keys mean nothing here; empty: they do."""
    if view.key_scheme == blockkeys.SCHEME:
        return ""
    return f"its block keys follow the scheme {view.key_scheme[:64]!r}, not {blockkeys.SCHEME!r}"


def _report(load: common_pb2.ReplicaLoad) -> LoadReport:
    return LoadReport(
        running=load.running,
        waiting=load.waiting,
        sequences=load.sequences,
        prefill_backlog_tokens=load.prefill_backlog_tokens,
        prefill_backlog_pairs=load.prefill_backlog_pairs,
        kv_usage=load.kv_usage,
        max_sequences=load.max_sequences,
        max_batch_tokens=load.max_batch_tokens,
        prefill_ms_per_token=load.prefill_ms_per_token,
        decode_step_ms=load.decode_step_ms,
        pool_load_ms_per_block=load.pool_load_ms_per_block,
    )


def _share(snapshot: replica_pb2.ReplicaSnapshot) -> Share | None:
    """Its part in an arena; None: it has none, or what it says of it cannot be."""
    pool = snapshot.pool
    names = (pool.arena, pool.namespace, pool.agent)
    if not (pool.arena and pool.namespace) or any(len(name) > _MOST_NAME_CHARS for name in names):
        return None
    if not 0 < pool.block_bytes <= _MOST_BLOCK_BYTES:
        return None
    return Share(pool.arena, pool.namespace, pool.agent, pool.block_bytes)
