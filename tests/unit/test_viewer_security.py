"""The running viewer: who gets in, and what its answers allow a browser."""

import asyncio
import hashlib
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from helpers_viewer import PROTOBUF, an_export, running
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

KEY = "sk-secret-key"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


async def raw(http: httpx.AsyncClient, head: str) -> str:
    """The answer to a request that no decent client would send."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    writer.write(f"{head}Connection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer.decode()


async def test_without_keys_everybody_on_this_machine_gets_in_and_no_page_of_another_name(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as it:
        for host, status in {
            "localhost:4320": 200, "127.0.0.1": 200, "LOCALHOST": 200, "[::1]:4320": 200, "evil.com": 421,
            "127.0.0.1.evil.com": 421, "localhost.evil.com:4320": 421, "evil.com:127.0.0.1": 421,
            "[::2]": 421, "": 421,
        }.items():  # fmt: skip
            assert (await it.http.get("/api/requests", headers={"host": host})).status_code == status, host
        assert (await it.http.get("/healthz", headers={"host": "evil.com"})).status_code == 200
        evil = {"host": "evil.com", **PROTOBUF}
        body = an_export().SerializeToString()
        assert (await it.http.post("/v1/traces", content=body, headers=evil)).status_code == 421
        assert it.store.services() == []


PATHS = (
    "/", "/app.js", "/metrics", "/api/requests", "/api/requests/ab", "/api/fleet", "/api/services",
    "/api/traces", "/jaeger/api/services", "/nowhere", "//", "/healthz/", "/HEALTHZ",
    "/healthz/../api/requests",
)  # fmt: skip


async def test_with_keys_every_path_but_health_wants_one(tmp_path: Path) -> None:
    async with running(tmp_path, key_digests=(DIGEST,)) as it:
        assert (await it.http.get("/healthz")).json() == {"status": "ok"}
        for path in PATHS:
            answer = await it.http.get(path)
            assert (answer.status_code, "error" in answer.json()) == (401, True), path
        for bad in (
            f"Bearer {KEY}x",
            "Bearer",
            KEY,
            f"Basic {KEY}",
            "Bearer \u00e9",
            f"Bearer {DIGEST}",
            "Bearer " + "x" * 9999,
        ):
            answer = await it.http.get("/api/requests", headers={"authorization": bad.encode()})
            assert answer.status_code == 401, bad
        for good in (f"Bearer {KEY}", f"bearer  {KEY}"):
            assert (await it.http.get("/api/requests", headers={"authorization": good})).status_code == 200
        body = an_export().SerializeToString()
        for path in ("/v1/traces", "/v1/metrics", f"/v1/traces?key={KEY}"):
            assert (await it.http.post(path, content=body, headers=PROTOBUF)).status_code == 401
        for cookie in (
            "kvorum_viewer=",
            f"kvorum_viewer={KEY}",
            f"kvorum_viewer={DIGEST}",
            "kvorum_viewer=\xff",
            "=;,\"'\\",
        ):
            assert (await it.http.get("/", headers={"cookie": cookie.encode("latin-1")})).status_code == 401


async def test_a_key_in_the_address_becomes_a_cookie_that_does_not_hold_it(tmp_path: Path) -> None:
    async with running(tmp_path, key_digests=("0" * 64, DIGEST.upper())) as it:
        assert (await it.http.get("/?key=wrong")).status_code == 401
        welcome = await it.http.get(f"/?a=1&key={KEY}&b=%3C")
        assert (welcome.status_code, welcome.headers["location"]) == (303, "/?a=1&b=%3C")
        cookie = welcome.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert KEY not in cookie
        assert DIGEST not in cookie.lower()
        assert (await it.http.get("/api/requests")).status_code == 200, "the client sends it from now on"
        for path in ("//evil.com", "/\\evil.com", "///evil.com/%2e%2e"):
            answer = await raw(it.http, f"GET {path}?key={KEY} HTTP/1.1\r\nHost: localhost\r\n")
            location = answer.partition("\r\nlocation: ")[2].partition("\r\n")[0]
            assert location.startswith("/evil.com"), answer


async def test_otlp_over_grpc_wants_the_key_as_well(tmp_path: Path) -> None:
    async with running(tmp_path, key_digests=(DIGEST,)) as it, grpc.aio.insecure_channel(it.otlp) as channel:
        export = TraceServiceStub(channel).Export
        for metadata in ((), (("authorization", "Bearer x"),), (("authorization", KEY),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await export(an_export(), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await export(an_export(), metadata=(("authorization", f"Bearer {KEY}"),))
        assert len(it.store.trace("01" * 16)) == 1


async def test_every_answer_tells_a_browser_to_run_nothing_foreign(tmp_path: Path) -> None:
    async with running(tmp_path) as it:
        for path in (
            "/",
            "/app.js",
            "/style.css",
            "/healthz",
            "/nowhere",
            "/metrics",
            "/api/requests?slow_ms=<b>",
        ):
            headers = (await it.http.get(path)).headers
            policy = headers["content-security-policy"]
            for part in (
                "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'",
                "img-src 'self' data:", "frame-ancestors 'none'", "base-uri 'none'",
            ):  # fmt: skip
                assert part in policy.split("; ")
            assert headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in headers
        assert (await it.http.get("/")).headers["content-type"].startswith("text/html")
        assert (await it.http.get("/api/requests?slow_ms=<b>")).headers["content-type"] == "application/json"
