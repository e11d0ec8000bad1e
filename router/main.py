"""A router as a process of its own: what `kvorum router` runs."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable

import uvloop

from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.server import RouterServer
from router.tracing import TracingObserver
from telemetry.config import TelemetryConfig
from telemetry.setup import configure

_GC_THRESHOLDS = (20_000, 20, 50)


async def run(
    config: RouterConfig,
    controller_address: str,
    cluster_token: str | None = None,
    *,
    telemetry: TelemetryConfig | None = None,
    grace_s: float = 30.0,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain for at most `grace_s`; a second signal cuts it short.

    `on_ready` gets the address once it listens.

    Raises:
        OSError, ValueError: it cannot listen as configured; see `RouterServer.start`.
    """
    traces = configure("kvorum.router", f"router-{os.getpid()}", telemetry or TelemetryConfig())
    server = RouterServer(
        config,
        controller_address,
        cluster_token,
        observer=TracingObserver(traces),
        metrics=RouterMetrics(traces.meters, tenants=traces.config.tenant_metrics),
    )
    asked, hurried = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurried if asked.is_set() else asked).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        address = await server.start()
        if on_ready is not None:
            on_ready(address)
        await asked.wait()
        await _drain(server, hurried, grace_s)
    finally:
        await asyncio.to_thread(traces.shutdown)


def serve(
    config: RouterConfig,
    controller_address: str,
    cluster_token: str | None = None,
    *,
    telemetry: TelemetryConfig | None = None,
    grace_s: float = 30.0,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """`run` in an event loop made for it; see there."""
    # What was imported lives as long as the process, and streams make no cycles: collect seldom.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    uvloop.run(
        run(
            config,
            controller_address,
            cluster_token,
            telemetry=telemetry,
            grace_s=grace_s,
            on_ready=on_ready,
        )
    )


async def _drain(server: RouterServer, hurried: asyncio.Event, grace_s: float) -> None:
    stopping = asyncio.ensure_future(server.stop(grace_s))
    hurry = asyncio.ensure_future(hurried.wait())
    await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not stopping.done():
        server.hurry()
    await stopping
