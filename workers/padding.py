"""Zero heads that let any tensor-parallel size split a dense Llama-like checkpoint.

vLLM wants heads % TP == 0 and either KV heads % TP == 0 or TP % KV heads == 0
(`vllm/model_executor/models/llama.py`, `LlamaAttention.__init__`). A padded checkpoint has more
heads and computes the same function: an added query head meets zero columns of `o_proj`, an added
KV head is read by added query heads only. Query head i reads KV head i // (heads / KV heads), so
the padding keeps every real query head inside the group of its real KV head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.checkpoint_cache import CheckpointError

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_VOCAB_UNIT = 64  # vLLM rounds the vocabulary up to this before it splits it (DEFAULT_VOCAB_PADDING_SIZE)
_MOE_OR_MLA_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")
# Of a Qwen2 config, what a Llama config knows with the same meaning.
_SHARED_WITH_LLAMA = (
    "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "hidden_act", "hidden_size",
    "initializer_range", "max_position_embeddings", "num_hidden_layers", "pad_token_id", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype", "use_cache",
    "vocab_size",
)  # fmt: skip


@dataclass(frozen=True)
class PaddingPlan:
    """From what to what a checkpoint grows. Counts are whole-model, before any split."""

    architecture: str
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    padded_heads: int
    padded_kv_heads: int
    padded_intermediate: int

    @property
    def pads_heads(self) -> bool:
        return (self.heads, self.kv_heads) != (self.padded_heads, self.padded_kv_heads)

    @property
    def written_as_llama(self) -> bool:
        """vLLM's Qwen2 takes head_dim from hidden_size / heads, which padding breaks; its Llama with
        `attention_bias` and a zero `o_proj.bias` is the same function and reads `head_dim`."""
        return self.architecture == "Qwen2ForCausalLM" and self.pads_heads

    @property
    def tag(self) -> str:
        """Names the padded shape: plans of different TP sizes that agree share one folder."""
        return f"h{self.padded_heads}k{self.padded_kv_heads}m{self.padded_intermediate}"

    def __str__(self) -> str:
        parts = []
        if self.pads_heads:
            parts.append(f"{self.heads}/{self.kv_heads} to {self.padded_heads}/{self.padded_kv_heads} heads")
        if self.intermediate != self.padded_intermediate:
            parts.append(f"{self.intermediate} to {self.padded_intermediate} MLP columns")
        return "padded with zeros from " + " and ".join(parts)

    def padded_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of the padded checkpoint."""
        grown = {
            "num_attention_heads": self.padded_heads,
            "num_key_value_heads": self.padded_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.padded_intermediate,
        }
        if not self.written_as_llama:
            return {**config, **grown}
        kept = {key: config[key] for key in _SHARED_WITH_LLAMA if key in config}
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True}
        return {**kept, **llama, "mlp_bias": False, **grown}


def padding_plan(config: Mapping[str, Any], tp: int) -> PaddingPlan | None:
    """The smallest padding with which `tp` ranks can split the model of this config.json; None when
    none is needed (or the config does not say how many heads there are: vLLM then decides).

    Smallest: fewest attention rows per rank, then fewest KV heads.

    Raises:
        CheckpointError: the size does not fit and padding this model is not known to be exact.
    """
    heads = config.get("num_attention_heads")
    if tp < 1:
        raise CheckpointError(f"tensor_parallel_size={tp}: it must be at least 1")
    if tp == 1 or not isinstance(heads, int):
        return None
    architecture = (config.get("architectures") or ["unknown"])[0]
    kv_heads = config.get("num_key_value_heads") or heads
    dense = architecture in SUPPORTED
    intermediate = config.get("intermediate_size", 0) if dense else 0

    def fits(size: int) -> bool:
        split = heads_fit(heads, kv_heads, size) and intermediate % size == 0
        return split and (not dense or _vocabulary_fits(config, size))

    if fits(tp):
        return None
    reason, grown = _why_not_exact(config, architecture, tp), None
    if reason is None:
        # transformers' LlamaConfig refuses heads that do not divide hidden_size, head_dim or not.
        as_llama = architecture == "LlamaForCausalLM" or (
            architecture == "Qwen2ForCausalLM" and not heads_fit(heads, kv_heads, tp)
        )
        grown = smallest_heads(heads, kv_heads, tp, config["hidden_size"] if as_llama else None)
        reason = f"no larger number of heads divides hidden_size {config['hidden_size']}"
    if grown is None:
        working = ", ".join(str(size) for size in range(1, 65) if fits(size))
        raise CheckpointError(
            f"tensor_parallel_size={tp} does not divide {architecture} with {heads} heads, "
            f"{kv_heads} KV heads{f', MLP size {intermediate}' if intermediate else ''}, and it cannot be "
            f"padded: {reason}; sizes that work: {working}"
        )
    padded_heads, padded_kv_heads = grown
    return PaddingPlan(
        architecture=architecture,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(config, architecture),
        intermediate=intermediate,
        padded_heads=padded_heads,
        padded_kv_heads=padded_kv_heads,
        padded_intermediate=math.ceil(intermediate / tp) * tp,
    )


