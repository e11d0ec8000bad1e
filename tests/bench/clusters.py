"""Clusters for benchmarks, started as a user would and stopped by handle."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.state import ClusterState
from tests.bench.report import ROOT


@contextmanager
def running(name: str, *flags: str) -> Iterator[ClusterState]:
    """`kvorum up --detach` with these flags; `kvorum down` at the end, whatever happens.

    Without a flag about HTTP there is no HTTP face, and without one about the viewer no viewer: they would
    cost those who measure something else.
    """
    if not any(flag.startswith("--http") for flag in flags):
        flags = (*flags, "--no-http")
    if not any("viewer" in flag for flag in flags):
        flags = (*flags, "--no-viewer")
    with tempfile.TemporaryDirectory() as folder:
        environ = dict(os.environ) | {"KVORUM_STATE_DIR": folder, "HF_HUB_OFFLINE": "1"}
        kvorum = [sys.executable, "-m", "cluster.cli"]
        up = [*kvorum, "up", "--name", name, "--detach", "--port", "0", *flags]
        subprocess.run(up, env=environ, cwd=ROOT, check=True)
        try:
            yield ClusterState.model_validate_json(Path(folder, f"{name}.json").read_text())
        finally:
            subprocess.run(
                [*kvorum, "down", "--name", name, "--grace", "1"], env=environ, cwd=ROOT, check=True
            )
