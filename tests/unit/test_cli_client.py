"""`generate`, `chat` and the demo against a real router in front of fake replicas."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes_cluster import Script
from fakes_launch import fake_state
from fakes_router import Stack, running_stack
from rich.console import Console

from cluster import state as states
from cluster.chat import Chat, Lines
from cluster.cli import main
from cluster.connect import Target
from cluster.demo import run_demo
from protos import common_pb2
from protos.errors import KvorumError


@pytest.fixture(autouse=True)
def _state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(states.STATE_DIR_VARIABLE, str(tmp_path / "state"))
    monkeypatch.delenv("KVORUM_API_KEY", raising=False)


@contextmanager
def served(**settings: Any) -> Iterator[Stack]:
    """A stack in a thread of its own: the commands under test bring their own event loops."""
    ready: list[Stack] = []
    started, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running_stack(**settings) as stack:
            ready.append(stack)
            started.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield ready[0]
    finally:
        done.set()
        thread.join(20)


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_text_goes_to_stdout_and_figures_to_stderr(run: Cli) -> None:
    with served(script=Script(cached_tokens=2)) as stack:
        code, out, err = run("generate", "one two three", "--max-tokens", "3", "--address", stack.address)
    assert (code, out) == (0, " t1 t2 t3\n")
    assert "r0 · 4 prompt tokens (2 cached) · 3 generated · TTFT" in err


def test_prompt_can_come_from_stdin(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one two"))
    with served() as stack:
        code, _, err = run("generate", "-", "--address", stack.address)
    assert code == 0
    assert "3 prompt tokens" in err


def test_json_has_text_usage_and_times(run: Cli) -> None:
    with served() as stack:
        code, out, _ = run(
            "generate", "one", "--n", "2", "--max-tokens", "2", "--json", "--address", stack.address
        )
    reply = json.loads(out)
    assert code == 0
    assert [choice["text"] for choice in reply["choices"]] == [" t1 t2", " t1 t2"]
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}
    assert reply["usage"]["completion_tokens"] == 4
    assert reply["ttft_s"] <= reply["total_s"]


def test_several_sequences_are_printed_apart(run: Cli) -> None:
    with served() as stack:
        _, out, _ = run("generate", "one", "--n", "2", "--max-tokens", "1", "--address", stack.address)
    assert out == "[0]  t1\n[1]  t1\n"


def test_sampling_and_structure_reach_the_replica(run: Cli, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    options = [
        "--temperature",
        "0.5",
        "--seed",
        "7",
        "--stop",
        "a",
        "--stop",
        "b",
        "--json-schema",
        f"@{schema}",
    ]
    with served() as stack:
        code, _, err = run("generate", "one", *options, "--address", stack.address)
        sampling = stack.replicas[0].seen[0].request.sampling
    assert (code, err.startswith("error")) == (0, False)
    assert (sampling.temperature, sampling.seed, list(sampling.stop)) == (0.5, 7, ["a", "b"])
    assert sampling.structured.json_schema == '{"type": "object"}'
    assert not sampling.HasField("top_p")


def test_empty_constraint_is_sent_not_dropped(run: Cli) -> None:
    with served() as stack:
        code, _, err = run("generate", "one", "--grammar", "", "--address", stack.address)
    assert code == 2
    assert "grammar" in err


@pytest.mark.parametrize("option", ["--seed", "--top-k"])
def test_number_that_fits_no_field_is_bad_input(run: Cli, option: str) -> None:
    with served() as stack:
        code, out, err = run("generate", "one", option, "9" * 20, "--address", stack.address)
    assert (code, out) == (2, "")
    assert option.removeprefix("--").replace("-", "_") in err
    assert len(err.splitlines()) == 1


def test_refused_request_is_one_line_and_exit_two(run: Cli) -> None:
    with served() as stack:
        code, out, err = run("generate", "one", "--temperature", "-1", "--address", stack.address)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "temperature" in err
    assert len(err.splitlines()) == 1


def test_broken_stream_exits_one_after_what_it_had(run: Cli) -> None:
    lost = KvorumError(grpc.StatusCode.INTERNAL, common_pb2.INTERNAL, "the engine broke")
    with served(script=Script(error_after=(2, lost))) as stack:
        code, out, err = run("generate", "one", "--max-tokens", "5", "--address", stack.address)
    assert (code, out) == (1, " t1 t2")
    assert err.startswith("error: ")


def test_unreachable_router_is_one_line_and_exit_one(run: Cli) -> None:
    code, _, err = run("generate", "one", "--address", "127.0.0.1:9")
    assert code == 1
    assert len(err.splitlines()) == 1


def test_cluster_on_this_machine_is_found_and_its_token_opens_the_router(run: Cli, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("somebody-elses-key\n")
    with served(token="fake-token", api_keys_file=keys) as stack:
        fake_state(tmp_path, router_addresses=(stack.address,))
        assert run("generate", "one")[0] == 0
        code, _, err = run("generate", "one", "--address", stack.address)
    assert code == 2
    assert "KVORUM_API_KEY" in err


def test_chat_remembers_the_talk(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nagain\n"))
    with served() as stack:
        code, out, _ = run("chat", "--system", "be brief", "--max-tokens", "2", "--address", stack.address)
        prompts = [seen.request.prompt_text for seen in stack.replicas[0].seen]
        lengths = [len(seen.request.prompt_token_ids) for seen in stack.replicas[0].seen]
    assert (code, out) == (0, " t1 t2\n t1 t2\n")
    assert len(prompts) == 2
    # system: be brief, user: hello, assistant: t1 t2, user: again, assistant:
    assert lengths == [6, 11]


def test_reset_forgets_and_system_changes() -> None:
    with served() as stack:
        chat = Chat(Target((stack.address,)), {"max_tokens": 1}, "old words")
        chat.run(Lines(["hello", "/reset", "/system new", "/nonsense", "hi", "/exit", "never sent"]))
        lengths = [len(seen.request.prompt_token_ids) for seen in stack.replicas[0].seen]
    assert lengths == [6, 5]
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


def test_failed_question_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    class Typed(Lines):
        interactive = True

    refused = KvorumError(grpc.StatusCode.FAILED_PRECONDITION, common_pb2.FEATURE_NOT_ENABLED, "not enabled")
    with served(script=Script(error_at_start=refused)) as stack:
        chat = Chat(Target((stack.address,)), {})
        chat.run(Typed(["hello"]))
    assert chat.messages == []
    assert "error: not enabled" in capsys.readouterr().err


def test_chat_without_a_terminal_fails_on_the_first_error(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    refused = KvorumError(grpc.StatusCode.FAILED_PRECONDITION, common_pb2.FEATURE_NOT_ENABLED, "not enabled")
    with served(script=Script(error_at_start=refused)) as stack:
        code, _, err = run("chat", "--address", stack.address)
    assert (code, err.strip()) == (2, "error: not enabled")


@pytest.mark.parametrize("terminal", [False, True])
def test_demo_shows_both_clients_and_every_request(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=150, force_terminal=terminal, highlight=False)
    with served(replicas=2, script=Script(cached_tokens=3)) as stack:
        exchanges = asyncio.run(run_demo(Target((stack.address,)), console))
        seen = sum(len(replica.seen) for replica in stack.replicas)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert len(exchanges) == seen == 6
    assert not any(exchange.error for exchange in exchanges)
    assert text.count("A ✓") == text.count("B ✓") == 3
    assert "t47" in text
    assert "tok/s" in text
    manual = [exchange.reply.usage.prompt_tokens for exchange in exchanges[2:]]
    assert min(manual) > 2 * exchanges[0].reply.usage.prompt_tokens


def test_demo_reports_requests_that_failed() -> None:
    console = Console(file=io.StringIO(), width=150)
    lost = KvorumError(grpc.StatusCode.INTERNAL, common_pb2.INTERNAL, "the engine broke")
    with served(script=Script(error_after=(3, lost))) as stack:
        exchanges = asyncio.run(run_demo(Target((stack.address,)), console))
    assert all("engine broke" in exchange.error or exchange.error for exchange in exchanges)
    assert isinstance(console.file, io.StringIO)
    assert "A ✗" in console.file.getvalue()
