"""Keys, TLS and ports, on real sockets."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster.certificate import name_in
from protos import common_pb2
from protos.channels import ClientTls, ServerTls, bearer, bind, create_server, open_channel
from protos.errors import KvorumError, from_rpc_error
from protos.tickets import TICKET_KEY


@asynccontextmanager
async def echo(tls: ServerTls | None = None, **settings: Any) -> AsyncIterator[str]:
    async def unary(request: bytes, context: Any) -> bytes:
        return request

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        yield request

    async def written(request: bytes, context: Any) -> None:
        await context.write(request)
        await context.write(request)

    server = create_server(**settings)
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
        "Written": grpc.unary_stream_rpc_method_handler(written),
        "Parsed": grpc.unary_unary_rpc_method_handler(
            unary, common_pb2.Usage.FromString, common_pb2.Usage.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Echo", handlers),))
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = bind(server, "127.0.0.1", 0, tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def calls(channel: grpc.aio.Channel) -> tuple[Any, Any]:
    return channel.unary_unary("/t.Echo/Unary"), channel.unary_stream("/t.Echo/Stream")


async def call_both(channel: grpc.aio.Channel, metadata: Any = None) -> list[bytes]:
    unary, stream = calls(channel)
    first = await unary(b"u", timeout=5, metadata=metadata)
    return [first] + [m async for m in stream(b"s", timeout=5, metadata=metadata)]


async def refusal(channel: grpc.aio.Channel, metadata: Any = None) -> list[KvorumError]:
    unary, stream = calls(channel)
    with pytest.raises(grpc.aio.AioRpcError) as first:
        await unary(b"", timeout=5, metadata=metadata)
    with pytest.raises(grpc.aio.AioRpcError) as second:
        _ = [m async for m in stream(b"", timeout=5, metadata=metadata)]
    return [from_rpc_error(first.value), from_rpc_error(second.value)]


async def test_any_of_the_accepted_tokens_opens_unary_and_streamed_calls() -> None:
    async with echo(tokens=["other", "s3cret"]) as address, open_channel(address) as channel:
        assert await call_both(channel, bearer("s3cret")) == [b"u", b"s", b"s"]
    assert bearer(None) == ()


@pytest.mark.parametrize("token", [None, "wrong", "s3cre", "s3cret2"])
async def test_call_without_a_known_token_is_unauthenticated(token: str | None) -> None:
    async with echo(tokens=["s3cret"]) as address, open_channel(address) as channel:
        for error in await refusal(channel, bearer(token)):
            assert error.code is grpc.StatusCode.UNAUTHENTICATED
            assert error.reason == common_pb2.UNAUTHENTICATED
            assert "s3cret" not in error.message


async def test_health_needs_no_token() -> None:
    async with echo(tokens=["s3cret"]) as address, open_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_server_without_tokens_admits_everyone() -> None:
    async with echo() as address, open_channel(address) as channel:
        assert await call_both(channel) == [b"u", b"s", b"s"]


class FakeVerifier:
    """Lets the ticket "good" pass, and notes the requests it was shown."""

    def __init__(self) -> None:
        self.shown: list[bytes] = []

    def __call__(self, ticket: str, request: bytes) -> None:
        self.shown.append(request)
        if ticket != "good":
            raise KvorumError(grpc.StatusCode.UNAUTHENTICATED, common_pb2.TICKET_INVALID, f"{ticket} is bad")


def with_ticket(ticket: str) -> tuple[tuple[str, str], ...]:
    return ((TICKET_KEY, ticket),)


@asynccontextmanager
async def ticketed_echo(*methods: str) -> AsyncIterator[tuple[grpc.aio.Channel, FakeVerifier]]:
    verifier = FakeVerifier()
    ticketed = {f"/t.Echo/{method}": verifier for method in methods}
    async with echo(tokens=["s3cret"], ticketed=ticketed) as address, open_channel(address) as channel:
        yield channel, verifier


async def test_a_good_ticket_opens_the_methods_that_take_one_and_is_shown_the_bytes_as_they_came() -> None:
    async with ticketed_echo("Unary", "Stream", "Written", "Parsed") as (channel, verifier):
        assert await call_both(channel, with_ticket("good")) == [b"u", b"s", b"s"]
        written = channel.unary_stream("/t.Echo/Written")(b"w", timeout=5, metadata=with_ticket("good"))
        assert [m async for m in written] == [b"w", b"w"]
        known = common_pb2.Usage(prompt_tokens=3).SerializeToString()
        twice = common_pb2.Usage(prompt_tokens=2).SerializeToString() + known  # the last one counts
        parsed = await channel.unary_unary("/t.Echo/Parsed")(twice, timeout=5, metadata=with_ticket("good"))
    assert parsed == known
    assert verifier.shown == [b"u", b"s", b"w", twice]


async def test_a_bad_ticket_is_refused_in_the_verifiers_words_before_the_method_runs() -> None:
    async with ticketed_echo("Unary", "Stream", "Written") as (channel, _):
        for error in await refusal(channel, with_ticket("torn")):
            assert (error.reason, error.message) == (common_pb2.TICKET_INVALID, "torn is bad")
        call = channel.unary_stream("/t.Echo/Written")(b"w", timeout=5, metadata=with_ticket("torn"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [m async for m in call]
        assert from_rpc_error(caught.value).reason == common_pb2.TICKET_INVALID


async def test_a_ticket_opens_no_other_method() -> None:
    async with ticketed_echo("Parsed", "Missing") as (channel, verifier):
        for error in await refusal(channel, with_ticket("good")):
            assert error.reason == common_pb2.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.Echo/Missing")(b"", timeout=5, metadata=with_ticket("good"))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert verifier.shown == []


async def test_a_known_token_needs_no_ticket_and_an_unknown_one_does_not_spoil_a_good_ticket() -> None:
    async with ticketed_echo("Unary", "Stream") as (channel, verifier):
        assert await call_both(channel, with_ticket("torn") + bearer("s3cret")) == [b"u", b"s", b"s"]
        assert verifier.shown == []
        assert await call_both(channel, bearer("wrong") + with_ticket("good")) == [b"u", b"s", b"s"]
        for error in await refusal(channel, bearer("wrong")):
            assert error.reason == common_pb2.UNAUTHENTICATED


async def test_a_cancelled_ticketed_stream_ends_its_method() -> None:
    ended = asyncio.Event()

    async def endless(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield request
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    server = create_server(tokens=["s3cret"], ticketed={"/t.Endless/Stream": FakeVerifier()})
    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(endless)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Endless", handlers),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream("/t.Endless/Stream")(b"x", timeout=10, metadata=with_ticket("good"))
            assert await call.read() == b"x"
            call.cancel()
            await asyncio.wait_for(ended.wait(), 5)
    finally:
        await server.stop(None)


async def test_port_in_use_is_an_error_that_names_it() -> None:
    async with echo() as address:
        host, port = address.split(":")
        second = create_server()
        with pytest.raises(OSError, match=f"cannot listen on {address}"):
            bind(second, host, int(port))
        await second.stop(None)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and server and client certificates that it signed, with their keys."""
    folder = tmp_path_factory.mktemp("pem")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-days", "2", "-extfile", "san",
        )  # fmt: skip
    return folder


