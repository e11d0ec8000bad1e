"""What is known on this machine of a running cluster: one private JSON file per cluster name."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.failures import BadInput, RunFailed
from cluster.processes import ProcessMark
from telemetry.config import TelemetryConfig

STATE_DIR_VARIABLE = "KVORUM_STATE_DIR"
CONTROLLER_NAME = "controller"
"""Of the actor, in the cluster's Ray namespace."""


class ClusterState(BaseModel):
    """How to reach a cluster and what was started for it. Written by `up`, read by every other command."""

    model_config = ConfigDict(frozen=True)

    name: str
    id: str
    created: float = Field(default_factory=time.time)
    phase: Literal["starting", "running", "stopping"] = "starting"
    launcher: ProcessMark
    model: str = ""
    admin_address: str = ""
    router_addresses: tuple[str, ...] = ()
    http_url: str = ""
    """URL of the HTTP face, without a path; empty without one."""
    viewer_url: str = ""
    """URL of the viewer's page; empty without one."""
    viewer_ca: Path | None = None
    """The certificate that it has there, where the page is HTTPS."""
    viewer_otlp: str = ""
    """host:port where it takes OTLP over gRPC; empty without one."""
    owns_serve: bool = False
    """Ray Serve was started for this cluster and ends with it."""
    ray_address: str = ""
    owns_ray: bool = True
    ray_head: ProcessMark | None = None
    token: str = Field(repr=False)
    work_dir: Path
    span_store: Path | None = None
    kv_pool_folder: Path | None = None
    """Of the KV pool, on every host of the cluster; None without one."""
    api_keys_file: Path | None = None
    router_ca: Path | None = None

    @property
    def namespace(self) -> str:
        """The Ray namespace of every actor of this cluster, of no other cluster of that name."""
        return f"kvorum-{self.name}-{self.id}"

    @property
    def marks(self) -> list[ProcessMark]:
        """Processes whose sessions and descendants belong to the cluster."""
        return [self.ray_head] if self.ray_head else []


def state_dir() -> Path:
    """The folder of the state files, made private on first use."""
    chosen = os.environ.get(STATE_DIR_VARIABLE)
    folder = Path(chosen).expanduser() if chosen else Path(platformdirs.user_state_dir("kvorum"))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise RunFailed(
            f"cannot make the state folder {folder}: {error.strerror}; "
            f"set {STATE_DIR_VARIABLE} to a writable one"
        ) from None
    return folder


def with_span_store(telemetry: TelemetryConfig) -> TelemetryConfig:
    """One span store for all processes of this user, beside the state files unless it was put elsewhere."""
    if telemetry.store_path is not None:
        return telemetry
    return telemetry.model_copy(update={"store_path": state_dir() / "traces.db"})


def write(state: ClusterState) -> None:
    """Replace the state atomically, readable by its owner only: it holds the cluster's token."""
    folder = state_dir()
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{state.name}-")  # made with mode 0600
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(state.model_dump_json(indent=2))
    Path(temporary).replace(_file(state.name))


def read(name: str) -> ClusterState | None:
    """The state of that name; None when there is none.

    Raises:
        RunFailed: the file is not one that this version wrote.
    """
    path = _file(name)
    try:
        return ClusterState.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, UnicodeDecodeError):
        raise RunFailed(
            f"the state file {path} is unreadable; stop what it describes by hand and delete it"
        ) from None


def remove(name: str) -> None:
    """Forget the cluster; forgetting twice is fine."""
    _file(name).unlink(missing_ok=True)


def names() -> list[str]:
    """Clusters that have a state file, running or not."""
    return sorted(path.stem for path in state_dir().glob("*.json"))


def find(name: str | None) -> ClusterState:
    """The named cluster, or the only one there is.

    Raises:
        BadInput: none, or several and no name to choose by.
    """
    known = names()
    if name is None and len(known) > 1 and "kvorum" not in known:
        raise BadInput(f"several clusters are up ({', '.join(known)}): choose one with --name")
    chosen = name or ("kvorum" if "kvorum" in known or not known else known[0])
    state = read(chosen)
    if state is None:
        running = f"; running: {', '.join(known)}" if known else ""
        raise BadInput(
            f"no cluster named {chosen!r} is up on this machine{running}: start one with `kvorum up`"
        )
    return state


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Held while a cluster of that name is brought up or down, so that two commands cannot interleave.

    Raises:
        BadInput: another command holds it.
    """
    import fcntl  # noqa: PLC0415 - POSIX only; the rest of this module is not

    path = state_dir() / f"{name}.lock"
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"another kvorum command is starting or stopping {name!r}: wait for it") from None
        yield


def _file(name: str) -> Path:
    return state_dir() / f"{name}.json"
