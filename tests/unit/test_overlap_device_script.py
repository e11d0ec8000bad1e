"""The script for a GPU machine: what of it runs without one, runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.lab import device_overlap
from tests.lab.device_checks import CheckError


def test_checks_on_simulated_streams_pass_and_are_written_down(tmp_path: Path) -> None:
    only = ["--only", "wrong channels are noticed", "--only", "meter"]
    assert device_overlap.main([str(tmp_path), "--device", "cpu", *only]) == 0
    found = json.loads((tmp_path / "device_overlap.json").read_text())
    assert found["passed"]
    assert list(found["checks"]) == ["wrong channels are noticed", "meter"]
    assert found["checks"]["meter"]["exposed_ms"] > 0


def test_check_that_fails_ends_the_script_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> dict[str, object]:
        raise CheckError("sums differ")

    monkeypatch.setattr(device_overlap, "checks_on_cpu", lambda: {"a": failing, "b": dict})
    assert device_overlap.main([str(tmp_path), "--device", "cpu"]) == 1
    checks = json.loads((tmp_path / "device_overlap.json").read_text())["checks"]
    assert (checks["a"]["passed"], checks["b"]["passed"]) == (False, True)
    assert "sums differ" in checks["a"]["error"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_machine_without_a_gpu_is_told_apart_from_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert device_overlap.main([str(tmp_path)]) == device_overlap.NO_GPU
    assert "no GPU" in capsys.readouterr().out
