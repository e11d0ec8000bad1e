"""OTLP over HTTP: /v1/traces and /v1/metrics, protobuf or JSON.

https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from telemetry.viewer.receiver import (
    Encoding,
    MalformedExportError,
    Receipt,
    Receiver,
    ReceiverBusyError,
    Signal,
    Slots,
)
from telemetry.viewer.settings import ViewerSettings

_ENCODINGS: Final[dict[str, Encoding]] = {"application/x-protobuf": "protobuf", "application/json": "json"}
_TYPES: Final[dict[Encoding, str]] = {encoding: name for name, encoding in _ENCODINGS.items()}
_CODES: Final = {400: 3, 408: 4, 413: 8, 415: 3, 503: 14}
"""google.rpc.Code of a status."""
_DRAINED: Final = 4
"""How many times the limit of a body is read to its end, so that its sender gets to see the answer."""


class _RefusedError(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class OtlpHttp:
    """The handlers of both paths.

    A foreign page can make a browser post a form or plain text here, but not, unasked, these content
    types: everything else is refused.
    """

    def __init__(self, receiver: Receiver, settings: ViewerSettings) -> None:
        self._receiver = receiver
        self._limit = settings.max_body_mib * 1024 * 1024
        self._timeout_s = settings.body_timeout_s
        self._slots = Slots(settings.max_exports)

    async def traces(self, request: Request) -> Response:
        """POST /v1/traces."""
        return await self._export("traces", request)

    async def metrics(self, request: Request) -> Response:
        """POST /v1/metrics."""
        return await self._export("metrics", request)

    async def _export(self, signal: Signal, request: Request) -> Response:
        encoding = _ENCODINGS.get(request.headers.get("content-type", "").partition(";")[0].strip().lower())
        try:
            if encoding is None:
                self._receiver.count(signal, "malformed")
                raise _RefusedError(415, f"send Content-Type {' or '.join(_ENCODINGS)}")
            with self._slots.one():
                receipt = await self._receiver.take(signal, await self._body(signal, request), encoding)
        except _RefusedError as error:
            return _failure(error.status, str(error), encoding or "json")
        except MalformedExportError as error:
            return _failure(400, str(error), encoding or "json")
        except ReceiverBusyError as error:
            self._receiver.count(signal, "busy")
            return _failure(503, str(error), encoding or "json", {"retry-after": "1"})
        except ClientDisconnect:
            self._receiver.count(signal, "malformed")
            return Response(status_code=400)  # nobody reads it
        return _answer(200, export_response(signal, receipt), encoding)

    async def _body(self, signal: Signal, request: Request) -> bytes:
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in {"identity", "gzip"}:
            self._receiver.count(signal, "malformed")
            raise _RefusedError(415, "Content-Encoding is gzip or none")
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(request)
        except TimeoutError:
            self._receiver.count(signal, "malformed")
            raise _RefusedError(408, f"the body took longer than {self._timeout_s:g} s to arrive") from None
        if body is not None and coding == "gzip":
            try:
                body = await asyncio.to_thread(_inflated, body, self._limit)
            except (zlib.error, EOFError) as error:
                self._receiver.count(signal, "malformed")
                raise _RefusedError(400, f"the body is not gzip: {error}") from None
        if body is None:
            self._receiver.count(signal, "too_large")
            raise _RefusedError(413, f"an export is at most {self._limit >> 20} MiB, decompressed")
        return body

    async def _read(self, request: Request) -> bytes | None:
        """The body; None when it is too large."""
        declared = request.headers.get("content-length", "")
        too_large = declared.isdecimal() and int(declared[:20]) > self._limit
        chunks: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._limit:
                too_large = True
                chunks.clear()
            if size > _DRAINED * self._limit:
                break
            if not too_large:
                chunks.append(chunk)
        return None if too_large else b"".join(chunks)


def export_response(signal: Signal, receipt: Receipt) -> Message:
    """The answer to an export that was taken in, in whole or in part."""
    if signal == "traces":
        traces = ExportTraceServiceResponse()
        if receipt.rejected:
            traces.partial_success.rejected_spans = receipt.rejected
            traces.partial_success.error_message = receipt.message
        return traces
    metrics = ExportMetricsServiceResponse()
    if receipt.rejected:
        metrics.partial_success.rejected_data_points = receipt.rejected
        metrics.partial_success.error_message = receipt.message
    return metrics


def _failure(status: int, reason: str, encoding: Encoding, headers: dict[str, str] | None = None) -> Response:
    return _answer(status, Status(code=_CODES[status], message=reason), encoding, headers)


def _answer(
    status: int, message: Message, encoding: Encoding, headers: dict[str, str] | None = None
) -> Response:
    body = json_format.MessageToJson(message) if encoding == "json" else message.SerializeToString()
    return Response(body, status, headers, _TYPES[encoding])


def _inflated(body: bytes, limit: int) -> bytes | None:
    """The content of a gzip body; None when it is too large. Raises zlib.error, EOFError."""
    stream = zlib.decompressobj(wbits=31)
    content = stream.decompress(body, limit + 1)
    if len(content) > limit:
        return None
    if not stream.eof:
        raise EOFError("it ends too early")
    return content
