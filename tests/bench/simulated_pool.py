"""Memory that the simulated replicas of one host share, and the links between hosts: for the simulator.

In the way of `workers.kvpool`: blocks are stored when they are computed, and evicted least recently used
first, the end of a prompt before its beginning; under TinyLFU, which is the real one, a new block takes the
place of another only if it was asked for more often. Blocks go to other hosts in whole pulls, one after the
other on each host's way out and way in.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router.pool import Share
from tests.bench.traces import BLOCK
from workers.kvpool.admission import Admission, Lru, Policy, TinyLfu
from workers.kvpool.layout import Geometry, Segment

Keys = npt.NDArray[np.uint64]

_NAMESPACE = "simulated"
ADMISSIONS = {policy.name.lower(): policy for policy in Policy}


@dataclass(frozen=True)
class PoolShape:
    """Of every host. The defaults are of the order of a host with eight H100-class GPUs, for the replicas of
    `simulated_replica.Speed`: nothing of it was measured here."""

    host_replicas: int = 8
    host_gib: float = 512.0
    token_kb: float = 131.072  # KV of one token
    load_gb_s: float = 20.0  # from the host's memory into one engine
    network_gbit_s: float = 100.0  # of each host, each way
    network_ms: float = 1.0  # of each pull
    admission: str = "lru"

    def check(self) -> None:
        """ValueError says what cannot be simulated."""
        if self.admission not in ADMISSIONS:
            raise ValueError(f"no admission '{self.admission}'; choose of {', '.join(ADMISSIONS)}")
        rates = (self.host_gib, self.token_kb, self.load_gb_s, self.network_gbit_s)
        if self.host_replicas < 1 or min(rates) <= 0 or self.network_ms < 0:
            raise ValueError(f"sizes and rates of a pool must be above 0: {self}")
        if self.slots < 1:
            raise ValueError(f"{self.host_gib} GiB hold no block of {self.block_bytes} bytes")

    @property
    def block_bytes(self) -> int:
        """Of one of the trace's blocks."""
        return round(self.token_kb * 1e3 * BLOCK)

    @property
    def slots(self) -> int:
        return int(self.host_gib * 2**30 / self.block_bytes)

    @property
    def load_ms_per_block(self) -> float:
        return self.block_bytes / self.load_gb_s / 1e6

    def pull_s(self, blocks: int) -> float:
        """On links that are free."""
        return self.network_ms / 1e3 + blocks * self.block_bytes * 8 / self.network_gbit_s / 1e9

    def host_of(self, replica: int) -> int:
        return replica // self.host_replicas

    def share(self, host: int) -> Share:
        """What its replicas say of their arena."""
        return Share(f"host-{host}", _NAMESPACE, f"host-{host}:1", self.block_bytes)


class SimulatedArena:
    """At most `slots` blocks by key. Each of `followers` is told all that changes (`changes`)."""

    def __init__(self, slots: int, admission: str, followers: int) -> None:
        self.slots = slots
        self.refused = self.evicted = 0
        self._reserved = 0
        self._blocks: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._changes: list[dict[int, bool]] = [{} for _ in range(followers)]
        self._admission: Admission = Lru()
        if ADMISSIONS[admission] is Policy.TINYLFU:
            geometry = Geometry(slots, ranks=1, rank_bytes=1, changes=1)
            self._admission = TinyLfu(Segment(bytearray(geometry.total_bytes), geometry))

    def __len__(self) -> int:
        return len(self._blocks)

    def hits(self, keys: Sequence[int], start: int = 0) -> int:
        """Where the blocks end that it holds without a gap from `start` on."""
        found = start
        while found < len(keys) and keys[found] in self._blocks:
            found += 1
        return found

    def asked(self, keys: Sequence[int]) -> None:
        """A prompt of these blocks wants them: they count as used, and as demand."""
        if len(keys):
            self._admission.asked([_digest(key) for key in keys])
        self._touch(keys)

    def store(self, keys: Sequence[int]) -> None:
        """These have been computed."""
        self.put(self.admit(keys))

    def admit(self, keys: Sequence[int]) -> list[int]:
        """Which of these are new and may come in. Their room is made and kept until they are `put`."""
        self._touch(keys)
        kept, admitted = set(keys), []
        for key in dict.fromkeys(keys):
            if key not in self._blocks and self._make_room(key, kept):
                admitted.append(key)
                self._reserved += 1
        return admitted

    def put(self, admitted: Sequence[int]) -> None:
        """They are there; those that somebody else brought meanwhile need no room of their own."""
        self._reserved -= len(admitted)
        for key in reversed(admitted):
            if key not in self._blocks:
                self._blocks[key] = None
                self._tell(key, stored=True)

    def changes(self, follower: int) -> tuple[Keys, Keys]:
        """Keys stored and removed since this follower's last call, on balance."""
        told, self._changes[follower] = self._changes[follower], {}
        stored = [key for key, is_stored in told.items() if is_stored]
        removed = [key for key, is_stored in told.items() if not is_stored]
        return np.array(stored, np.uint64), np.array(removed, np.uint64)

    def _make_room(self, newcomer: int, kept: set[int]) -> bool:
        """Whether it may come in."""
        if len(self._blocks) + self._reserved < self.slots:
            return True
        victim = next(iter(self._blocks), None)
        if victim is None or victim in kept:  # those kept are the youngest: there are no others
            return False
        if not self._admission.admits(_digest(newcomer), _digest(victim)):
            self.refused += 1
            return False
        del self._blocks[victim]
        self.evicted += 1
        self._tell(victim, stored=False)
        return True

    def _touch(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def _tell(self, key: int, *, stored: bool) -> None:
        for changes in self._changes:
            changes[key] = stored


class SimulatedHosts:
    """The arena of each host, and the ways between hosts."""

    def __init__(self, shape: PoolShape, replicas: int) -> None:
        self.shape = shape
        hosts = shape.host_of(replicas - 1) + 1
        self._numbers = {shape.share(host).key: host for host in range(hosts)}
        self.arenas = [
            SimulatedArena(shape.slots, shape.admission, shape.host_replicas) for _ in range(hosts)
        ]
        self.pulls = self.pulled_bytes = 0
        self._sends_until, self._receives_until = [0.0] * hosts, [0.0] * hosts

    def host_of(self, key: str) -> int:
        """The host whose arena has this key."""
        return self._numbers[key]

    def arena_of(self, replica: int) -> SimulatedArena:
        return self.arenas[self.shape.host_of(replica)]

    def changes(self, replica: int) -> tuple[Keys, Keys]:
        """Of its arena, since its last call."""
        return self.arena_of(replica).changes(replica % self.shape.host_replicas)

    def pull(self, source: int, target: int, keys: Sequence[int], now: float) -> float:
        """Blocks set out from one host to the other; when the last of them arrives."""
        begin = max(now, self._sends_until[source], self._receives_until[target])
        over = begin + self.shape.pull_s(len(keys))
        self._sends_until[source] = self._receives_until[target] = over
        self.pulls += 1
        self.pulled_bytes += len(keys) * self.shape.block_bytes
        return over


def _digest(key: int) -> bytes:
    """32 bytes, as the engine's keys."""
    return hashlib.blake2b(key.to_bytes(8, "little"), digest_size=32).digest()
