"""One HTTP response on its way from vLLM's app to the client.

vLLM begins a stream with status 200 before it knows whether an engine will take the request. The response's
start is therefore held back until its first content: an error that comes first gets its true status. A
stream that breaks later ends with the error and without `[DONE]`.

vLLM takes some bodies of a wrong shape for a failure of its own (500). What fails before the body has become
a request for an engine is refused with 400 here.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable

from cluster.openai import sse
from cluster.openai.asgi import Message, Receive, Send, answer_json
from cluster.openai.call_scope import CallScope
from cluster.openai.failures import Api, HttpFailure

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Of a request; a router takes no larger messages either."""

TOO_LARGE = HttpFailure(413, f"the request's body is larger than {MAX_BODY_BYTES >> 20} MiB")

PART_TIMEOUT_S = 60.0
"""A client has this long for each part of its request's body."""

TOO_SLOW = HttpFailure(408, f"no further part of the request's body came within {PART_TIMEOUT_S:.0f} s")

_FAILED = 500
_RETRYABLE = (429, 503)
_RETRY_S = 1.0


class Exchange:
    """Give `receive` and `send` to the app, call `close` when it has returned.

    Attributes:
        status: what the client was told; 0 before.
        gone: the client left before it had the whole response.
        broken: what ended a stream that had begun.
    """

    def __init__(self, call: CallScope, api: Api, receive: Receive, send: Send) -> None:
        self.status = 0
        self.gone = False
        self.broken: HttpFailure | None = None
        self._call, self._api = call, api
        self._receive, self._send = receive, send
        self._start: Message | None = None  # held back
        self._held: list[Message] = []  # what came after it and tells nothing yet
        self._streaming = False  # events are passed on
        self._over = False  # all has been said
        self._last = b""
        self._left = MAX_BODY_BYTES
        self._whole = False  # the request's body is here
        self._unfit: HttpFailure | None = None  # what is wrong with that body

    async def receive(self) -> Message:
        """The request's next part; a body that is too large or too slow ends as if the client had left."""
        if self._whole:
            message = await self._receive()
        else:
            try:
                async with asyncio.timeout(PART_TIMEOUT_S):
                    message = await self._receive()
            except TimeoutError:
                self._unfit = TOO_SLOW
                return {"type": "http.disconnect"}
        if message["type"] == "http.disconnect":
            self.gone = self.gone or not self._over
        elif message["type"] == "http.request":
            self._whole = not message.get("more_body", False)
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                self._unfit = TOO_LARGE
                return {"type": "http.disconnect"}
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Pass one message of the app on. The hot path of a running stream: no coroutine of its own."""
        if self._streaming and message.get("more_body"):
            body = message["body"]
            if not body.startswith(sse.ERROR_STARTS):
                self._last = body
                return self._send(message)
        return self._handle(message)

    async def refuse(self, failure: HttpFailure) -> None:
        """Answer with this alone; nothing may have been sent."""
        self._over = True
        self._start = None
        self._held.clear()
        self.status = failure.status
        headers = self._own_headers(failure.status)
        await answer_json(self._send, failure.status, failure.body(self._api), headers)

    async def close(self, failure: HttpFailure | None = None) -> None:
        """The app has returned, or raised what `failure` tells; say what is still to be said."""
        if self._over or self.gone:
            return
        if self._unfit is not None and not self.status:
            await self.refuse(self._unfit)
        elif self._streaming:
            await self._break(failure or HttpFailure(500, "the server ended this stream early"))
        elif not self.status:
            await self.refuse(failure or HttpFailure(500, "the server gave no answer"))

    async def _handle(self, message: Message) -> None:
        kind = message["type"]
        if self._over:
            return
        if kind == "http.response.start":
            self._start = message
        elif kind != "http.response.body":
            await self._send(message)
        elif self._start is not None:
            await self._begin(self._start, message)
        elif self._streaming and message.get("body", b"").startswith(sse.ERROR_STARTS):
            await self._break_as_told(message["body"])
        else:
            self._over = not message.get("more_body", False)
            await self._send(message)

    async def _begin(self, start: Message, message: Message) -> None:
        """The first content decides which response this is."""
        if self._unfit is not None:
            await self.refuse(self._unfit)
            return
        body = message.get("body", b"")
        events = any(n == b"content-type" and v.startswith(sse.MEDIA_TYPE) for n, v in start["headers"])
        if events:
            if body.startswith(sse.ERROR_STARTS):
                await self.refuse(self._call.failure or self._rightly_blamed(sse.read_error(body)))
                return
            if body.startswith(sse.PREAMBLE_STARTS):
                self._held.append(message)
                return
        elif start["status"] == _FAILED and not self._call.understood:
            await self.refuse(self._rightly_blamed(sse.read_error(b"data: " + body)))
            return
        held = self._held
        self._start, self._held = None, []
        self.status = start["status"]
        own = self._own_headers(self.status)
        names = {name for name, _ in own}
        headers = [header for header in start["headers"] if header[0].lower() not in names]
        self._over = not message.get("more_body", False)
        self._streaming = events and not self._over
        await self._send({**start, "headers": [*headers, *own]})
        for earlier in held:
            await self._send(earlier)
        self._last = body
        await self._send(message)

    def _rightly_blamed(self, failure: HttpFailure) -> HttpFailure:
        if failure.status != _FAILED or self._call.understood:
            return failure
        log.warning("request %s taken for misshapen: %s", self._call.request_id, failure.message)
        return HttpFailure(
            400, f"the request cannot be read, something in it is misshapen: {failure.message}"
        )

    async def _break_as_told(self, event: bytes) -> None:
        # vLLM's Anthropic converter chokes on the error that it gets; ours is the one behind it.
        known = self._call.failure if self._api is not Api.OPENAI else None
        await self._break(known or sse.read_error(event), None if known else event)

    async def _break(self, failure: HttpFailure, event: bytes | None = None) -> None:
        self.broken = failure
        self._over, self._streaming = True, False
        event = event or failure.event(self._api, sse.next_number(self._last))
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _own_headers(self, status: int) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", self._call.request_id.encode())]
        if self._call.trace_id:
            headers.append((b"x-trace-id", self._call.trace_id.encode()))
        if status in _RETRYABLE:
            wait_s = self._call.retry_after_s
            seconds = max(1, math.ceil(_RETRY_S if wait_s is None else wait_s))
            headers.append((b"retry-after", str(seconds).encode()))
        elif status == TOO_SLOW.status:
            headers.append((b"connection", b"close"))  # the rest of that request may still come
        return headers