def heads_fit(heads: int, kv_heads: int, tp: int) -> bool:
    """vLLM's own rule."""
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def smallest_heads(
    heads: int, kv_heads: int, tp: int, hidden_size: int | None = None
) -> tuple[int, int] | None:
    """(heads, KV heads) after padding: more KV heads, more queries per KV head, or both. With
    `hidden_size`, the heads also divide it; None when nothing up to that size does.

    >>> smallest_heads(9, 3, 2)
    (12, 4)
    >>> smallest_heads(14, 2, 4)
    (16, 2)
    """
    group = heads // kv_heads
    candidates = []
    for padded_kv in range(kv_heads, (hidden_size or max(tp, math.ceil(kv_heads / tp) * tp)) + 1):
        if padded_kv % tp and tp % padded_kv:
            continue
        widest = hidden_size // padded_kv if hidden_size else group + tp
        for padded_group in range(group, widest + 1):
            padded = padded_kv * padded_group
            if padded % tp == 0 and (hidden_size is None or hidden_size % padded == 0):
                candidates.append((padded // tp + max(1, padded_kv // tp), padded_kv, padded))
                break
    if not candidates:
        return None
    _, padded_kv, padded_heads = min(candidates)
    return padded_heads, padded_kv


def _vocabulary_fits(config: Mapping[str, Any], tp: int) -> bool:
    rounded = math.ceil(int(config.get("vocab_size", 0)) / _VOCAB_UNIT) * _VOCAB_UNIT
    return rounded % tp == 0


def _head_dim(config: Mapping[str, Any], architecture: str) -> int:
    default = (
        128 if architecture == "Qwen3ForCausalLM" else config["hidden_size"] // config["num_attention_heads"]
    )
    return int(config.get("head_dim") or default)


def _why_not_exact(config: Mapping[str, Any], architecture: str, tp: int) -> str | None:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    reason = None
    if config.get("quantization_config") or config.get("compression_config"):
        reason = "its weights are quantized, and zeros are not exact under their scales"
    elif any(config.get(key) for key in _MOE_OR_MLA_KEYS):
        reason = "mixture-of-experts and latent-attention layers are laid out differently"
    elif architecture not in SUPPORTED:
        reason = f"zero heads are verified for {', '.join(SUPPORTED)} only"
    elif "hidden_size" not in config or "intermediate_size" not in config or "vocab_size" not in config:
        reason = "its config.json lacks hidden_size, intermediate_size or vocab_size"
    elif kv_heads is None and architecture != "LlamaForCausalLM":
        reason = "its config.json lacks num_key_value_heads"
    elif heads % (kv_heads or heads):
        reason = f"{heads} heads do not share {kv_heads} KV heads evenly"
    elif not config.get("is_causal", True):
        reason = "its attention is not causal"
    elif architecture == "Qwen2ForCausalLM" and _qwen2_special(config):
        reason = "its sliding-window or dual-chunk attention has no Llama equivalent"
    elif not _vocabulary_fits(config, tp):
        reason = f"vLLM pads the vocabulary ({config['vocab_size']}) to a multiple of {_VOCAB_UNIT} only"
    return reason


def _qwen2_special(config: Mapping[str, Any]) -> bool:
    layers = config.get("layer_types") or ()
    sliding = config.get("use_sliding_window") or any(layer != "full_attention" for layer in layers)
    return bool(sliding or config.get("dual_chunk_attention_config") or config.get("qk_norm"))
