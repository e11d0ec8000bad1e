"""The viewer as a part of a cluster: its settings, its ports, what others are told of it, where it asks."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from fakes_cluster import FakeReplica
from fakes_launch import fake_controller, fake_state, fake_status
from rich.console import Console

from cluster import state as states
from cluster.cli import main
from cluster.cli_cluster import _say_what_next
from cluster.config import ClusterConfig, load
from cluster.display import Steps, status_json, viewer_line
from cluster.failures import BadInput
from cluster.openai.settings import digest
from cluster.preflight import check_ports
from cluster.viewer_actor import ViewerActor, ViewerSpec, viewer_spec
from cluster.viewer_client import is_alive, read_metrics
from cluster.viewer_config import ViewerConfig, router_tls, settings_of, told_of_viewer, viewer_key
from cluster.viewer_sources import ClusterSources
from cluster.viewer_start import with_viewer
from protos import admin_pb2, admin_pb2_grpc, replica_pb2
from protos.channels import bind, create_server
from protos.errors import KvorumError
from router.config import RouterConfig
from telemetry.config import TelemetryConfig

TOKEN = "fake-token"


@pytest.fixture(autouse=True)
def _state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(states.STATE_DIR_VARIABLE, str(tmp_path / "state"))
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)


def configured(**overrides: Any) -> ClusterConfig:
    return load(None, {"router": {"port": 0}, "http": {"port": 0}, **overrides})


# Settings


def test_chosen_ports_are_in_the_url_and_in_what_processes_are_told(tmp_path: Path) -> None:
    config = with_viewer(configured(viewer={"port": 0}), TOKEN)
    viewer, target = config.viewer, config.telemetry.viewer
    assert viewer.port
    assert viewer.otlp_port
    assert viewer.port != viewer.otlp_port
    assert viewer.url == f"http://127.0.0.1:{viewer.port}"
    assert target is not None
    assert target.address == f"127.0.0.1:{viewer.otlp_port}"


def test_without_a_viewer_nobody_is_told_of_one(tmp_path: Path) -> None:
    config = configured(viewer={"enabled": False})
    assert with_viewer(config, TOKEN) == config
    off = TelemetryConfig(enabled=False)
    assert told_of_viewer(off, ViewerConfig(port=1, otlp_port=2), TOKEN) == off


def test_a_viewer_that_listens_everywhere_is_reached_on_loopback() -> None:
    viewer = ViewerConfig(host="0.0.0.0", port=4320, otlp_port=4317)
    assert viewer.url == "http://127.0.0.1:4320"
    assert viewer.target(TOKEN).address == "127.0.0.1:4317"
    assert ViewerConfig(host="::1", port=7).url == "http://[::1]:7"


def test_the_clusters_token_itself_goes_to_no_viewer() -> None:
    target = ViewerConfig(port=1, otlp_port=2).target(TOKEN)
    assert target.token == viewer_key(TOKEN)
    assert TOKEN not in target.token


@pytest.mark.parametrize(("exporter", "kept"), [("otlp", "on"), ("none", "auto")])
def test_the_local_store_is_kept_beside_a_collector_unless_traces_are_off(
    exporter: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
    assert told_of_viewer(TelemetryConfig(), ViewerConfig(port=1, otlp_port=2), TOKEN).store == kept


def test_keys_of_the_router_open_the_viewer_and_so_does_the_clusters_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n# a comment\n")
    found = settings_of(ViewerConfig(), TelemetryConfig(), RouterConfig(api_keys_file=keys), TOKEN)
    assert found.key_digests == (digest("sk-one"), digest(viewer_key(TOKEN)))
    assert settings_of(ViewerConfig(), TelemetryConfig(), RouterConfig(), TOKEN).key_digests == ()
    keys.write_text("\n")
    with pytest.raises(BadInput, match=r"router\.api_keys_file"):
        settings_of(ViewerConfig(), TelemetryConfig(), RouterConfig(api_keys_file=keys), TOKEN)


def test_an_unreadable_certificate_of_the_router_is_named(tmp_path: Path) -> None:
    assert router_tls(RouterConfig()) is None
    broken = tmp_path / "cert.pem"
    broken.write_text("no certificate")
    with pytest.raises(BadInput, match=r"router\.tls_cert"):
        router_tls(RouterConfig(tls_cert=broken, tls_key=broken))


@pytest.mark.parametrize(("field", "flag"), [("port", "--viewer-port"), ("otlp_port", "--otlp-port")])
def test_a_taken_port_is_named_with_how_to_go_without_the_viewer(field: str, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy: dict[str, Any] = {"port": 0, field: taken.getsockname()[1]}
        with pytest.raises(BadInput, match=rf"is in use.*{flag} N.*--no-viewer"):
            check_ports(configured(viewer=busy))
        check_ports(configured(viewer=busy | {"enabled": False}))


# What people see


def test_up_ends_with_the_pages_url_and_how_to_get_in(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    _say_what_next(fake_state(tmp_path, viewer_url="http://127.0.0.1:4320"), Steps(console))
    _say_what_next(
        fake_state(tmp_path, viewer_url="http://127.0.0.1:4320", api_keys_file="/keys"), Steps(console)
    )
    lines = [line.strip() for line in console.export_text().splitlines() if "fleet" in line]
    assert lines == [
        "requests, traces and the fleet: http://127.0.0.1:4320",
        "requests, traces and the fleet: http://127.0.0.1:4320/?key=...",
    ]


def test_status_tells_whether_the_viewer_answers() -> None:
    assert "does not answer" in viewer_line("http://127.0.0.1:4320", alive=False).plain
    shown = json.loads(status_json(fake_status(), viewer=("http://127.0.0.1:4320", True)))
    assert shown["viewer"] == {"url": "http://127.0.0.1:4320", "alive": True}


class FakeViewer(BaseHTTPRequestHandler):
    """Healthy; its metrics want a key."""

    def do_GET(self) -> None:
        known = self.headers.get("authorization") == "Bearer k"
        status = 200 if self.path == "/healthz" or (known and self.path == "/metrics") else 401
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"up 1\n")

    def log_message(self, *_arguments: object) -> None:
        """Nothing."""


@contextmanager
def fake_viewer() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeViewer)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_viewer_is_asked_with_a_key_and_a_dead_one_is_no_error() -> None:
    with fake_viewer() as url:
        assert is_alive(url)
        assert read_metrics(url, "k") == "up 1\n"
        assert read_metrics(url, "wrong") is None
    assert not is_alive(url)
    assert read_metrics(url, "k") is None


# Where it asks


class SpeakingReplica(FakeReplica):
    """Has metrics, or is too slow to tell them."""

    slow = False

    async def GetMetrics(  # noqa: N802
        self, request: replica_pb2.GetMetricsRequest, context: Any
    ) -> replica_pb2.GetMetricsResponse:
        if self.slow:
            await asyncio.Event().wait()
        return replica_pb2.GetMetricsResponse(text=f"vllm:up{{}} {self.name[-1]}\n")


class FakeRouter(admin_pb2_grpc.RouterAdminServicer):
    async def GetRouterState(  # noqa: N802
        self, request: admin_pb2.GetRouterStateRequest, context: Any
    ) -> admin_pb2.RouterState:
        return admin_pb2.RouterState(policy="predicted-time", in_flight=3)


@pytest.fixture
async def router() -> AsyncIterator[str]:
    server = create_server(tokens=[TOKEN])
    admin_pb2_grpc.add_RouterAdminServicer_to_server(FakeRouter(), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def replicas() -> AsyncIterator[list[SpeakingReplica]]:
    started = [SpeakingReplica(f"replica-{number}", token=TOKEN) for number in range(2)]
    for replica in started:
        await replica.start()
    yield started
    for replica in started:
        await replica.die()


def members(router: str, *replicas: FakeReplica) -> admin_pb2.ClusterStatus:
    status = fake_status(*(admin_pb2.READY for _ in replicas))
    for shown, replica in zip(status.replicas, replicas, strict=True):
        shown.address = replica.address
    status.routers[0].address = router
    status.routers.add(name="router-1", address="127.0.0.1:9", alive=True)
    status.routers.add(name="router-2", address="127.0.0.1:8", alive=False)
    return status


async def test_the_fleet_is_the_status_with_what_each_live_router_says(router: str) -> None:
    with fake_controller(lambda _n: members(router)) as (_controller, address):
        sources = ClusterSources(address, TOKEN)
        fleet = await sources.fleet()
        await sources.close()
    assert fleet["name"] == "kvorum"
    assert fleet["routing"]["router-0"]["policy"] == "predicted-time"
    assert fleet["routing"]["router-1"]["error"].startswith("no answer")
    assert "router-2" not in fleet["routing"]
    assert json.loads(json.dumps(fleet)) == fleet


async def test_every_ready_replica_is_scraped_and_one_that_hangs_holds_up_nobody(
    router: str, replicas: list[SpeakingReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.viewer_sources._METRICS_TIMEOUT_S", 0.2)
    with fake_controller(lambda _n: members(router, *replicas)) as (_controller, address):
        sources = ClusterSources(address, TOKEN)
        assert await sources.scrape() == {"replica-0": "vllm:up{} 0\n", "replica-1": "vllm:up{} 1\n"}
        replicas[1].slow = True
        assert list(await sources.scrape()) == ["replica-0"]
        await sources.close()


async def test_without_a_controller_the_fleet_is_an_error_that_says_so() -> None:
    sources = ClusterSources("127.0.0.1:9", TOKEN)
    with pytest.raises(KvorumError):
        await sources.fleet()
    await sources.close()


async def test_channels_of_members_that_left_are_closed(router: str, replicas: list[SpeakingReplica]) -> None:
    shown = [members(router, *replicas), members(router, *replicas[:1])]
    with fake_controller(lambda n: shown[min(n, 1)]) as (_controller, address):
        sources = ClusterSources(address, TOKEN)
        await sources.scrape()
        assert replicas[1].address in sources._channels
        await sources.scrape()
        assert set(sources._channels) == {replicas[0].address}
        await sources.close()


# The actor


def a_spec(tmp_path: Path, viewer: ViewerConfig) -> ViewerSpec:
    config = configured(
        viewer=viewer.model_dump(), telemetry={"store_path": tmp_path / "traces.db", "store": "on"}
    )
    spec = viewer_spec(config, "127.0.0.1:9", (), TOKEN)
    assert spec is not None
    return spec


async def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it never came about")


async def test_the_viewer_serves_once_its_port_is_free_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.viewer_actor.os.nice", lambda _by: 0)
    monkeypatch.setattr("cluster.viewer_actor._RETRY_S", (0.05,))
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    viewer = ViewerConfig(port=taken.getsockname()[1])
    actor = ViewerActor(a_spec(tmp_path, viewer))
    await asyncio.sleep(0.2)
    assert not await asyncio.to_thread(is_alive, viewer.url, 0.2)
    taken.close()
    await eventually(lambda: is_alive(viewer.url))
    text = await asyncio.to_thread(read_metrics, viewer.url, "")  # without a controller to ask
    assert text is not None
    await actor.stop()
    assert not await asyncio.to_thread(is_alive, viewer.url)


def test_there_is_nothing_to_start_without_a_viewer() -> None:
    assert viewer_spec(configured(viewer={"enabled": False}), "127.0.0.1:9", (), TOKEN) is None


# The doctor's command


def test_doctor_tells_what_it_could_not_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_state(tmp_path, admin_address="127.0.0.1:9", viewer_url="http://127.0.0.1:9")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "the controller does not answer (UNAVAILABLE): judging by traces alone" in out
    assert "no traced requests in the last 15 minutes" in out


def test_doctor_names_a_replica_that_is_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_controller(lambda _n: fake_status(admin_pb2.READY, admin_pb2.FAILED)) as (_controller, address):
        fake_state(tmp_path, admin_address=address)
        assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [finding["cause"] for finding in shown["findings"]] == ["replica-down"]
    assert shown["summary"]["requests"] == 0
