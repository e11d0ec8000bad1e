"""gRPC channel and server settings, TLS and keys: the same on every hop.

Between processes of one cluster a shared token authenticates; at the router's public face
API keys do. Tokens are compared in constant time and never logged. A lookaside client, which has no
token of the cluster, may call the methods that take a ticket with one: see protos/tickets.py.
"""

from __future__ import annotations

import hmac
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from protos import common_pb2
from protos.errors import KvorumError, to_status
from protos.tickets import TICKET_KEY

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Bounds a prompt of a million token ids, and the tokenizer bundle."""

AUTH_KEY = "authorization"

Credential = tuple[tuple[str, str], ...]

TicketVerifier = Callable[[str, bytes], object]
"""Given a ticket and the request's bytes as they came; raises KvorumError to refuse the call."""


def bearer(token: str | None) -> Credential:
    """Call metadata that carries `token`: no interceptor, which would cost every message of a stream."""
    return ((AUTH_KEY, f"Bearer {token}"),) if token else ()


# TCP_NODELAY is gRPC's default. Keepalive notices a peer that vanished without a FIN.
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
]
_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.so_reuseport", 0),  # two servers must not share a port in silence
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
]


@dataclass(frozen=True)
class ServerTls:
    """PEM files of a server; with `client_ca`, clients must present a certificate it signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True)
class ClientTls:
    """PEM files of a client; without `ca` the system's roots are trusted.

    `server_name` is what the server's certificate says, where it is not the address that is dialled.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None


def open_channel(address: str, *, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel to host:port; a token goes with each call, see `bearer`."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=tls.ca.read_bytes() if tls.ca else None,
        private_key=tls.key.read_bytes() if tls.key else None,
        certificate_chain=tls.certificate.read_bytes() if tls.certificate else None,
    )
    named = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS + named)


def create_server(
    *,
    tokens: Iterable[str] = (),
    ticketed: Mapping[str, TicketVerifier] | None = None,
    max_concurrent_rpcs: int | None = None,
) -> grpc.aio.Server:
    """A server that, when `tokens` are given, admits only calls that carry one of them.

    `ticketed` names methods ("/package.Service/Method", one request each) that a call without a token may
    still reach when it carries a ticket that the verifier lets pass; the method's handler runs only then.
    Health and reflection stay open: load balancers probe without keys.
    """
    accepted = tuple(token.encode() for token in tokens)
    interceptors: list[grpc.aio.ServerInterceptor] = []
    if accepted:
        interceptors.append(_CheckCredential(accepted, dict(ticketed or {})))
    return grpc.aio.server(
        interceptors=interceptors,
        options=_OPTIONS + _SERVER_OPTIONS,
        maximum_concurrent_rpcs=max_concurrent_rpcs,
    )


def bind(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None = None) -> int:
    """Bind and return the port; port 0 picks a free one.

    Raises:
        OSError: the port is taken or the address is not this host's.
    """
    address = f"{host}:{port}"
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            credentials = grpc.ssl_server_credentials(
                [(tls.key.read_bytes(), tls.certificate.read_bytes())],
                root_certificates=tls.client_ca.read_bytes() if tls.client_ca else None,
                require_client_auth=tls.client_ca is not None,
            )
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise OSError(
            f"cannot listen on {address}: the port is in use, the address is not this host's, "
            f"or the TLS files do not fit ({error})"
            if tls
            else f"cannot listen on {address}: the port is in use or the address is not this host's"
        ) from error
    return bound


class _CheckCredential(grpc.aio.ServerInterceptor):
    _OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.")

    def __init__(self, accepted: tuple[bytes, ...], ticketed: dict[str, TicketVerifier]) -> None:
        self._accepted = accepted
        self._ticketed = ticketed
        self._refusal: Any = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if details.method.startswith(self._OPEN):
            return await continuation(details)
        ticket: str | None = None
        for key, value in details.invocation_metadata:
            if key == AUTH_KEY and self._known(value):
                return await continuation(details)
            if key == TICKET_KEY:
                ticket = _text(value)
        verify = self._ticketed.get(details.method)
        if ticket is None or verify is None:
            return self._refusal
        handler = await continuation(details)
        return None if handler is None else _verified(handler, ticket, verify)

    def _known(self, value: str | bytes) -> bool:
        scheme, _, token = _text(value).partition(" ")
        matches = [hmac.compare_digest(token.encode(), accepted) for accepted in self._accepted]
        return scheme.lower() == "bearer" and any(matches)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _verified(handler: Any, ticket: str, verify: TicketVerifier) -> Any:
    """`handler`, for one call, behind the verifier.

    It takes the request as bytes, for the ticket is about these: another serialisation of the same
    message need not be equal.
    """
    if handler.request_streaming:
        raise TypeError("a ticket is for one request: a method that streams its requests cannot take one")
    method = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def admit(raw: bytes, context: Any) -> Any:
        try:
            verify(ticket, raw)
        except KvorumError as error:
            await context.abort_with_status(to_status(error))
        return handler.request_deserializer(raw) if handler.request_deserializer else raw

    async def answer(raw: bytes, context: Any) -> Any:
        return await method(await admit(raw, context), context)

    async def stream(raw: bytes, context: Any) -> AsyncIterator[Any]:
        async with aclosing(method(await admit(raw, context), context)) as responses:
            async for response in responses:
                yield response

    if not handler.response_streaming:
        return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)
    # A streaming method either yields its responses or writes them to the context.
    behaviour: Any = stream if inspect.isasyncgenfunction(method) else answer
    return grpc.unary_stream_rpc_method_handler(behaviour, None, handler.response_serializer)


async def _refuse(_request: Any, context: Any) -> None:
    error = KvorumError(
        grpc.StatusCode.UNAUTHENTICATED,
        common_pb2.UNAUTHENTICATED,
        "missing or unknown key: send the metadata 'authorization: Bearer KEY'",
    )
    await context.abort_with_status(to_status(error))
