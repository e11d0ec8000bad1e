"""vLLM loads this in each of its processes (entry point `vllm.general_plugins`); only shards take part."""

from __future__ import annotations

import os

SHARD_VARIABLE = "KVORUM_SHARD"
"""Set in a shard's process before it loads its model. Elsewhere vLLM keeps its own models."""

_MODELS = {
    "LlamaForCausalLM": "OverlappedLlama",
    "MistralForCausalLM": "OverlappedMistral",
    "Qwen2ForCausalLM": "OverlappedQwen2",
    "Qwen3ForCausalLM": "OverlappedQwen3",
    "MixtralForCausalLM": "OverlappedMixtral",
    "Qwen2MoeForCausalLM": "OverlappedQwen2Moe",
    "Qwen3MoeForCausalLM": "OverlappedQwen3Moe",
}


def register() -> None:
    """Put our models in the place of vLLM's, by name, without importing either. Idempotent."""
    if SHARD_VARIABLE not in os.environ:
        return
    from vllm import ModelRegistry  # noqa: PLC0415 - half loaded when vLLM looks for plugins elsewhere

    for architecture, name in _MODELS.items():
        ModelRegistry.register_model(architecture, f"workers.overlap.models:{name}")
