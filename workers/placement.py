"""Where one replica's shards run: plain values that travel to the engine and its shards."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Collective = Literal["none", "nccl", "shm", "gloo"]

OverlapMode = Literal["auto", "off", "1", "2", "3", "4", "6", "8"]
"""`auto` measures and decides; a number of chunks is forced on every step that is long enough."""

CONFIG_KEY = "kvorum"
"""Key of vLLM's `additional_config` under which a ReplicaPlacement travels to the EngineCore."""


@dataclass(frozen=True)
class ShardSlot:
    """One rank's place: bundle of the placement group, node, and CPU cores.

    `cores` are indices into the node's allowed CPUs, empty when the shard is not pinned.
    """

    rank: int
    bundle: int
    node_id: str
    node_ip: str
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReplicaPlacement:
    """How one epoch of one replica joins the cluster's Ray and where each rank goes."""

    replica: str
    epoch: str
    namespace: str
    ray_address: str
    device: Literal["cpu", "cuda"]
    collective: Collective
    slots: tuple[ShardSlot, ...]
    start_timeout_s: float = 600.0
    front_cores: tuple[int, ...] = ()
    """Cores no shard is pinned to, for the processes around the engine; empty: wherever the OS likes."""
    overlap: OverlapMode = "auto"
    kv_agent: str = ""
    """host:port of the agent that exchanges KV blocks with other hosts, at the start; empty: none."""

    def to_config(self) -> dict[str, Any]:
        """As JSON-able values, for `additional_config`."""
        return asdict(self)

    @classmethod
    def from_config(cls, values: dict[str, Any]) -> ReplicaPlacement:
        slots = tuple(ShardSlot(**{**slot, "cores": tuple(slot["cores"])}) for slot in values["slots"])
        return cls(**{**values, "slots": slots, "front_cores": tuple(values["front_cores"])})

    def shard_name(self, rank: int) -> str:
        """Ray actor name of a rank, unique per epoch."""
        return f"{self.replica}-{self.epoch}-shard-{rank}"


@dataclass(frozen=True)
class ShardInfo:
    """What a shard says of itself; `cores` are OS CPU numbers."""

    rank: int
    pid: int
    node_id: str
    node_ip: str
    cores: tuple[int, ...]
    gpus: tuple[int, ...]
    collective: Collective


def choose_collective(device: str, slots: tuple[ShardSlot, ...], wanted: str = "auto") -> Collective:
    """What carries AllReduce between these ranks.

    CUDA uses NCCL. On CPU, shared memory is fastest but spins: it needs all ranks on one host and
    a core of its own for each; otherwise gloo, which sleeps while it waits.
    """
    if len(slots) == 1:
        return "none"
    if device == "cuda":
        return "nccl"
    if wanted in ("shm", "gloo"):
        return "shm" if wanted == "shm" else "gloo"
    one_host = len({slot.node_id for slot in slots}) == 1
    pinned = [core for slot in slots for core in slot.cores]
    own_cores = all(slot.cores for slot in slots) and len(pinned) == len(set(pinned))
    return "shm" if one_host and own_cores else "gloo"
