"""On CPUs that emulate bfloat16, `auto` is float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from workers.cpu_dtype import auto_dtype, resolve_dtype


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    return tmp_path


@pytest.mark.parametrize(
    ("machine", "capability", "dtype"),
    [
        ("x86_64", "AVX2", "float32"),
        ("AMD64", "DEFAULT", "float32"),
        ("x86_64", "AVX512", "auto"),
        ("aarch64", "DEFAULT", "auto"),
        ("aarch64", "SVE256", "auto"),
    ],
)
def test_the_instruction_set_decides(machine: str, capability: str, dtype: str) -> None:
    assert auto_dtype(machine, capability, quantized=False) == dtype
    assert auto_dtype(machine, capability, quantized=True) == "auto"


def _on_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


def test_auto_on_such_a_cpu_is_float32(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _on_avx2(monkeypatch)
    assert resolve_dtype("auto", "cpu", checkpoint, {}) == "float32"


@pytest.mark.parametrize(
    ("configured", "device", "engine_args"),
    [
        ("bfloat16", "cpu", {}),
        ("auto", "cuda", {}),
        ("auto", "cpu", {"quantization": "awq"}),
    ],
)
def test_what_was_asked_for_stays(
    configured: str,
    device: str,
    engine_args: dict[str, Any],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _on_avx2(monkeypatch)
    assert resolve_dtype(configured, device, checkpoint, engine_args) == configured


@pytest.mark.parametrize("config", ['{"quantization_config": {}}', "[]", "{", None])
def test_a_checkpoint_that_is_quantized_or_says_nothing_stays_as_it_is(
    config: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_avx2(monkeypatch)
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert resolve_dtype("auto", "cpu", tmp_path, {}) == "auto"
