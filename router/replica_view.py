"""What a replica last said of itself: snapshot, then deltas with consecutive seq. Pure."""

from __future__ import annotations

from protos import common_pb2, replica_pb2


class DesyncError(Exception):
    """An update that does not follow the one before it: the view is void, ask for a snapshot."""


class ReplicaView:
    """Applies `ReplicaUpdate`s in order. Holds the latest values only, so its size is bounded."""

    def __init__(self) -> None:
        self.synced = False
        self.epoch = ""
        self.heartbeat_s = 0.0
        self.model = common_pb2.ModelInfo()
        self.load = common_pb2.ReplicaLoad()
        self.draining = False
        self._seq = 0

    def apply(self, update: replica_pb2.ReplicaUpdate) -> None:
        """Take one update.

        Raises:
            DesyncError: a gap, a changed epoch, or a delta before any snapshot; the view is then unsynced.
        """
        if update.HasField("snapshot"):
            if update.seq != 1:
                self._void(f"a snapshot must have seq 1, not {update.seq}")
            self.epoch = update.epoch
            self.model = update.snapshot.model
            self.heartbeat_s = update.snapshot.heartbeat_s
            self.synced = True
        elif not self.synced:
            self._void("a delta came before the snapshot")
        elif update.epoch != self.epoch:
            self._void(f"epoch changed from {self.epoch} to {update.epoch} without a snapshot")
        elif update.seq != self._seq + 1:
            self._void(f"seq {update.seq} came after {self._seq}")
        self._seq = update.seq
        self.draining = update.draining
        if update.HasField("load"):
            self.load = update.load

    def lose(self) -> None:
        """The stream of updates broke: nothing is known until the next snapshot."""
        self.synced = False

    def _void(self, why: str) -> None:
        self.synced = False
        raise DesyncError(why)
