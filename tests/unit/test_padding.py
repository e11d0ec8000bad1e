"""The padding plan: pure arithmetic over a config.json."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.checkpoint_cache import CheckpointError
from workers.padding import heads_fit, padding_plan, smallest_heads

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


def config(**changes: Any) -> dict[str, Any]:
    return {**SMOLLM2, **changes}


@pytest.mark.parametrize(("tp", "heads"), [(2, (12, 4)), (4, (12, 4)), (6, (12, 3)), (8, (16, 4))])
def test_nine_query_and_three_kv_heads_grow_to_what_the_ranks_can_split(
    tp: int, heads: tuple[int, int]
) -> None:
    plan = padding_plan(SMOLLM2, tp)
    assert plan is not None
    assert (plan.padded_heads, plan.padded_kv_heads) == heads


@pytest.mark.parametrize("tp", [1, 3])
def test_a_size_that_divides_the_heads_needs_no_padding(tp: int) -> None:
    assert padding_plan(SMOLLM2, tp) is None


def test_head_dim_is_written_out_because_hidden_over_heads_no_longer_gives_it() -> None:
    plan = padding_plan(SMOLLM2, 2)
    assert plan is not None
    padded = plan.padded_config(SMOLLM2)
    assert padded["head_dim"] == 64
    assert padded["hidden_size"] == 576
    assert (padded["num_attention_heads"], padded["num_key_value_heads"]) == (12, 4)


def test_an_mlp_that_does_not_divide_is_padded_though_the_heads_fit() -> None:
    plan = padding_plan(config(num_attention_heads=8, num_key_value_heads=4, intermediate_size=1501), 4)
    assert plan is not None
    assert not plan.pads_heads
    assert plan.padded_intermediate == 1504


def test_kv_heads_are_replicated_rather_than_padded_when_they_divide_the_ranks() -> None:
    plan = padding_plan(config(num_attention_heads=14, num_key_value_heads=2, hidden_size=896), 4)
    assert plan is not None
    assert (plan.padded_heads, plan.padded_kv_heads) == (16, 2)


def test_padded_qwen2_heads_are_written_as_llama_because_vllm_ignores_its_head_dim() -> None:
    qwen = config(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", use_sliding_window=False, sliding_window=9
    )
    plan = padding_plan(qwen, 2)
    assert plan is not None
    padded = plan.padded_config(qwen)
    assert padded["architectures"] == ["LlamaForCausalLM"]
    assert padded["attention_bias"] is True
    assert "sliding_window" not in padded


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["PhiForCausalLM"]}, "verified for LlamaForCausalLM"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "mixture-of-experts"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "latent-attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "sliding-window"),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": None}, "lacks num_key_value_heads"),
        ({"num_key_value_heads": 2}, "do not share"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_what_padding_would_not_keep_exact_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        padding_plan(config(**changes), 2)
    assert config(**changes)["architectures"][0] in str(caught.value)
    assert "sizes that work: 1" in str(caught.value)


def test_llama_heads_also_divide_the_hidden_size_as_transformers_demands() -> None:
    wide = config(num_attention_heads=40, num_key_value_heads=8, hidden_size=5120)
    plan = padding_plan(wide, 16)
    assert plan is not None
    assert (plan.padded_heads, plan.padded_kv_heads) == (64, 8)
    mistral = padding_plan({**wide, "architectures": ["MistralForCausalLM"]}, 16)
    assert mistral is not None
    assert (mistral.padded_heads, mistral.padded_kv_heads) == (48, 8)


def test_a_hidden_size_that_no_fitting_number_of_heads_divides_is_refused() -> None:
    with pytest.raises(CheckpointError, match="divides hidden_size 512"):
        padding_plan(config(num_attention_heads=8, num_key_value_heads=8, hidden_size=512), 3)


def test_a_vocabulary_that_vllm_cannot_split_is_refused_before_an_engine_starts() -> None:
    with pytest.raises(CheckpointError, match=r"vocabulary \(32000\).*sizes that work: 1$"):
        padding_plan(config(vocab_size=32000), 3)


def test_a_refusal_names_the_sizes_that_work() -> None:
    with pytest.raises(CheckpointError, match=r"sizes that work: 1, 3, 9$"):
        padding_plan(config(architectures=["PhiForCausalLM"]), 2)


def test_a_model_whose_config_names_no_heads_is_left_to_vllm() -> None:
    assert padding_plan({"architectures": ["MambaForCausalLM"]}, 2) is None


grouped = st.tuples(st.integers(1, 16), st.integers(1, 8), st.integers(1, 16))


@given(grouped)
def test_padded_heads_always_fit_and_never_shrink(shape: tuple[int, int, int]) -> None:
    kv_heads, group, tp = shape
    heads = kv_heads * group
    grown = smallest_heads(heads, kv_heads, tp)
    assert grown is not None
    padded_heads, padded_kv = grown
    assert heads_fit(padded_heads, padded_kv, tp)
    assert padded_heads % padded_kv == 0
    assert padded_kv >= kv_heads
    assert padded_heads // padded_kv >= group


@given(grouped)
def test_no_smaller_padding_fits(shape: tuple[int, int, int]) -> None:
    kv_heads, group, tp = shape

    def per_rank(padded_heads: int, padded_kv: int) -> int:
        return padded_heads // tp + max(1, padded_kv // tp)

    grown = smallest_heads(kv_heads * group, kv_heads, tp)
    assert grown is not None
    wider = itertools.product(range(kv_heads, kv_heads + 2 * tp + 1), range(group, group + tp + 1))
    fitting = [(kv * g, kv) for kv, g in wider if heads_fit(kv * g, kv, tp)]
    assert per_rank(*grown) == min(per_rank(*candidate) for candidate in fitting)


@given(grouped)
def test_heads_that_fit_are_left_alone(shape: tuple[int, int, int]) -> None:
    kv_heads, group, tp = shape
    if heads_fit(kv_heads * group, kv_heads, tp):
        assert smallest_heads(kv_heads * group, kv_heads, tp) == (kv_heads * group, kv_heads)
