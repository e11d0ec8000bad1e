"""The small files of a checkpoint: configuration, tokenizer, templates, code of its own. Never weights."""

from __future__ import annotations

import zlib
from pathlib import Path

import grpc

from protos import common_pb2
from protos.channels import MAX_MESSAGE_BYTES
from protos.errors import KvorumError

_KINDS = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
_NOT_NEEDED = (".index.json", "kvorum.json")
"""Which weights are in which file, and where we had the checkpoint from."""
_LEVEL = 1  # tokenizers shrink to a fifth at any level
_ENVELOPE_BYTES = 64 * 1024


def read_small_files(folder: Path) -> dict[str, bytes]:
    """Contents, compressed with zlib, by path inside `folder`, with `/` between its parts; no hidden ones.

    Raises:
        KvorumError: the folder cannot be read, or the files are more than one message carries.
    """
    try:
        found = {
            path.relative_to(folder).as_posix(): zlib.compress(path.read_bytes(), _LEVEL)
            for path in _walk(folder)
            if path.suffix in _KINDS and not path.name.endswith(_NOT_NEEDED)
        }
    except OSError as error:
        raise _failed(f"cannot read the checkpoint in {folder}: {error.strerror or error}") from None
    size = sum(len(name) + len(content) for name, content in found.items())
    if size > MAX_MESSAGE_BYTES - _ENVELOPE_BYTES:
        raise _failed(
            f"configuration and tokenizer in {folder} are {size / 2**20:.1f} MiB compressed, "
            f"more than the {MAX_MESSAGE_BYTES / 2**20:.0f} MiB of one message"
        )
    return found


def _walk(folder: Path) -> list[Path]:
    files: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if not entry.name.startswith("."):
            files.extend(_walk(entry) if entry.is_dir() else [entry])
    return files


def _failed(message: str) -> KvorumError:
    return KvorumError(grpc.StatusCode.INTERNAL, common_pb2.INTERNAL, message)
