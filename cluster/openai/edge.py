"""What every HTTP request meets before and after vLLM's app: ids, trace, keys, honest statuses, counts."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Final

from prometheus_client import Counter

from cluster.openai import probes
from cluster.openai.asgi import App, Receive, Scope, Send, answer_json, first_values
from cluster.openai.call_scope import CallScope, entered
from cluster.openai.exchange import MAX_BODY_BYTES, TOO_LARGE, Exchange
from cluster.openai.failures import Api, HttpFailure
from cluster.openai.keys import Keys
from cluster.openai.observe import CLIENT_CLOSED, OTHER, HttpObserver
from cluster.openai.probes import Standing
from protos import inference_pb2
from telemetry.setup import Telemetry

log = logging.getLogger(__name__)

_HEADERS: Final = frozenset(
    {
        b"authorization", b"content-length", b"expect", b"x-api-key", b"x-request-id", b"x-service-class",
        b"x-session-id", b"x-tenant-id",
    }
)  # fmt: skip
_CLASSES: Final = {"interactive": inference_pb2.INTERACTIVE, "batch": inference_pb2.BATCH}
_MAX_ID_CHARS = 128
_MAX_NAME_CHARS = 256

_LOAD = "/load"
_GENERATING: Final = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate",
    "/invocations", "/generative_scoring",
)  # fmt: skip
_UNTRACED: Final = frozenset({_LOAD, "/metrics", "/version"})
_NOT_GENERATING: Final = frozenset(
    {
        "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank",
        "/v1/rerank", "/v2/rerank", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
    }
)  # fmt: skip
_SCALING = "/scale_elastic_ep"

_NO_KEY = HttpFailure(401, "missing or unknown API key: send 'Authorization: Bearer KEY'")
_NO_EMBEDDINGS = HttpFailure(501, "this model generates text: it has no embeddings, scores, classes or audio")
_NO_SCALING = HttpFailure(501, "replicas are added and removed by the cluster, not through this API")

_REQUESTS = Counter(
    "kvorum_http_requests", "HTTP requests by route and status; 499: the client left first", ["route", "code"]
)
_ALWAYS: Final = frozenset({_LOAD, "/metrics"})
"""Asked above all when there is too much to do."""

_GRACE_S = 30.0
"""Beyond a request's longest time, after which a router ends it with an honest status."""
_CLOSE_S = 5.0
"""For the last words to a client that may not read."""

_BROKEN = Counter(
    "kvorum_http_streams_broken", "Streams that ended with an error after they began", ["route"]
)


