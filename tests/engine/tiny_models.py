"""Checkpoints of random weights, small enough for an engine step of milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
CONTEXT = 1024

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),  # of row-parallel linears too
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3moe": (
        "Qwen3Moe",
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}
"""By our name: transformers' name, and what its configuration needs beside the shape."""

_SPREAD = 0.15
"""Of the weights: wide enough for different prompts to be answered differently."""


def build(family: str, folder: Path) -> Path:
    """A float32 checkpoint of `family`, whose two key/value heads let it run at TP=2; no tokenizer."""
    import torch
    import transformers

    name, more = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**_SHAPE, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            # Norms and biases too: at 1 and 0 they would hide a part that was left out.
            centre = 1.0 if weights.dim() == 1 and bool((weights == 1).all()) else 0.0
            weights.normal_(centre, _SPREAD, generator=generator)
    model.save_pretrained(folder)
    return folder
