"""The soak's model: SmolLM2 with some of its layers, as thousands of float32 answers shall take minutes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

from tests.bench.report import ROOT
from workers.checkpoint import prepare

WHOLE: Final = 30
"""Layers of SmolLM2."""
BLOCK_TOKENS: Final = 32
_KV_HEADS, _HEAD, _FLOAT32 = 3, 64, 4
_PER_LAYER = "model.layers."


def block_bytes(layers: int) -> int:
    """Of a block of KV cache, in float32."""
    return BLOCK_TOKENS * layers * 2 * _KV_HEADS * _HEAD * _FLOAT32


def shortened(layers: int) -> str:
    """What `kvorum up` takes for SmolLM2 with so many of its layers, evenly chosen; made the first time."""
    if layers == WHOLE:
        return "smollm2"
    folder = ROOT / "bench-results" / f"smollm2-{layers}-layers"
    if not folder.joinpath("config.json").exists():
        _make(prepare("smollm2").path, folder, layers)
    return str(folder)


def _make(whole: Path, folder: Path, layers: int) -> None:
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    kept = {round(each * (WHOLE - 1) / max(1, layers - 1)): each for each in range(layers)}
    weights = {}
    for name, weight in load_file(whole / "model.safetensors").items():
        if not name.startswith(_PER_LAYER):
            weights[name] = weight
            continue
        number, rest = name.removeprefix(_PER_LAYER).split(".", 1)
        if int(number) in kept:
            weights[f"{_PER_LAYER}{kept[int(number)]}.{rest}"] = weight
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(whole / name, folder / name)
    config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": layers}
    folder.joinpath("config.json").write_text(json.dumps(config))  # last: with it, the folder is whole
