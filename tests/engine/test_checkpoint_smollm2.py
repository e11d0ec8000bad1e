"""Preparing the real default model: killed, raced, padded, and read back."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from workers.checkpoint import CheckpointError, PreparedModel, list_models, prepare
from workers.model_source import GgufFile, resolve

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PREPARE = """
import sys
from pathlib import Path
from workers.checkpoint import prepare
stages = []
model = prepare("smollm2", cache_dir=Path(sys.argv[1]), progress=lambda stage, _: stages.append(stage))
heavy = [name for name in ("torch", "transformers", "vllm") if name in sys.modules]
print(model.path, "converting weights" in stages, heavy)
"""


def start(cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE, str(cache)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(seen: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def killed_while_converting(cache: Path) -> Path:
    """The cache after a conversion that was killed with a partial folder on disk."""
    process = start(cache)
    wait_for(lambda: list(cache.glob("models/.partial-*")))
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    return cache


@pytest.fixture(scope="module")
def raced(killed_while_converting: Path) -> list[str]:
    """What two processes say that then prepare the model at the same time."""
    racing = [start(killed_while_converting) for _ in range(2)]
    said = [process.communicate(timeout=240)[0].strip() for process in racing]
    assert [process.returncode for process in racing] == [0, 0]
    return said


@pytest.fixture(scope="module")
def smollm2(raced: list[str], cache: Path) -> PreparedModel:
    return prepare("smollm2", cache_dir=cache)


@pytest.fixture(scope="module")
def padded(smollm2: PreparedModel, cache: Path) -> PreparedModel:
    return prepare("smollm2", 2, cache_dir=cache)


def logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308]])
    with torch.no_grad():
        result: torch.Tensor = model(ids).logits
    return result


def test_a_killed_conversion_leaves_nothing_that_counts_as_prepared(killed_while_converting: Path) -> None:
    (known,) = list_models(killed_while_converting)
    assert not known.prepared
    assert known.path is None


def test_two_processes_convert_once_and_agree(raced: list[str], cache: Path) -> None:
    paths, converted, _heavy = zip(*(line.split(" ", 2) for line in raced), strict=True)
    assert paths[0] == paths[1]
    assert sorted(converted) == ["False", "True"]
    assert list(cache.glob("models/.partial-*")) == []
    assert list_models(cache)[0].path == Path(paths[0])


def test_preparing_loads_no_model_library_into_the_caller(raced: list[str]) -> None:
    assert [line.split(" ", 2)[2] for line in raced] == ["[]", "[]"]


def test_the_folder_is_an_ordinary_bfloat16_checkpoint(smollm2: PreparedModel) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2.path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2.path)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    answer = model.generate(**asked, do_sample=False, max_new_tokens=16)
    assert "Paris" in tokenizer.decode(answer[0, asked["input_ids"].shape[1] :])


def test_spaces_before_digits_are_split_as_the_model_was_trained(smollm2: PreparedModel) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2.path)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_the_padded_model_gives_the_same_logits(smollm2: PreparedModel, padded: PreparedModel) -> None:
    assert padded.padded
    assert padded.revision == smollm2.revision
    assert padded.bundle == smollm2.bundle
    assert padded.note == "padded with zeros from 9/3 to 12/4 heads for tensor_parallel_size=2"
    original, grown = logits(smollm2.path), logits(padded.path)
    # Longer rows are summed in another order: float32 rounding over 30 layers, on logits around 20.
    torch.testing.assert_close(grown, original, atol=1e-3, rtol=0)


def test_vllm_takes_the_padded_folder_at_tp_2_and_refuses_the_plain_one(
    smollm2: PreparedModel, padded: PreparedModel
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    accepted = EngineArgs(model=str(padded.path), tensor_parallel_size=2).create_engine_config()
    assert accepted.model_config.get_head_size() == 64
    assert accepted.model_config.get_num_attention_heads(accepted.parallel_config) == 6
    assert accepted.model_config.get_num_kv_heads(accepted.parallel_config) == 2
    with pytest.raises(ValueError, match="divisible by tensor parallel size"):
        EngineArgs(model=str(smollm2.path), tensor_parallel_size=2).create_engine_config()


def test_a_truncated_gguf_is_refused_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    whole = resolve("smollm2", lambda _stage, _fraction: None)
    assert isinstance(whole, GgufFile)
    truncated = tmp_path / "half.gguf"
    truncated.write_bytes(whole.path.read_bytes()[:40_000_000])
    with pytest.raises(
        CheckpointError, match=r"cannot convert .*half\.gguf: not a whole GGUF file"
    ) as caught:
        prepare(str(truncated), cache_dir=cache)
    assert "\n" not in str(caught.value)
    assert list(cache.glob("models/*half*")) + list(cache.glob("models/.partial-*")) == []
