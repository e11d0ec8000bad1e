"""The viewer's HTTP side: page, API, Jaeger's query API, Prometheus metrics, OTLP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from telemetry.store import SpanStore, StoreError
from telemetry.viewer import jaeger
from telemetry.viewer.cluster_metrics import ClusterMetrics
from telemetry.viewer.fresh import Fresh
from telemetry.viewer.metric_table import MetricTable
from telemetry.viewer.otlp_http import OtlpHttp
from telemetry.viewer.prometheus import CONTENT_TYPE
from telemetry.viewer.queries import QuestionError, plain
from telemetry.viewer.reader import StoreReader
from telemetry.viewer.receiver import Receiver, ReceiverBusyError, Slots
from telemetry.viewer.security import HEALTH, refusal
from telemetry.viewer.settings import ViewerSettings

Fleet = Callable[[], Awaitable[dict[str, Any]]]
Scrape = Callable[[], Awaitable[Mapping[str, str]]]

_PAGE: Final = Path(__file__).parent / "page"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
_ANSWER_S: Final = 10.0
_MOST_QUESTIONS: Final = 64
_MOST_SCRAPES: Final = 4
_FLEET_DEPTH: Final = 16


class ViewerApp:
    """Everything behind the guard: `asgi`, an app without lifespan events. `close` it in the end."""

    def __init__(
        self,
        settings: ViewerSettings,
        store: SpanStore,
        receiver: Receiver,
        table: MetricTable,
        *,
        fleet: Fleet | None,
        scrape: Scrape | None,
    ) -> None:
        self._reader = StoreReader(store)
        self._cluster = ClusterMetrics(table, receiver)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="viewer")
        self._questions, self._scrapes = Slots(_MOST_QUESTIONS), Slots(_MOST_SCRAPES)
        times = {"max_age_s": settings.cache_s, "timeout_s": settings.scrape_timeout_s}
        self._fleet = Fresh(fleet, **times) if fleet else None
        self._scrape = Fresh(scrape, **times) if scrape else None
        otlp = OtlpHttp(receiver, settings)
        self.asgi = Starlette(
            routes=[
                Route(HEALTH, _health),
                Route("/metrics", self._metrics),
                Route("/v1/traces", otlp.traces, methods=["POST"]),
                Route("/v1/metrics", otlp.metrics, methods=["POST"]),
                Route("/api/requests", self._requests),
                Route("/api/requests/{trace_id}", self._request),
                Route("/api/fleet", self._show_fleet),
                *self._jaeger(),
                Mount("/jaeger", routes=self._jaeger()),
                *_page_routes(),
            ],
            exception_handlers={
                HTTPException: _http_failed,
                StoreError: _store_failed,
                QuestionError: _nonsense,
                ReceiverBusyError: _busy,
                TimeoutError: _late,
                Exception: _broken,
            },
        )

    async def close(self) -> None:
        """Give up what is under way."""
        for fresh in (self._fleet, self._scrape):
            if fresh is not None:
                await fresh.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _requests(self, request: Request) -> Response:
        return await self._answer(self._reader.requests, request.query_params)

    async def _request(self, request: Request) -> Response:
        return await self._answer(self._reader.request, request.path_params["trace_id"])

    async def _show_fleet(self, request: Request) -> Response:
        if self._fleet is None:
            return refusal(503, "this viewer knows no fleet")
        try:
            found = await self._fleet.get()
        except Exception as error:  # whatever the cluster's side raises
            return refusal(503, f"the controller does not say: {type(error).__name__}: {error}"[:500])
        return await self._answer(plain, found, _FLEET_DEPTH)

    async def _metrics(self, request: Request) -> Response:
        texts: Mapping[str, str] = {}
        if self._scrape is not None:
            try:
                texts = await self._scrape.get()
            except Exception:  # whatever the cluster's side raises; the other metrics are there
                self._cluster.scrape_failures += 1
        with self._scrapes.one():
            body = await asyncio.to_thread(self._cluster.exposition, texts)
        return Response(body, media_type=CONTENT_TYPE)

    def _jaeger(self) -> list[BaseRoute]:
        return [
            Route("/api/services", self._services),
            Route("/api/services/{service:path}/operations", self._operations),
            Route("/api/operations", self._kinds),
            Route("/api/traces", self._traces),
            Route("/api/traces/{trace_id}", self._trace),
            Route("/api/dependencies", _no_dependencies),
        ]

    async def _services(self, request: Request) -> Response:
        return await self._answer(self._reader.jaeger_services)

    async def _operations(self, request: Request) -> Response:
        return await self._answer(self._reader.jaeger_operations, request.path_params["service"])

    async def _kinds(self, request: Request) -> Response:
        return await self._answer(self._reader.jaeger_kinds, request.query_params)

    async def _traces(self, request: Request) -> Response:
        query = request.query_params
        return await self._answer(self._reader.jaeger_traces, query, query.getlist("traceID"))

    async def _trace(self, request: Request) -> Response:
        return await self._answer(self._reader.jaeger_trace, request.path_params["trace_id"])

    async def _answer(self, ask: Callable[..., Any], *arguments: Any) -> Response:
        """What `ask` says, in a thread, as JSON; 404 when that is None."""
        with self._questions.one():
            async with asyncio.timeout(_ANSWER_S):
                loop = asyncio.get_running_loop()
                body = await loop.run_in_executor(self._threads, lambda: _encoded(ask(*arguments)))
        if body is None:
            return refusal(404, "there is no such trace")
        return Response(body, media_type="application/json")


async def _health(request: Request) -> Response:
    return Response('{"status":"ok"}', media_type="application/json")


async def _no_dependencies(request: Request) -> Response:
    return Response(_encoded(jaeger.envelope([])), media_type="application/json")


def _page_routes() -> list[BaseRoute]:
    """The files of the page, as they were at the start: / is its index."""
    found = sorted(_PAGE.glob("*")) if _PAGE.is_dir() else []
    files = {file.name: file.read_bytes() for file in found if file.suffix in _TYPES and file.is_file()}
    routes = [_file_route(f"/{name}", content, _TYPES[Path(name).suffix]) for name, content in files.items()]
    if "index.html" in files:
        routes.append(_file_route("/", files["index.html"], _TYPES[".html"]))
    return routes


def _file_route(path: str, content: bytes, media_type: str) -> BaseRoute:
    async def show(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return Route(path, show)


def _encoded(value: Any) -> bytes | None:
    if value is None:
        return None
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


async def _http_failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, error.detail, dict(error.headers or {}))


async def _store_failed(request: Request, error: Exception) -> Response:
    return refusal(503, str(error))


async def _nonsense(request: Request, error: Exception) -> Response:
    return refusal(400, str(error))


async def _busy(request: Request, error: Exception) -> Response:
    return refusal(503, "too many questions are being answered: try again", {"retry-after": "1"})


async def _late(request: Request, error: Exception) -> Response:
    return refusal(504, f"there was no answer within {_ANSWER_S:g} s: ask for less")


async def _broken(request: Request, error: Exception) -> Response:
    return refusal(500, "the viewer failed on this request; its log says why")
