"""What a replica last said of itself: snapshot, then deltas with consecutive seq. Pure."""

from __future__ import annotations

from protos import common_pb2, replica_pb2

MAX_EPOCH_CHARS = 64
MAX_REASON_CHARS = 256


class DesyncError(Exception):
    """An update that cannot follow what came before it: the view is void, ask for a snapshot."""


class ReplicaView:
    """Applies `ReplicaUpdate`s in order. Holds the latest values only, so its size is bounded.

    The blocks that an update brings are `router.block_view.BlockView`'s.
    """

    def __init__(self) -> None:
        self.synced = False
        self.epoch = ""
        self.heartbeat_s = 0.0
        self.model = common_pb2.ModelInfo()
        self.load = common_pb2.ReplicaLoad()
        self.draining = False
        self.key_scheme = ""
        self.block_size = 0
        self.blocks_degraded = ""
        self._seq = 0

    def apply(self, update: replica_pb2.ReplicaUpdate) -> None:
        """Take one update.

        Raises:
            DesyncError: a gap, a changed epoch or one that is no name, a changed block size, a delta before
                any snapshot; the view is then unsynced.
        """
        if update.HasField("snapshot"):
            if update.seq != 1:
                self._void(f"a snapshot must have seq 1, not {update.seq}")
            if not _is_name(update.epoch):
                self._void(f"an epoch of {len(update.epoch)} characters that is no name")
            self.epoch = update.epoch
            self.model = update.snapshot.model
            self.heartbeat_s = update.snapshot.heartbeat_s
            self.key_scheme = update.snapshot.key_scheme
            self.synced = True
            self.block_size = 0
        elif not self.synced:
            self._void("a delta came before the snapshot")
        elif update.epoch != self.epoch:
            self._void(
                f"epoch changed from {self.epoch} to {update.epoch[:MAX_EPOCH_CHARS]} without a snapshot"
            )
        elif update.seq != self._seq + 1:
            self._void(f"seq {update.seq} came after {self._seq}")
        if update.block_size < 0 or (self.block_size and update.block_size != self.block_size):
            self._void(f"block size changed from {self.block_size} to {update.block_size} without a snapshot")
        if update.blocks and update.block_size == 0 and any(c.stored or c.removed for c in update.blocks):
            self._void("blocks came without a block size")
        self._seq = update.seq
        self.draining = update.draining
        self.block_size = update.block_size
        self.blocks_degraded = update.blocks_degraded[:MAX_REASON_CHARS]
        if update.HasField("load"):
            self.load = update.load

    def lose(self) -> None:
        """The stream of updates broke: nothing is known until the next snapshot."""
        self.synced = False

    def _void(self, why: str) -> None:
        self.synced = False
        raise DesyncError(why)


def _is_name(epoch: str) -> bool:
    """Epochs are parts of keys, `replica@epoch`, and go into tickets, spans and logs."""
    return 0 < len(epoch) <= MAX_EPOCH_CHARS and epoch.isascii() and epoch.isprintable() and "@" not in epoch
