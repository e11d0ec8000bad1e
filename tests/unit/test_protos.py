"""The generated stubs are those of the .proto files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from protos import generate


def test_stubs_are_fresh(tmp_path: Path) -> None:
    subprocess.run([sys.executable, generate.__file__, str(tmp_path)], check=True, timeout=60)
    made = sorted((tmp_path / "protos").iterdir())
    assert len(made) == 5 * 4
    stale = [
        path.name
        for path in made
        if not (here := generate.ROOT / "protos" / path.name).exists()
        or here.read_bytes() != path.read_bytes()
    ]
    assert not stale, "run `python protos/generate.py`"
