"""Who may ask the viewer, and what a browser may do with its answers."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEALTH: Final = "/healthz"
COOKIE: Final = "kvorum_viewer"

_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_MAX_KEY_CHARS: Final = 4096
_MONTH_S: Final = 30 * 86_400


class Keys:
    """Known keys by the hex SHA-256 of each; with none, everyone is welcome.

    A browser that presented a key once gets a cookie, which proves it and does not hold it: a cookie
    goes to every port of the host.
    """

    def __init__(self, digests: Iterable[str]) -> None:
        self._digests = tuple(digest.lower().encode() for digest in digests)
        self._sessions = tuple(_session(digest) for digest in self._digests)

    @property
    def needed(self) -> bool:
        return bool(self._digests)

    def admits(self, authorization: str) -> bool:
        """Whether the header's value ("" when absent) is `Bearer` and a known key."""
        scheme, _, key = authorization.partition(" ")
        return not self._digests or (scheme.lower() == "bearer" and self.session(key.strip()) is not None)

    def session(self, key: str) -> str | None:
        """The cookie's value for a known key. All are compared, so that the time tells nothing."""
        given = hashlib.sha256(key[:_MAX_KEY_CHARS].encode("utf-8", "surrogateescape")).hexdigest().encode()
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        return self._sessions[known.index(True)] if any(known) else None

    def knows(self, session: str) -> bool:
        """Whether that is the cookie of a known key."""
        given = session.encode("utf-8", "replace")
        matches = [hmac.compare_digest(given, known.encode()) for known in self._sessions]
        return any(matches)


class Guard:
    """An ASGI app around the viewer's: keeps foreign hosts and unknown keys out, hardens all answers.

    Args:
        local: only this machine can connect; a request that names another host comes from a page that
            has bent its own name to this address.
    """

    def __init__(self, app: ASGIApp, keys: Keys, *, local: bool) -> None:
        self._app, self._keys, self._local = app, keys, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; there are no web sockets here."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008, "reason": "there are no web sockets here"})
            return

        async def hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = None if scope["path"] == HEALTH else self._instead(scope)
        await (answer or self._app)(scope, receive, hardened)

    def _instead(self, scope: Scope) -> Response | None:
        """What to answer in place of the app; None when the request may pass."""
        headers = Headers(scope=scope)
        if self._local and not _is_local(headers.get("host", "")):
            return refusal(
                421, "this viewer answers for localhost and 127.0.0.1 only: use one of these in the URL"
            )
        if not self._keys.needed:
            return None
        if (greeting := self._greet(scope)) is not None:
            return greeting
        if self._keys.admits(headers.get("authorization", "")) or self._keys.knows(
            _cookie(headers.get("cookie", ""))
        ):
            return None
        return refusal(
            401, "a key is needed: send 'Authorization: Bearer KEY', or open /?key=KEY in a browser once"
        )

    def _greet(self, scope: Scope) -> Response | None:
        """Take the key out of the address bar and into a cookie."""
        if scope["method"] not in {"GET", "HEAD"}:
            return None
        try:
            query = parse_qsl(
                scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=64
            )
        except ValueError:
            return None
        session = next((self._keys.session(value) for name, value in query if name == "key"), None)
        if session is None:
            return None
        rest = urlencode([(name, value) for name, value in query if name != "key"])
        # Only ever a path of this host: "//else.where" would be another one.
        target = "/" + scope["raw_path"].decode("latin-1").lstrip("/\\")
        response = Response(status_code=303, headers={"location": target + ("?" + rest if rest else "")})
        secure = scope.get("scheme") == "https"
        response.set_cookie(
            COOKIE, session, max_age=_MONTH_S, httponly=True, samesite="strict", secure=secure
        )
        return response


def refusal(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    """A refusal, of all parts of the viewer: {"error": reason}, and the same where Jaeger's clients look."""
    body = {"error": reason, "data": None, "errors": [{"code": status, "msg": reason}]}
    return Response(json.dumps(body), status, headers, "application/json")


def _session(digest: bytes) -> str:
    return hmac.new(digest, b"kvorum viewer session", hashlib.sha256).hexdigest()


def _is_local(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdecimal():
        name = host
    return name.lower().rstrip(".") in _LOCAL_NAMES


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""
