"""The channel over gloo sums as gloo itself does, to the last bit: two ranks, which exchange, and three."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ANSWER_S = 120.0


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_an_all_reduce(tmp_path: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "tests.unit.helpers_gloo_rank", str(tmp_path / "store")]
    started = [
        subprocess.Popen([*command, str(rank), str(ranks)], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        said = [json.loads(rank.communicate(timeout=ANSWER_S)[0].splitlines()[-1]) for rank in started]
    finally:
        for rank in started:
            rank.kill()
            rank.wait()
    for rank in said:
        assert all(rank["same"].values()), rank
        assert len(rank["same"]) == 3
        assert rank["busy"]
