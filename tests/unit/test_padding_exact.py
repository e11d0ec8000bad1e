"""Padded checkpoints compute what their originals compute: logits of tiny random models, float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from workers import padded_checkpoint
from workers.checkpoint_cache import CheckpointError
from workers.padded_checkpoint import pad_checkpoint
from workers.padding import padding_plan

SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 51,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
# Summing a padded row in another order may move the last bits of float32.
TOLERANCE = 1e-5

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(kind: str, heads: int, kv_heads: int, **more: Any) -> Path:
        torch.manual_seed(0)
        config_class = getattr(transformers, f"{kind}Config")
        config = config_class(**SHAPE, num_attention_heads=heads, num_key_value_heads=kv_heads, **more)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
        for name, parameter in model.named_parameters():
            if name.endswith(
                ("bias", "norm.weight")
            ):  # transformers starts them at 0 and 1, which hides mistakes
                torch.nn.init.normal_(parameter, std=0.5)
        folder = tmp_path / kind
        model.save_pretrained(folder)
        return folder

    return build


def logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(1, 25).reshape(2, 12) * 5 % SHAPE["vocab_size"]
    with torch.no_grad():
        return model(ids).logits


def padded(folder: Path, tp: int) -> Path:
    plan = padding_plan(json.loads((folder / "config.json").read_text()), tp)
    assert plan is not None
    target = folder.with_name(f"{folder.name}-padded-{tp}")
    target.mkdir()
    pad_checkpoint(folder, target, plan, lambda _stage, _fraction: None)
    return target


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("kind", "counts", "more"),
    [
        ("Llama", (6, 3), {}),
        ("Llama", (6, 3), {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Llama", (3, 3), {}),
        ("Mistral", (9, 3), {"head_dim": 8}),
        ("Qwen2", (6, 3), {}),
        ("Qwen2", (6, 2), {}),
        ("Qwen3", (9, 3), {"head_dim": 16}),
    ],
)
def test_padded_logits_equal_the_originals(
    make: Make, kind: str, counts: tuple[int, int], more: dict[str, Any], tp: int
) -> None:
    original = make(kind, *counts, **more)
    copy = padded(original, tp)
    config = json.loads((copy / "config.json").read_text())
    assert config["num_attention_heads"] % tp == 0
    assert config["intermediate_size"] % tp == 0
    torch.testing.assert_close(logits(copy), logits(original), atol=TOLERANCE, rtol=0)


def test_a_wrong_grouping_would_be_noticed(make: Make) -> None:
    """The control of the test above: real query heads moved to another KV head change the logits."""
    original = make("Llama", 6, 3)
    copy = padded(original, 2)
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = weights[name].roll(8, dims=0)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert not torch.allclose(logits(copy), logits(original), atol=TOLERANCE, rtol=0)


def test_the_original_is_untouched_and_its_other_files_come_along(make: Make) -> None:
    original = make("Llama", 6, 3)
    (original / "tokenizer.json").write_text("{}")
    (original / "notes.md").write_text("mine")
    before = {path.name: path.read_bytes() for path in original.iterdir()}
    copy = padded(original, 2)
    assert {path.name: path.read_bytes() for path in original.iterdir()} == before
    assert {path.name for path in copy.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_shards_in_and_out_hold_every_tensor_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    original = make("Llama", 6, 3)
    whole = logits(original)
    transformers.AutoModelForCausalLM.from_pretrained(original).save_pretrained(
        original, max_shard_size="40KB"
    )
    (original / "model.safetensors").unlink()
    monkeypatch.setattr(padded_checkpoint, "_SHARD_BYTES", 30_000)
    copy = padded(original, 2)
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert len(list(original.glob("*.safetensors"))) > 1
    torch.testing.assert_close(logits(copy), whole, atol=TOLERANCE, rtol=0)


def test_weights_that_contradict_the_config_are_refused(make: Make) -> None:
    original = make("Llama", 6, 3)
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps({**config, "head_dim": 5}))
    with pytest.raises(CheckpointError, match=r"_proj\.weight has \d+ along axis \d, config.json says"):
        padded(original, 2)


def test_a_tensor_the_padding_does_not_know_is_refused(make: Make) -> None:
    original = make("Llama", 6, 3)
    weights = load_file(original / "model.safetensors")
    weights["model.layers.0.self_attn.qkv_proj.weight"] = torch.zeros(4, 4)
    save_file(weights, original / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"unexpected tensor model\.layers\.0\.self_attn\.qkv_proj\.weight"
    ):
        padded(original, 2)


def test_weights_in_another_format_are_refused(make: Make) -> None:
    original = make("Llama", 6, 3)
    (original / "model.safetensors").rename(original / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="save its weights as safetensors first"):
        padded(original, 2)
