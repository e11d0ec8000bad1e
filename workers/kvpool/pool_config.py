"""What an engine is told about its pool, and why it may have none."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from workers.config import EngineConfig
from workers.fingerprint import digest_of
from workers.kvpool.folder import folder_of_cluster
from workers.placement import ReplicaPlacement

CONNECTOR: Final = "KvPoolConnector"
CONNECTOR_MODULE: Final = "workers.kvpool.connector"

_CLUSTER_VARIABLE: Final = "KVORUM_CLUSTER_ID"
_KEY: Final = "kvorum_pool"
_HASHES: Final = ("sha256", "sha256_cbor")
_ADAPTER_FILES: Final = ("*.safetensors", "*.bin", "*.json")


@dataclass(frozen=True)
class PoolConfig:
    """Travels to the EngineCore and to the shards in vLLM's `kv_connector_extra_config`."""

    folder: str
    budget_bytes: int
    """Of the arena, its index included."""
    admission: Literal["lru", "tinylfu"]
    revision: str
    """Digest of the weights."""
    adapters: str
    """Digest of the adapters' weights."""
    copy_cores: tuple[int, ...] = ()
    """Where blocks are copied: indices into a shard's allowed CPUs; (): on any of them."""

    def to_extra(self) -> dict[str, Any]:
        """As JSON-able values, with the names by which vLLM finds the rest of the pool."""
        return {"spec_name": "ArenaSpec", "spec_module_path": "workers.kvpool.spec", _KEY: asdict(self)}

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> PoolConfig:
        values = extra[_KEY]
        return cls(**{**values, "copy_cores": tuple(values["copy_cores"])})


def pool_config(config: EngineConfig, revision: str, placement: ReplicaPlacement | None) -> PoolConfig:
    """For an engine that can have a pool (`no_pool`).

    Raises OSError when an adapter cannot be read.
    """
    return PoolConfig(
        folder=str(pool_folder(config)),
        budget_bytes=int(config.kv_pool_gib * 2**30),
        admission=config.kv_pool_admission,
        revision=revision,
        adapters=digest_of_adapters(config.lora_modules),
        copy_cores=placement.front_cores if placement is not None else (),
    )


def pool_folder(config: EngineConfig) -> Path:
    """Where the arenas of the cluster that this process belongs to are; of a process that belongs to none,
    those of its user."""
    if cluster_id := os.environ.get(_CLUSTER_VARIABLE):
        return folder_of_cluster(config, cluster_id)
    if config.kv_pool_folder:
        return Path(config.kv_pool_folder)
    return folder_of_cluster(config, str(os.geteuid()))


def no_pool(config: EngineConfig, device: str, placement: ReplicaPlacement | None = None) -> str:
    """Why this engine shares no KV blocks with its neighbours, and what would change it; empty when it does.

    What only a loaded model can tell (the bytes of a block, several KV groups) is the EngineCore's to say: it
    then logs why, runs without a pool, and `PoolStats.slots` is 0.
    """
    if not config.kv_pool_gib:
        return "the KV pool is off (engine.kv_pool_gib)"
    needed = int(config.kv_pool_gib * 2**30)
    return unsuited(config, device, placement) or _no_space(pool_folder(config), needed)


def unsuited(config: EngineConfig, device: str, placement: ReplicaPlacement | None = None) -> str:
    """Why no engine of these settings, so placed, can have a pool on any host; empty when one can."""
    return next(_unsuited(config, device, placement), "")


def digest_of_adapters(folders: Mapping[str, str]) -> str:
    """16 hex digits of all adapters' names and files; "" without any.

    Each file counts with its name and whole content: adapters are small. An adapter without files here counts
    by what it is called instead. Raises OSError.
    """
    if not folders:
        return ""
    parts: dict[str, str | bytes] = {}
    for name, folder in folders.items():
        files = [path for pattern in _ADAPTER_FILES for path in Path(folder).glob(pattern)]
        for path in files:
            with path.open("rb") as file:
                parts[f"{name}/{path.name}"] = hashlib.file_digest(file, "sha256").digest()
        if not files:
            parts[name] = folder
    return digest_of(parts)[:16]


def _unsuited(config: EngineConfig, device: str, placement: ReplicaPlacement | None) -> Iterator[str]:
    """Each thing about the settings and the placement that a pool cannot do with."""
    nodes = {slot.node_id: slot.node_ip for slot in placement.slots} if placement is not None else {}
    algorithm = config.engine_args.get("prefix_caching_hash_algo", "sha256")
    if device != "cpu":
        yield f"no KV pool on {device.upper()} yet: blocks are copied between processes on CPU only"
    if len(nodes) > 1:
        yield (
            f"the shards are on {len(nodes)} hosts ({', '.join(sorted(nodes.values()))}) and a KV pool is "
            "the memory of one: give the replica a host that holds all of them"
        )
    if config.pipeline_parallel_size > 1:
        yield (
            "a KV pool needs all layers in one stage, and engine.pipeline_parallel_size is "
            f"{config.pipeline_parallel_size}: make it 1"
        )
    if not config.engine_args.get("enable_prefix_caching", True):
        yield "prefix caching is off (engine_args.enable_prefix_caching)"
    if algorithm not in _HASHES:
        yield (
            f"no block may be taken for another's, and {algorithm} is no cryptographic hash: make "
            f"engine_args.prefix_caching_hash_algo one of {', '.join(_HASHES)}"
        )
    if "kv_transfer_config" in config.engine_args:
        yield "engine_args.kv_transfer_config names another connector: leave it out"


def _no_space(folder: Path, needed: int) -> str:
    if any(folder.glob("*.arena")):  # made by a neighbour: another one needs no space
        return ""
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    found = os.statvfs(there)
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < needed:
        return (
            f"a KV pool of {needed / 2**30:.2f} GiB does not fit in {folder}, where {free / 2**30:.2f} GiB "
            "are free: make engine.kv_pool_gib smaller, or free or enlarge it (mount -o remount,size=…)"
        )
    return ""
