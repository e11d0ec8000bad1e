"""An edge around an app, and what its tests ask it for."""

from __future__ import annotations

import hashlib

from cluster.openai.asgi import App
from cluster.openai.edge import Edge
from cluster.openai.keys import Keys
from cluster.openai.probes import Standing
from telemetry.setup import Telemetry

CHAT = "/v1/chat/completions"
READY = Standing("ready", 3.0, started=True, ready=True)
WAITING = Standing("waiting for a replica", 2.0, started=True, ready=False)
LOADING = Standing("loading vLLM's server", 1.0, started=False, ready=False)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def an_edge(
    app: App | None,
    *,
    standing: Standing = READY,
    keys: tuple[str, ...] = (),
    telemetry: Telemetry | None = None,
    timeout_s: float = 10.0,
    max_ongoing: int = 100,
) -> Edge:
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
    return Edge(
        Keys(digests),
        telemetry or Telemetry.silent(),
        lambda: app,
        lambda: standing,
        request_timeout_s=timeout_s,
        max_ongoing=max_ongoing,
    )
