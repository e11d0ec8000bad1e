"""Settings of the HTTP face: their flags, and what is refused before anything starts."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from cluster.config import ClusterConfig, load
from cluster.failures import BadInput, ConfigError
from cluster.flags import config_flags, overrides
from cluster.openai.settings import IngressSettings
from cluster.preflight import check_files, check_http, check_ports
from cluster.serving import address_of, settings_of


@click.command()
@config_flags()
@click.pass_obj
def fake_command(into: dict[str, Any], **flags: Any) -> None:
    into.update(overrides(flags))


def given(*arguments: str) -> dict[str, Any]:
    into: dict[str, Any] = {}
    done = CliRunner().invoke(fake_command, list(arguments), obj=into)
    assert done.exit_code == 0, done.output
    return into


def configured(**http: Any) -> ClusterConfig:
    return load(None, {"router": {"port": 0}, "http": {"port": 0} | http})


def settings(config: ClusterConfig, router: str = "127.0.0.1:50051") -> IngressSettings:
    return settings_of(
        config, token="secret", admin_address="127.0.0.1:7", router_address=router, front_cores=(3,)
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_http_is_on_unless_somebody_says_no() -> None:
    assert ClusterConfig().http.enabled
    assert given("--no-http") == {"http": {"enabled": False}}
    assert given("--http", "--http-port", "0") == {"http": {"enabled": True, "port": 0}}


def test_flags_of_the_front_end_repeat_and_may_begin_with_dashes() -> None:
    flags = ("--http-argument=--tool-call-parser=hermes", "--http-argument", "--enable-auto-tool-choice")
    assert given(*flags) == {
        "http": {"arguments": ["--tool-call-parser=hermes", "--enable-auto-tool-choice"]}
    }


def test_router_flags_keep_their_short_names() -> None:
    assert given("--tls-cert", "/a", "--http-tls-cert", "/b") == {
        "router": {"tls_cert": Path("/a")},
        "http": {"tls_cert": Path("/b")},
    }


@pytest.mark.parametrize(
    ("http", "problem"),
    [
        ({"tls_cert": "/a"}, "tls_cert and tls_key go together"),
        ({"replicas": 2}, "set via to proxy"),
        ({"max_replicas": 3}, "set via to proxy"),
        (
            {"via": "proxy", "replicas": 3, "max_replicas": 2},
            r"max_replicas \(2\) is less than replicas \(3\)",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(http: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        configured(**http)


def test_taken_http_port_is_named_with_the_way_around(taken_port: int) -> None:
    with pytest.raises(BadInput, match=rf"port {taken_port} on .* in use.*--http-port N.*--no-http"):
        check_ports(configured(port=taken_port))


def test_taken_http_port_does_not_matter_without_http(taken_port: int) -> None:
    check_ports(configured(port=taken_port, enabled=False))


def test_one_port_for_two_faces_is_refused() -> None:
    config = load(None, {"router": {"port": 18_123}, "http": {"port": 18_123}})
    with pytest.raises(BadInput, match="--port and --http-port are both 18123"):
        check_ports(config)


def test_router_that_asks_for_client_certificates_cannot_have_an_http_face() -> None:
    tls = {"tls_cert": "/a", "tls_key": "/b", "tls_client_ca": "/c"}
    with pytest.raises(BadInput, match="--no-http"):
        check_http(load(None, {"router": tls}))
    check_http(load(None, {"router": tls, "http": {"enabled": False}}))


def test_missing_certificate_of_the_http_face_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"http\.tls_cert: no such file"):
        check_files(configured(tls_cert=tmp_path / "a", tls_key=tmp_path / "b"))


@pytest.mark.parametrize(
    ("http", "address"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8000"),
        ({"host": "::"}, "http://[::1]:8000"),
        ({"host": "10.0.0.7", "tls_cert": "/a", "tls_key": "/b"}, "https://10.0.0.7:8000"),
    ],
)
def test_address_is_one_that_a_client_here_can_use(http: dict[str, Any], address: str) -> None:
    assert address_of(configured(**http).http, 8000) == address


def test_ingress_asks_a_router_that_listens_everywhere_on_loopback() -> None:
    assert settings(configured(), "0.0.0.0:50051").routers == ("127.0.0.1:50051",)


def test_ingress_knows_keys_by_their_digests_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the router\nopen-sesame\n")
    known = settings(load(None, {"router": {"api_keys_file": keys}}))
    assert known.api_keys == tuple(hashlib.sha256(key).hexdigest() for key in (b"open-sesame", b"secret"))
    assert settings(configured()).api_keys == ()


def test_empty_file_of_keys_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# nothing yet\n")
    with pytest.raises(BadInput, match="holds no API key"):
        settings(load(None, {"router": {"api_keys_file": keys}}))


def test_settings_travel_as_json_and_hide_their_secrets() -> None:
    known = settings(configured(arguments=("--tool-call-parser=hermes",)))
    assert IngressSettings.model_validate(known.model_dump(mode="json")) == known
    assert "secret" not in repr(known)
