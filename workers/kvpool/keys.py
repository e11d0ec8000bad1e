"""Which blocks are interchangeable: keys, and the namespace in which equal ones mean equal bytes. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from workers.kvpool.layout import KEY_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.kv_offload.config import OffloadingConfig

_GROUP_BYTES: Final = 4
_ONE_GROUP: Final = bytes(_GROUP_BYTES)
_ADAPTER_SCHEME: Final = "name, path"
"""Of an adapter, in the hashes of its blocks (vLLM's `_gen_lora_extra_hash_keys`)."""


def arena_keys(offload_keys: Iterable[OffloadKey]) -> list[bytes]:
    """The arena's names of blocks: vLLM's SHA-256 of all that is before and in a block, its salt and adapter.

    An OffloadKey is that hash and the number of a KV group; models with a single group are served (`spec`).
    Raises ValueError for any other key.
    """
    keys = list(offload_keys)
    if any(len(key) != KEY_BYTES + _GROUP_BYTES or key[KEY_BYTES:] != _ONE_GROUP for key in keys):
        raise ValueError("keys of the pool are SHA-256 hashes of blocks of KV group 0")
    return [key[:KEY_BYTES] for key in keys]


@dataclass(frozen=True)
class Build:
    """What this engine is, beside its settings."""

    vllm: str
    torch: str
    kernels: str
    """Device, and instruction set of its attention: it decides in which order a block holds its numbers."""
    hash_seed: str
    """That vLLM begins every prompt's chain of hashes with."""


def namespace(
    config: VllmConfig, kv: OffloadingConfig, revision: str, adapters: str, build: Build
) -> dict[str, str | int]:
    """All that changes what bytes a block has, or which hash; JSON-able, at most a page as JSON.

    How the numbers were rounded is not part of it: that differs by batch, chunking and compilation between
    any two steps of one engine, too.

    Args:
        revision: digest of the weights (`PreparedModel.revision`).
        adapters: digest of the adapters' weights, by name (`pool_config.digest_of_adapters`).
    """
    model, cache, parallel = config.model_config, config.cache_config, kv.parallel
    return {
        "revision": revision,
        "model_config": digest_of_config(model.hf_config.to_dict()),
        "max_model_len": int(model.max_model_len),  # some rotary embeddings scale with it
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or ""),
        "kv_dtype": kv.model.dtype,
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_layout": str(kv.kv_cache_layout),
        "kernels": build.kernels,
        "block_tokens": kv.groups[0].tokens_per_block,
        "hash_tokens": kv.cache.tokens_per_hash,
        "tensor_parallel_size": parallel.tp_size,
        "pipeline_parallel_size": parallel.pp_size,
        "prefill_context_parallel_size": parallel.pcp_size,
        "decode_context_parallel_size": parallel.dcp_size,
        "hash": str(cache.prefix_caching_hash_algo),
        "hash_seed": hashlib.sha256(build.hash_seed.encode()).hexdigest()[:16],
        "adapter_scheme": _ADAPTER_SCHEME,
        "adapters": adapters,
        "vllm": build.vllm,
        "torch": build.torch,
    }


def digest_of_config(config: dict[str, Any]) -> str:
    """16 hex digits of a Hugging Face configuration, overrides included, wherever its folder is."""
    told = {
        key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]
