"""The HTTP face around a launch: waited for, watched, shown, and given to Ray Serve."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes_launch import fake_controller, fake_state, fake_status
from ray.serve.schema import ServeDeploySchema
from rich.console import Console

from cluster import ingress, serving
from cluster import state as states
from cluster.cli_cluster import curl_example
from cluster.config import load
from cluster.display import Steps, http_line, status_json
from cluster.failures import RunFailed
from cluster.http_probe import Readiness
from cluster.ingress import TOKEN_VARIABLE, app, application
from cluster.interrupts import Interrupts
from cluster.launcher import Launch
from cluster.openai.instance import HEADER, instance_of
from cluster.openai.listener import Listen
from cluster.openai.settings import IngressSettings
from protos import admin_pb2

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "fake-token"
"""That of `fake_state`."""
FREE = {"router": {"port": 0}, "http": {"port": 0}}


class FakeFace:
    """Answers /readyz with what the test says."""

    def __init__(self) -> None:
        self.status, self.phase = 503, "loading vLLM's server"
        self.token = TOKEN
        self.asked = 0


@contextmanager
def fake_face() -> Iterator[tuple[FakeFace, str]]:
    face = FakeFace()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            face.asked += 1
            self.send_response(face.status)
            self.send_header(HEADER, instance_of(face.token))
            self.end_headers()
            self.wfile.write(json.dumps({"phase": face.phase}).encode())

        def log_message(self, *_arguments: Any) -> None:
            """Nothing on stderr."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield face, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def _state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(states.STATE_DIR_VARIABLE, str(tmp_path / "state"))


def settings(**changes: Any) -> IngressSettings:
    fields: dict[str, Any] = {
        "cluster": "kvorum", "routers": ("127.0.0.1:50051",), "admin_address": "127.0.0.1:7", "token": "t",
    }  # fmt: skip
    return IngressSettings.model_validate(fields | changes)


def test_face_is_waited_for_until_it_is_ready() -> None:
    with fake_face() as (face, address):
        waiting = serving.Waiting(address, TOKEN)
        assert not waiting.look()
        face.status, face.phase = 200, "ready"
        assert waiting.until_ready(10.0)


def test_face_that_gave_up_ends_the_launch_with_its_reason() -> None:
    with fake_face() as (face, address):
        face.phase = "failed: argument --tool-call-parser: invalid choice: 'nonsense'"
        with pytest.raises(RunFailed, match=r"HTTP face at http://127.* failed: argument --tool-call-parser"):
            serving.Waiting(address, TOKEN).until_ready(10.0)


def test_face_that_never_answers_is_told_from_one_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_SILENCE_S", 0.2)
    silent = serving.Waiting("http://127.0.0.1:9", TOKEN)
    assert not silent.until_ready(30.0)
    assert silent.silent
    with fake_face() as (_face, address):
        slow = serving.Waiting(address, TOKEN)
        assert not slow.until_ready(0.5)
        assert not slow.silent
        assert slow.phase == "loading vLLM's server"


def test_face_of_another_cluster_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_SILENCE_S", 0.2)
    with fake_face() as (face, address):
        face.status, face.phase, face.token = 200, "ready", "another"
        waiting = serving.Waiting(address, TOKEN)
        assert not waiting.until_ready(30.0)
        assert waiting.silent
        assert waiting.phase == "something else answers at this address"


def test_watch_tells_of_a_face_that_is_lost_and_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.launcher._WATCH_S", 0.01)
    steps = Steps(Console(file=io.StringIO(), width=200, highlight=False))
    with fake_face() as (face, address):
        face.status, face.phase = 200, "ready"

        def script(n: int) -> admin_pb2.ClusterStatus:
            face.status, face.phase = (503, "waiting for a replica") if n in (1, 2) else (200, "ready")
            if n >= 5:
                states.remove("kvorum")
            return fake_status(admin_pb2.READY)

        with fake_controller(script) as (_controller, admin):
            state = fake_state(tmp_path, admin_address=admin, http_url=address)
            Launch(load(None, FREE), state, steps, Interrupts()).watch()
    assert isinstance(steps.console.file, io.StringIO)
    told = [line.split(" ", 1)[1] for line in steps.console.file.getvalue().splitlines()[:-1]]
    assert told == ["HTTP face waiting for a replica", "HTTP face ready again"]


def test_status_shows_where_the_face_is_and_how() -> None:
    ready = Readiness(True, "ready")
    assert http_line("http://127.0.0.1:8000", ready).plain == "http: http://127.0.0.1:8000  ready"
    assert http_line("http://h:1", Readiness(False, "")).plain == "http: http://h:1  does not answer"
    shown = json.loads(status_json(fake_status(), http=("http://h:1", ready)))
    assert shown["http"] == {"address": "http://h:1", "ready": True, "phase": "ready"}


def test_curl_example_is_one_shell_command(tmp_path: Path) -> None:
    state = fake_state(tmp_path, http_url="https://127.0.0.1:8000", model="it's", api_keys_file="/keys")
    first, second = curl_example(state)
    assert first.startswith("  curl -k https://127.0.0.1:8000/v1/chat/completions ")
    assert '-H "Authorization: Bearer $KVORUM_API_KEY"' in first
    assert first.endswith(" \\")
    assert """it'"'"'s""" in second


def test_own_server_needs_no_route_of_serve_and_no_core() -> None:
    listen = Listen(host="127.0.0.1", port=8000)
    deployment = application(settings(max_ongoing_requests=10), listen)._bound_deployment
    assert deployment.name == ingress.NAME
    assert deployment.init_args[1]["port"] == 8000
    assert deployment.max_ongoing_requests > 10
    assert deployment.ray_actor_options["num_cpus"] == 0


def test_application_is_built_from_a_serve_config_with_its_secrets_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("open-sesame\n")
    monkeypatch.setenv(TOKEN_VARIABLE, "from-the-environment")
    args = {
        "cluster": "kvorum", "routers": "a:1,b:2", "admin_address": "a:3", "api_keys_file": str(keys),
        "arguments": "--enable-auto-tool-choice --tool-call-parser=hermes",
    }  # fmt: skip
    given, listen = app(args)._bound_deployment.init_args
    known = IngressSettings.model_validate(given)
    assert (known.token, known.routers, listen) == ("from-the-environment", ("a:1", "b:2"), None)
    assert known.arguments == ("--enable-auto-tool-choice", "--tool-call-parser=hermes")
    assert len(known.api_keys) == 1
    token = tmp_path / "token"
    token.write_text("from-a-file\n")
    assert app(args | {"token_file": str(token)})._bound_deployment.init_args[0]["token"] == "from-a-file"


def test_application_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=TOKEN_VARIABLE):
        app({"cluster": "kvorum", "routers": "a:1", "admin_address": "a:2"})


@pytest.mark.parametrize("name", ["token", "api_keys"])
def test_secret_among_the_arguments_that_serve_shows_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "t")
    with pytest.raises(ValueError, match=f"{name} must not be in args.*token_file"):
        app({"cluster": "kvorum", "routers": "a:1", "admin_address": "a:2", name: "secret"})


def test_shipped_serve_config_is_one_that_serve_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "t")
    shipped = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    config = ServeDeploySchema.model_validate(shipped)
    [served] = config.applications
    assert served.import_path == "cluster.ingress:app"
    bound = app(served.args)._bound_deployment
    assert [deployment.name for deployment in served.deployments] == [bound.name]
