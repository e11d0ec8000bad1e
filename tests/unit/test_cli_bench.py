"""`kvorum bench serve` as a front: what vLLM's client is told, and when it is not started at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes_launch import fake_state
from helpers_http_app import write_model

from cluster import cli_bench
from cluster import state as states
from cluster.cli import main
from cluster.failures import BadInput, RunFailed
from cluster.openai import model_files
from cluster.openai.settings import IngressSettings
from protos import admin_pb2

RUN = cli_bench._run


@pytest.fixture(autouse=True)
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The options that vLLM's client would have run with."""
    monkeypatch.setenv(states.STATE_DIR_VARIABLE, str(tmp_path / "state"))
    runs: list[list[str]] = []

    def fake_run(options: Sequence[str], key: str | None = None) -> None:
        runs.append([*options, *([f"key={key}"] if key else [])])
        if "--tokenizer" in options:
            assert Path(options[options.index("--tokenizer") + 1], "tokenizer.json").read_bytes() == b"{}"

    async def fake_fetch(settings: IngressSettings, into: Path) -> admin_pb2.ModelFiles:
        assert (settings.admin_address, settings.token) == ("127.0.0.1:9", "fake-token")
        (into / "tokenizer.json").write_bytes(b"{}")
        return admin_pb2.ModelFiles(model="my-model")

    monkeypatch.setattr(cli_bench, "_run", fake_run)
    monkeypatch.setattr(model_files, "fetch", fake_fetch)
    return runs


def _running(tmp_path: Path, **changes: object) -> None:
    fields: dict[str, object] = {
        "router_addresses": ("127.0.0.1:8",),
        "admin_address": "127.0.0.1:9",
        "http_url": "http://127.0.0.1:8000",
    }
    fake_state(tmp_path, **(fields | changes))


def test_url_model_and_tokenizer_come_from_the_running_cluster(tmp_path: Path, told: list[list[str]]) -> None:
    _running(tmp_path)
    assert main(["bench", "serve", "--num-prompts", "4", "--metadata", "a=b", "c=d"]) == 0
    (options,) = told
    tokenizer = options[5]
    assert options == [
        "--base-url", "http://127.0.0.1:8000", "--model", "my-model", "--tokenizer", tokenizer,
        "--num-prompts", "4", "--metadata", "a=b", "c=d",
    ]  # fmt: skip
    assert not Path(tokenizer).exists()


@pytest.mark.parametrize(
    "option", ["--base-url=http://10.0.0.1:80", "--base_url=http://10.0.0.1:80", "--port=81"]
)
def test_a_server_named_by_hand_is_left_to_the_client(option: str, told: list[list[str]]) -> None:
    assert main(["bench", "serve", option]) == 0
    assert told == [[option]]


def test_without_a_cluster_or_an_http_face_nothing_is_started(
    tmp_path: Path, told: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve"]) == 2
    assert "no cluster named 'kvorum' is up" in capsys.readouterr().err
    _running(tmp_path, http_url="")
    assert main(["bench", "serve"]) == 2
    assert "--no-http" in capsys.readouterr().err
    assert told == []


def test_a_controller_that_hands_no_files_out_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fake_fetch(settings: IngressSettings, into: Path) -> admin_pb2.ModelFiles:
        raise model_files.ModelFilesError("the controller is away")

    monkeypatch.setattr(model_files, "fetch", fake_fetch)
    _running(tmp_path)
    assert main(["bench", "serve"]) == 1
    assert capsys.readouterr().err == (
        "error: cannot get the tokenizer of cluster 'kvorum': the controller is away\n"
    )


def test_the_clients_own_options_can_be_listed(told: list[list[str]]) -> None:
    assert main(["bench", "serve", "--client-help"]) == 0
    assert told == [["--help=all"]]


def test_options_that_vllms_client_does_not_know_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(BadInput, match="unrecognized arguments: --nonsense"):
        RUN(["--nonsense"])


def test_vllms_client_lists_its_options_though_its_own_command_does_not_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    RUN(["--help=all"])
    assert "--max-concurrency" in capsys.readouterr().out


def test_a_benchmark_of_which_nothing_was_answered_is_no_success(tmp_path: Path) -> None:
    write_model(tmp_path)  # the client makes its prompts with the tokenizer
    nowhere = ["--base-url", "http://127.0.0.1:9", "--model", "m", "--tokenizer", str(tmp_path)]
    random = ["--dataset-name", "random", "--random-input-len", "8", "--num-prompts", "1", "--disable-tqdm"]
    with pytest.raises(RunFailed, match="1 of 1"):
        RUN([*nowhere, *random])