class Edge:
    """An ASGI app around another one.

    Args:
        app: vLLM's app once it is there, else None.
        standing: how the face is now.
        request_timeout_s: the longest time of one request, seconds; a client that sends or reads so slowly
            that it takes `_GRACE_S` more loses it.
        max_ongoing: requests in flight; more are refused with 503 at once, but for probes and metrics.
    """

    def __init__(
        self,
        keys: Keys,
        telemetry: Telemetry,
        app: Callable[[], App | None],
        standing: Callable[[], Standing],
        *,
        request_timeout_s: float,
        max_ongoing: int,
    ) -> None:
        self._keys, self._observer = keys, HttpObserver(telemetry)
        self._app, self._standing = app, standing
        self._timeout_s, self._max_ongoing = request_timeout_s + _GRACE_S, max_ongoing
        self._generating = 0
        self._ongoing = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request; there are no web sockets here."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008, "reason": "there are no web sockets here"})
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in probes.PATHS:
            await self._probe(path, scope["method"], send)
            return
        headers = first_values(scope["headers"], _HEADERS)
        request_id = _request_id(headers.get(b"x-request-id", ""))
        call = CallScope(request_id, headers.get(b"x-tenant-id", ""), headers.get(b"x-session-id", ""))
        call.understood = scope["method"] != "POST"  # the others have nothing to misunderstand
        record = self._observer.begin(scope, call, traced=path not in _UNTRACED)
        exchange = Exchange(call, Api.of(path), receive, send)
        route = OTHER
        generating = scope["method"] == "POST" and path.startswith(_GENERATING)
        self._generating += generating
        try:
            refusal = self._unwelcome(scope["method"], headers, call) or self._unavailable(path)
            refusal = refusal or self._full(path)
            if refusal is not None:
                await _drain(refusal, headers, receive)
                await exchange.refuse(refusal)
            elif path == _LOAD:
                await answer_json(send, 200, b'{"server_load":%d}' % self._generating)
                exchange.status = 200
            else:
                inner = _inner_scope(scope, request_id)
                self._ongoing += 1
                try:
                    await self._serve(inner, call, exchange, record.receiving(exchange.receive))
                finally:
                    self._ongoing -= 1
                    route = getattr(inner.get("route"), "path", route)
        except asyncio.CancelledError:  # the server gave this request up
            exchange.gone = True
            raise
        finally:
            self._generating -= generating
            record.end(route, exchange, _count(route, exchange))

    async def _serve(self, inner: Scope, call: CallScope, exchange: Exchange, receive: Receive) -> None:
        app = self._app()
        assert app is not None
        failure: HttpFailure | None = None
        whole = False
        deadline = asyncio.timeout(self._timeout_s)
        try:
            with entered(call):
                async with deadline:
                    await app(inner, receive, exchange.send)
            whole = not exchange.gone and not deadline.expired()
        except Exception as error:
            failure = call.failure
            if not deadline.expired() and failure is None and not exchange.gone:
                log.error("request %s failed inside vLLM's server", call.request_id, exc_info=error)
                message = f"the server failed on request {call.request_id}; its log says why"
                failure = HttpFailure(500, message)
        finally:
            if not whole:
                call.cancel()
        if deadline.expired():
            failure = HttpFailure(408, f"not all was sent and read within {self._timeout_s:.0f} s")
        try:
            async with asyncio.timeout(_CLOSE_S):
                await exchange.close(failure)
        except TimeoutError:  # it does not read
            exchange.gone = True

    def _unwelcome(self, method: str, headers: dict[bytes, str], call: CallScope) -> HttpFailure | None:
        """What its headers say against this request; notes its class in `call`."""
        # A browser asks what it may do (CORS) without a key.
        if method != "OPTIONS" and not self._keys.admit(
            headers.get(b"authorization", ""), headers.get(b"x-api-key", "")
        ):
            return _NO_KEY
        length = headers.get(b"content-length", "")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            return TOO_LARGE
        wanted = headers.get(b"x-service-class", "interactive").lower()
        if wanted not in _CLASSES:
            return HttpFailure(400, f"X-Service-Class is one of {', '.join(_CLASSES)}, not {wanted[:32]!r}")
        call.service_class = _CLASSES[wanted]
        for name, value in (("X-Tenant-Id", call.tenant), ("X-Session-Id", call.session)):
            if len(value) > _MAX_NAME_CHARS or not value.isprintable():
                return HttpFailure(400, f"{name} is at most {_MAX_NAME_CHARS} printable characters")
        return None

    def _unavailable(self, path: str) -> HttpFailure | None:
        """What this server cannot do, or not yet."""
        if path in _NOT_GENERATING:
            return _NO_EMBEDDINGS
        if path == _SCALING:
            return _NO_SCALING
        standing = self._standing()
        if not standing.started or (path == "/v1/models" and not standing.ready):
            return HttpFailure(503, f"not ready yet: {standing.phase}")
        return None

    def _full(self, path: str) -> HttpFailure | None:
        if self._ongoing < self._max_ongoing or path in _ALWAYS:
            return None
        return HttpFailure(503, f"{self._max_ongoing} requests are in flight at this ingress: try again")

    async def _probe(self, path: str, method: str, send: Send) -> None:
        allowed = probes.methods(path)
        if method not in allowed:
            failure = HttpFailure(405, f"{path} takes {', '.join(allowed)}")
            allow = (b"allow", ", ".join(allowed).encode())
            await answer_json(send, failure.status, failure.body(Api.OPENAI), [allow])
            return
        standing = self._standing()
        status = probes.status(path, standing)
        retry = [(b"retry-after", b"1")] if status == 503 else []
        await answer_json(send, status, probes.body(standing), retry)


def _request_id(given: str) -> str:
    fits = 0 < len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable()
    return given if fits else uuid.uuid4().hex


def _inner_scope(scope: Scope, request_id: str) -> Scope:
    """As vLLM's app is to see the request."""
    name = b"x-request-id"
    headers = [header for header in scope["headers"] if header[0] != name]
    # From 2.4 on Starlette notices a client's leaving only at the next chunk, which may be a prefill away.
    asgi = {**scope.get("asgi", {}), "spec_version": "2.3"}
    return {**scope, "headers": [*headers, (name, request_id.encode())], "asgi": asgi}


async def _drain(refusal: HttpFailure, headers: dict[bytes, str], receive: Receive) -> None:
    """Let a client that sends too much come to the point where it reads the answer, within limits."""
    if refusal is not TOO_LARGE or b"expect" in headers:
        return
    left = 4 * MAX_BODY_BYTES
    try:
        async with asyncio.timeout(10.0):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _count(route: str, exchange: Exchange) -> int:
    """The status by which the request counts."""
    status = CLIENT_CLOSED if exchange.gone else exchange.status or 500
    _REQUESTS.labels(route, str(status)).inc()
    if exchange.broken is not None:
        _BROKEN.labels(route).inc()
    return status
