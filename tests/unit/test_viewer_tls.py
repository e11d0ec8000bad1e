"""The viewer's page over HTTPS: who is trusted, and what a certificate that is of no use costs."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from helpers_viewer import running
from pydantic import ValidationError
from test_certificate import a_certificate

from cluster.config import ClusterConfig
from cluster.failures import BadInput
from cluster.preflight import check_files
from cluster.viewer_client import is_alive, read_metrics
from cluster.viewer_config import ViewerConfig
from telemetry.store import SpanStore
from telemetry.viewer.server import Viewer
from telemetry.viewer.settings import ViewerSettings

KEY = "sk-secret-key"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


async def test_the_page_is_https_and_its_own_certificate_is_trusted_and_no_other(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir()
        a_certificate(folder)
    pem = {"tls_cert": mine / "cert.pem", "tls_key": mine / "key.pem"}
    async with running(tmp_path, key_digests=(DIGEST,), **pem) as it:
        url = str(it.http.base_url)
        assert url.startswith("https://127.0.0.1:")
        assert await asyncio.to_thread(is_alive, url, 5.0, ca=mine / "cert.pem")
        assert not await asyncio.to_thread(is_alive, url, 5.0, ca=other / "cert.pem")
        assert not await asyncio.to_thread(is_alive, url, 5.0, ca=tmp_path / "nowhere.pem")
        assert not await asyncio.to_thread(is_alive, url, 5.0)
        assert not await asyncio.to_thread(is_alive, url.replace("https", "http"), 5.0)
        assert await asyncio.to_thread(read_metrics, url, KEY, ca=mine / "cert.pem")
        assert await asyncio.to_thread(read_metrics, url, "wrong", ca=mine / "cert.pem") is None
        greeted = await it.http.get(f"/?key={KEY}")
        assert greeted.status_code == 303
        assert "secure" in greeted.headers["set-cookie"].lower()


async def test_without_a_certificate_the_cookie_may_go_over_http(tmp_path: Path) -> None:
    async with running(tmp_path, key_digests=(DIGEST,)) as it:
        greeted = await it.http.get(f"/?key={KEY}")
        assert "secure" not in greeted.headers["set-cookie"].lower().replace(KEY, "")


async def test_a_certificate_that_is_of_no_use_is_an_error_that_names_it(tmp_path: Path) -> None:
    a_certificate(tmp_path)
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    settings = ViewerSettings(http_port=0, tls_cert=wrong, tls_key=tmp_path / "key.pem")
    with pytest.raises(OSError, match=r"wrong\.pem"):
        await Viewer(settings, store=SpanStore(tmp_path / "traces.db")).start()


def test_certificate_and_key_go_together(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="go together"):
        ViewerConfig(tls_cert=tmp_path / "cert.pem")


def test_the_url_says_https(tmp_path: Path) -> None:
    pem = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    assert ViewerConfig(port=4320, **pem).url == "https://127.0.0.1:4320"


def test_a_certificate_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    pem = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    with pytest.raises(BadInput, match=r"viewer\.tls_cert: no such file"):
        check_files(ClusterConfig(viewer=ViewerConfig(**pem)))
    check_files(ClusterConfig(viewer=ViewerConfig(**pem, enabled=False)))