async def test_tls_client_that_trusts_the_ca_gets_through_with_its_token(pem: Path) -> None:
    server = ServerTls(pem / "server.pem", pem / "server.key")
    async with (
        echo(server, tokens=["k"]) as address,
        open_channel(address, tls=ClientTls(pem / "ca.pem")) as channel,
    ):
        assert await call_both(channel, bearer("k")) == [b"u", b"s", b"s"]


async def test_plain_client_of_a_tls_server_is_unavailable(pem: Path) -> None:
    server = ServerTls(pem / "server.pem", pem / "server.key")
    async with echo(server) as address, open_channel(address) as channel:
        assert {error.code for error in await refusal(channel)} == {grpc.StatusCode.UNAVAILABLE}


async def test_mutual_tls_admits_only_certificates_of_its_ca(pem: Path) -> None:
    server = ServerTls(pem / "server.pem", pem / "server.key", client_ca=pem / "ca.pem")
    with_certificate = ClientTls(pem / "ca.pem", pem / "client.pem", pem / "client.key")
    async with echo(server) as address:
        async with open_channel(address, tls=with_certificate) as channel:
            assert await call_both(channel) == [b"u", b"s", b"s"]
        async with open_channel(address, tls=ClientTls(pem / "ca.pem")) as channel:
            assert {error.code for error in await refusal(channel)} == {grpc.StatusCode.UNAVAILABLE}


async def test_client_that_knows_the_certificates_name_may_dial_another_address(elsewhere: Path) -> None:
    certificate = elsewhere / "cert.pem"
    assert name_in(certificate) == "api.example.com"
    async with echo(ServerTls(certificate, elsewhere / "key.pem"), tokens=["k"]) as address:
        async with open_channel(address, tls=ClientTls(certificate)) as channel:
            assert {error.code for error in await refusal(channel)} == {grpc.StatusCode.UNAVAILABLE}
        named = ClientTls(certificate, server_name=name_in(certificate))
        async with open_channel(address, tls=named) as channel:
            assert await call_both(channel, bearer("k")) == [b"u", b"s", b"s"]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """cert.pem and key.pem of a host that is not this one."""
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=ignored",
            "-addext", "subjectAltName=DNS:api.example.com",
        ],
        cwd=tmp_path, check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return tmp_path
