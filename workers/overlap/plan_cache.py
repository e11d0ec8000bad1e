"""Measured plans on disk, one JSON file for each model, size of replica, hardware and link.

A plan is only ever found by the digest of everything its times depend on, and the file repeats that in full:
one that was copied, damaged or written by a newer version is a miss with a reason, never an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import platformdirs
from pydantic import TypeAdapter, ValidationError

from workers.checkpoint_cache import CACHE_DIR_VARIABLE
from workers.overlap.cost_model import AllReduceCost, Sample
from workers.overlap.plan import Plan

FORMAT = 3
"""Of the file; raised when the meaning of any of its fields changes, or what is timed."""

FILES_KEPT = 64
LARGEST_FILE_BYTES = 1 << 20
"""A plan takes a few KB; anything larger is not one."""


@dataclass(frozen=True)
class Fingerprint:
    """Everything that a plan's times depend on."""

    model: str
    revision: str
    tensor_parallel_size: int
    dtype: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: str
    experts: str
    compiled: bool
    device: str
    """CPU model or GPU name."""
    cores: int
    """Compute cores of a shard; 0 on a GPU."""
    link: str
    """Which hosts the ranks are on, in an order that does not depend on who asks."""
    collective: str
    max_tokens: int
    """Of one engine step."""
    torch: str
    vllm: str

    def digest(self) -> str:
        """32 hex digits; differs between formats of the file too."""
        text = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Cached:
    """A plan for the very fingerprint asked for; its `origin` is "cached"."""

    plan: Plan
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Miss:
    reason: str
    """One line for people."""


@dataclass(frozen=True)
class _File:
    format: int
    fingerprint: Fingerprint
    plan: Plan
    samples: tuple[Sample, ...]


_FILE = TypeAdapter(_File)


def default_folder() -> Path:
    """`overlap-plans` in KVORUM_CACHE_DIR, else in the user's cache; it need not exist."""
    variable = os.environ.get(CACHE_DIR_VARIABLE)
    root = Path(variable) if variable else platformdirs.user_cache_path("kvorum")
    return Path(os.path.expanduser(root)).absolute() / "overlap-plans"  # noqa: PTH111 - never raises


def load(fingerprint: Fingerprint, folder: Path | None = None) -> Cached | Miss:
    """The plan stored for `fingerprint`, or why there is none. Never raises."""
    folder = folder or default_folder()
    path = folder / f"{fingerprint.digest()}.json"
    try:
        found = _read(path)
    except FileNotFoundError:
        return Miss(_why_none(fingerprint, folder))
    except (OSError, ValueError) as error:
        return Miss(f"the cached plan {path} cannot be used ({_short(error)}); it is measured again")
    if found.fingerprint != fingerprint:
        return Miss(
            f"the cached plan {path} is another one's: {_differences(fingerprint, found.fingerprint)}"
        )
    with suppress(OSError):
        path.touch()  # the files used last are kept
    return Cached(replace(found.plan, origin="cached"), found.samples)


def store(
    fingerprint: Fingerprint, plan: Plan, samples: Iterable[Sample], folder: Path | None = None
) -> str | None:
    """Write a measured plan, whole or not at all, and drop the oldest beyond `FILES_KEPT`.

    Returns why it could not be written, None when it was. Raises ValueError unless the plan was measured: a
    forced one says nothing of this hardware.
    """
    if plan.origin != "measured":
        raise ValueError(f"only a measured plan is worth keeping, not one of origin {plan.origin!r}")
    folder = folder or default_folder()
    path = folder / f"{fingerprint.digest()}.json"
    text = _FILE.dump_json(_File(FORMAT, fingerprint, plan, tuple(samples)), indent=1)
    temporary: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=f".{path.stem}-", suffix=".json")
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
        return f"the plan could not be kept in {folder}: {_short(error)}; set {CACHE_DIR_VARIABLE}"
    _drop_oldest(folder)
    return None


def same_link(samples: Sequence[Sample], probes: Mapping[int, float], tolerance: float = 0.3) -> str | None:
    """Why cached samples no longer describe the link; None when each probe is within `tolerance` of them.

    `probes`: seconds of an AllReduce by tokens, measured now. A probe agrees when neither time is more than
    1 + `tolerance` times the other. Raises ValueError on no samples.
    """
    fitted = AllReduceCost.fit(samples)
    sampled = {sample.tokens: sample.all_reduce_s for sample in samples}
    for tokens, now in sorted(probes.items()):
        then = sampled.get(tokens, fitted.seconds(tokens))
        if not then / (1 + tolerance) <= now <= then * (1 + tolerance):
            return (
                f"an AllReduce of {tokens} tokens takes {now * 1e3:.2f} ms, and took {then * 1e3:.2f} ms "
                f"when the plan was measured: more than {tolerance:.0%} apart"
            )
    return None


def _read(path: Path) -> _File:
    """Raises OSError, or ValueError when the content is not what `store` writes."""
    with path.open("rb") as file:
        text = file.read(LARGEST_FILE_BYTES + 1)
    if len(text) > LARGEST_FILE_BYTES:
        raise ValueError(f"it is larger than {LARGEST_FILE_BYTES} bytes")
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    written_as = values.get("format") if isinstance(values, dict) else None
    if written_as != FORMAT:
        raise ValueError(f"it has format {written_as!r}, and this version reads {FORMAT}")
    return _FILE.validate_json(text, strict=True)


def _why_none(fingerprint: Fingerprint, folder: Path) -> str:
    """Names the nearest plan of the same model, so that people see what has changed."""
    others = []
    for path in _files(folder)[:FILES_KEPT]:
        with suppress(OSError, ValueError):
            others.append(_read(path).fingerprint)
    same_model = [other for other in others if other.model == fingerprint.model]
    if not same_model:
        return f"no plan was measured yet for {fingerprint.model}"
    nearest = min(same_model, key=lambda other: len(_different(fingerprint, other)))
    return f"the nearest cached plan differs: {_differences(fingerprint, nearest)}"


def _different(wanted: Fingerprint, other: Fingerprint) -> list[str]:
    return [f.name for f in fields(Fingerprint) if getattr(wanted, f.name) != getattr(other, f.name)]


def _differences(wanted: Fingerprint, other: Fingerprint) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {getattr(other, name)!r}, not {getattr(wanted, name)!r}"
        for name in _different(wanted, other)
    )


def _files(folder: Path) -> list[Path]:
    """Plans, and what killed writers left behind, the newest first."""
    dated: list[tuple[float, Path]] = []
    with suppress(OSError):
        for path in folder.glob("*.json"):
            with suppress(OSError):  # another process may have dropped it
                dated.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(dated, reverse=True)]


def _drop_oldest(folder: Path) -> None:
    for path in _files(folder)[FILES_KEPT:]:
        with suppress(OSError):
            path.unlink()


def _short(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return (str(error) or type(error).__name__).splitlines()[0]
