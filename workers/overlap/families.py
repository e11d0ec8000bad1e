"""vLLM's decoders taken apart into the pieces that `decoder.run` puts in its own order.

Only models whose layers are exactly the classes below qualify: a subclass, a LoRA wrapper or a quantised
layer may compute something else. Whatever does not qualify runs as vLLM wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models import llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from vllm.platforms import current_platform

from workers.overlap.decoder import Heads

_DENSE: dict[type, tuple[type, tuple[type, ...]]] = {
    llama.LlamaDecoderLayer: (llama.LlamaAttention, (llama.LlamaMLP,)),
    mistral.MistralDecoderLayer: (mistral.MistralAttention, (llama.LlamaMLP, mistral.MistralMLP)),
    qwen2.Qwen2DecoderLayer: (qwen2.Qwen2Attention, (qwen2.Qwen2MLP,)),
    qwen3.Qwen3DecoderLayer: (qwen3.Qwen3Attention, (qwen2.Qwen2MLP,)),
}
"""Layer, its attention, its possible MLPs."""

_EXPERTS: dict[type, type] = {
    mixtral.MixtralDecoderLayer: mixtral.MixtralAttention,
    qwen2_moe.Qwen2MoeDecoderLayer: qwen2_moe.Qwen2MoeAttention,
    qwen3_moe.Qwen3MoeDecoderLayer: qwen3_moe.Qwen3MoeAttention,
}
"""Layers whose MLP is left whole: each chunk would read the experts' weights again."""

_NORMED_HEADS = (qwen3.Qwen3Attention, qwen3_moe.Qwen3MoeAttention)


class NotSplittable(Exception):  # noqa: N818 - a reason, not an error
    """Why a model cannot be split; one line for people."""


