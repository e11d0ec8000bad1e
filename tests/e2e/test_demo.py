"""`kvorum demo --once` does what the README says, and cleans up."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import KVORUM, ClusterSlot

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_the_demo_streams_prompts_and_leaves_nothing(slot: ClusterSlot, tmp_path: Path) -> None:
    slot.clear()
    environ = dict(os.environ) | {
        "KVORUM_STATE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "HF_HUB_OFFLINE": "1",
    }
    command = [*KVORUM, "demo", "--once"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "TTFT" in done.stdout
    assert "replica-0" in done.stdout
    assert "replica-1" in done.stdout
    assert not list(tmp_path.glob("*.json")), "the demo's state file is still there"
