"""Writing the zero-padded checkpoint that a `PaddingPlan` describes, tensor by tensor."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from workers.checkpoint_cache import MANIFEST, CheckpointError, Progress
from workers.padding import PaddingPlan

if TYPE_CHECKING:
    import torch

_SHARD_BYTES = 2 * 1024**3
_COPIED_SUFFIXES = {".json", ".txt", ".jinja", ".model"}
_NOT_COPIED = {"config.json", "params.json", MANIFEST}
_NORMS = {"norm", "input_layernorm", "post_attention_layernorm"}


def pad_checkpoint(source: Path, target: Path, plan: PaddingPlan, progress: Progress) -> None:
    """Write the padded checkpoint into the empty folder `target`; `source` is only read.

    Holds at most one output shard (2 GiB) in memory.

    Raises:
        CheckpointError: the weights are not safetensors, or not what config.json says.
    """
    config = json.loads((source / "config.json").read_text())
    files = weight_files(source)
    for path in source.iterdir():
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and path.name not in _NOT_COPIED:
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)
        elif path.name == "additional_chat_templates":
            shutil.copytree(path, target / path.name)
    (target / "config.json").write_text(json.dumps(plan.padded_config(config), indent=2))
    _write_shards(target, _padded_tensors(files, plan, progress))


def weight_files(source: Path) -> list[Path]:
    """The safetensors files that hold the model, in the order of their names.

    Raises:
        CheckpointError: there are none.
    """
    index = source / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [source / name for name in names]
    files = [
        path for path in sorted(source.glob("*.safetensors")) if not path.name.startswith("consolidated")
    ]
    if not files:
        raise CheckpointError(f"cannot pad {source}: save its weights as safetensors first")
    return files


def _padded_tensors(
    files: list[Path], plan: PaddingPlan, progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    import safetensors  # noqa: PLC0415 (torch comes with it; only a preparing process pays)

    for number, path in enumerate(files):
        with safetensors.safe_open(path, framework="pt") as shard:
            names = list(shard.keys())
            for position, name in enumerate(names):
                tensor = _padded(name, shard.get_tensor(name), plan)
                yield name, tensor
                if plan.written_as_llama and name.endswith("self_attn.o_proj.weight"):
                    yield name.removesuffix("weight") + "bias", tensor.new_zeros(tensor.shape[0])
                progress("padding", (number + (position + 1) / len(names)) / len(files))


def _padded(name: str, tensor: torch.Tensor, plan: PaddingPlan) -> torch.Tensor:
    module, _, kind = name.rpartition(".")
    leaf = module.rpartition(".")[2]
    group, padded_group = plan.heads // plan.kv_heads, plan.padded_heads // plan.padded_kv_heads
    query = (plan.kv_heads, group, plan.head_dim), (plan.padded_kv_heads, padded_group, plan.head_dim)
    key_value = (plan.kv_heads, plan.head_dim), (plan.padded_kv_heads, plan.head_dim)
    mlp = (plan.intermediate,), (plan.padded_intermediate,)
    rows = {"q_proj": query, "k_proj": key_value, "v_proj": key_value, "gate_proj": mlp, "up_proj": mlp}
    columns = {"o_proj": query, "down_proj": mlp}
    if leaf in rows and kind in ("weight", "bias"):
        return _grown(name, tensor, 0, *rows[leaf])
    if leaf in columns and kind == "weight":
        return _grown(name, tensor, 1, *columns[leaf])
    per_head_norm = leaf in ("q_norm", "k_norm") and tensor.shape == (plan.head_dim,)
    unchanged = per_head_norm or leaf in _NORMS or leaf in ("embed_tokens", "lm_head") or leaf in columns
    if unchanged or name.endswith("rotary_emb.inv_freq"):
        return tensor
    shape = tuple(tensor.shape)
    raise CheckpointError(f"cannot pad {plan.architecture}: unexpected tensor {name} of shape {shape}")


def _grown(
    name: str, tensor: torch.Tensor, dim: int, old: tuple[int, ...], new: tuple[int, ...]
) -> torch.Tensor:
    """Zeros of the new size along `dim`, seen as the axes `new`, with `tensor` in their first corner."""
    if tensor.shape[dim] != math.prod(old):
        raise CheckpointError(
            f"cannot pad: {name} has {tensor.shape[dim]} along axis {dim}, config.json says {math.prod(old)}"
        )
    if old == new:
        return tensor
    before, after = tensor.shape[:dim], tensor.shape[dim + 1 :]
    grown = tensor.new_zeros((*before, *new, *after))
    corner = (*(slice(None) for _ in before), *(slice(0, size) for size in old))
    grown[corner] = tensor.reshape((*before, *old, *after))
    return grown.reshape((*before, math.prod(new), *after))


def _write_shards(target: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415 (as above)

    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = held_bytes = 0

    def flush() -> None:
        nonlocal held, held_bytes
        save_file(held, target / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(held))
        held, held_bytes = {}, 0

    for name, tensor in tensors:
        held[name] = tensor.contiguous()
        held_bytes += tensor.nbytes
        total += tensor.nbytes
        if held_bytes >= _SHARD_BYTES:
            flush()
    if held:
        flush()
    weight_map = {}
    for number, names in enumerate(shards):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (target / f"part-{number}").rename(target / file)
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
