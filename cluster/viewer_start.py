"""What a launch does about the viewer: where it will listen, and whether it came up."""

from __future__ import annotations

import time
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.ports import free_port
from cluster.viewer_client import is_alive
from cluster.viewer_config import told_of_viewer

_WAIT_S = 5.0
_POLL_S = 0.5


def with_viewer(config: ClusterConfig, token: str) -> ClusterConfig:
    """The viewer's ports chosen, and every process told where it is. In the Ray that it will run in."""
    viewer = config.viewer
    if not viewer.enabled:
        return config
    ports = {name: getattr(viewer, name) or free_port(viewer.host) for name in ("port", "otlp_port")}
    viewer = viewer.model_copy(update=ports)
    telemetry = told_of_viewer(config.telemetry, viewer, token)
    return config.model_copy(update={"viewer": viewer, "telemetry": telemetry})


def answers(url: str, ca: Path | None) -> bool:
    """Within a few seconds: it started before the engines."""
    deadline = time.monotonic() + _WAIT_S
    while not is_alive(url, ca=ca):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