class SplitLayer:
    """One dense or mixture-of-experts layer; see decoder.DecoderLayer."""

    def __init__(self, layer: Any, mlp_chunked: bool) -> None:
        """Raises NotSplittable."""
        self._layer, self._attn = layer, layer.self_attn
        kind, attention = type(layer), type(layer.self_attn)
        self._mlp: Any = layer.block_sparse_moe if kind is mixtral.MixtralDecoderLayer else layer.mlp
        if mlp_chunked:
            wanted, mlps = _DENSE[kind]
            if type(self._mlp) not in mlps:
                raise NotSplittable(f"the MLP is a {type(self._mlp).__name__}")
            _check_linears(
                {"gate_up_proj": MergedColumnParallelLinear, "down_proj": RowParallelLinear}, self._mlp
            )
            self._act = _platform_forward(self._mlp.act_fn)
        else:
            wanted = _EXPERTS[kind]
        if attention is not wanted:
            raise NotSplittable(f"the attention is a {attention.__name__}, not a {wanted.__name__}")
        if getattr(layer, "ada_rms_norm_t_cond", None) is not None:
            raise NotSplittable("its MLP depends on more than the hidden states")
        if type(self._attn.attn) is not Attention:
            raise NotSplittable(f"its attention op is a {type(self._attn.attn).__name__}")
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            if type(norm) is not RMSNorm:
                raise NotSplittable(f"its norm is a {type(norm).__name__}")
        _check_linears({"qkv_proj": QKVParallelLinear, "o_proj": RowParallelLinear}, self._attn)
        self._mlp_chunked = mlp_chunked
        if not isinstance(self._attn.rotary_emb, RotaryEmbedding):
            raise NotSplittable(f"its rotary embedding is a {type(self._attn.rotary_emb).__name__}")
        self._rotate = _platform_forward(self._attn.rotary_emb)
        self._sizes = [self._attn.q_size, self._attn.kv_size, self._attn.kv_size]
        self._normed = attention in _NORMED_HEADS or getattr(self._attn, "qk_norm", False)
        self._scaled = getattr(self._attn, "do_llama_4_scaling", False)
        self.attention_size = int(self._attn.o_proj.input_size_per_partition)
        """Columns of what attention returns on this rank."""

    def qkv(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Heads, torch.Tensor]:
        """As the layer and its attention do up to the attention op."""
        norm = self._layer.input_layernorm
        if residual is None:
            residual, normed = hidden, norm(hidden)
        else:
            normed, residual = norm(hidden, residual)
        qkv, _ = self._attn.qkv_proj(normed)
        query, key, value = qkv.split(self._sizes, dim=-1)
        if self._normed:
            query, key = self._by_head(self._attn.q_norm, query), self._by_head(self._attn.k_norm, key)
        query, key = self._rotate(positions, query, key)
        if self._scaled:
            query = (query * self._attn._get_llama_4_attn_scale(positions)).to(query.dtype)
        assert residual is not None
        return (query, key, value), residual

    def attention(self, heads: Heads) -> torch.Tensor:
        attended: torch.Tensor = self._attn.attn(*heads)
        return attended

    def o_proj(self, attended: torch.Tensor) -> torch.Tensor:
        return _share(self._attn.o_proj, attended)

    def mlp(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self._layer.post_attention_layernorm(hidden, residual)
        if not self._mlp_chunked:
            return self._mlp(normed), residual
        gate_up, _ = self._mlp.gate_up_proj(normed)
        return _share(self._mlp.down_proj, self._act(gate_up)), residual

    def _by_head(self, norm: Any, rows: torch.Tensor) -> torch.Tensor:
        size = self._attn.head_dim
        normed: torch.Tensor = norm(rows.reshape(*rows.shape[:-1], rows.shape[-1] // size, size))
        return normed.view(rows.shape)


class SplitDecoder:
    """The layers of a whole model; see decoder.Decoder."""

    def __init__(self, layers: Sequence[SplitLayer], norm: Any, mlp_chunked: bool) -> None:
        self.layers, self.mlp_chunked, self._norm = layers, mlp_chunked, norm

    def norm(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._norm(hidden, residual)[0]
        return normed


def take_apart(model: Any, quantization: str | None) -> SplitDecoder:
    """The pieces of `model`, a vLLM *ForCausalLM of this rank.

    Raises:
        NotSplittable: with the reason.
    """
    if quantization:
        raise NotSplittable(
            f"quantization {quantization}: scales taken over a chunk may differ from those over the step"
        )
    inner = getattr(model, "model", None)
    layers = list(getattr(inner, "layers", ()))
    kinds = {type(layer) for layer in layers}
    if not kinds or not (kinds <= _DENSE.keys() or kinds <= _EXPERTS.keys()):
        named = ", ".join(sorted(kind.__name__ for kind in kinds)) or type(model).__name__
        raise NotSplittable(f"{named}: not one of the decoder families that are split")
    if getattr(inner, "aux_hidden_state_layers", ()):
        raise NotSplittable("speculative decoding reads hidden states between the layers")
    assert inner is not None
    if type(inner.norm) is not RMSNorm:
        raise NotSplittable(f"the final norm is a {type(inner.norm).__name__}")
    mlp_chunked = kinds <= _DENSE.keys()
    return SplitDecoder([SplitLayer(layer, mlp_chunked) for layer in layers], inner.norm, mlp_chunked)


def _share(linear: Any, rows: torch.Tensor) -> torch.Tensor:
    """A row-parallel linear without its AllReduce; the bias is added once, on rank 0."""
    bias = linear.bias if linear.tp_rank == 0 and not linear.skip_bias_add else None
    partial: torch.Tensor = linear.quant_method.apply(linear, rows, bias)
    return partial


def _check_linears(wanted: dict[str, type], owner: Any) -> None:
    for name, kind in wanted.items():
        linear = getattr(owner, name)
        found: type = type(linear)
        if found is not kind:
            raise NotSplittable(f"{name} is a {found.__name__}")
        if not isinstance(linear.quant_method, UnquantizedLinearMethod):
            raise NotSplittable(f"{name} is quantised ({type(linear.quant_method).__name__})")
        if kind is RowParallelLinear and not (linear.input_is_parallel and linear.reduce_results):
            raise NotSplittable(f"{name} is not reduced by itself")


def _platform_forward(op: Any) -> Callable[..., Any]:
    """The device's kernel of a custom op. Its own `forward` is a traced one where torch.compile is on."""
    if not isinstance(op, CustomOp):
        raise NotSplittable(f"{type(op).__name__} is no custom op")
    if current_platform.is_cpu():
        return op.forward_cpu  # type: ignore[no-any-return]
    if current_platform.is_cuda():
        return op.forward_cuda  # type: ignore[no-any-return]
    raise NotSplittable(f"the platform {current_platform.device_type} was never tried")
