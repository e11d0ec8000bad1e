"""Hosts the viewer in a Ray actor: named, detached, restarted by Ray, on ports that stay."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ClusterConfig
from cluster.viewer_config import router_tls, settings_of
from protos.channels import ClientTls
from telemetry.config import TelemetryConfig
from telemetry.logs import configure_logging
from telemetry.viewer.settings import ViewerSettings
from workers.pinning import pin_process

log = logging.getLogger(__name__)

VIEWER_NAME = "viewer"
"""Of the actor, in the cluster's Ray namespace."""

_NICENESS = 5
"""Whoever serves requests goes first."""
_RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ViewerSpec:
    """All that a viewer is made from; Ray hands it to a restarted one again."""

    settings: ViewerSettings
    telemetry: TelemetryConfig
    admin_address: str
    router_tls: ClientTls | None
    front_cores: tuple[int, ...]
    token: str = field(repr=False)


class ViewerActor:
    """Serves from its creation on. While a port is taken it tries again, ever less often."""

    def __init__(self, spec: ViewerSpec) -> None:
        configure_logging("kvorum.viewer", format=spec.telemetry.log_format)
        pin_process(spec.front_cores)
        os.nice(_NICENESS)
        self._spec = spec
        self._viewer: Any = None
        self._serving = asyncio.ensure_future(self._serve())
        self._serving.add_done_callback(_exit_if_failed)

    async def stop(self) -> None:
        """Close the ports, and what was received is in the store. The caller then kills this actor."""
        self._serving.remove_done_callback(_exit_if_failed)
        self._serving.cancel()
        if self._viewer is not None:
            await self._viewer.stop()
            await self._sources.close()

    async def _serve(self) -> None:
        from cluster.viewer_sources import ClusterSources  # noqa: PLC0415
        from telemetry.setup import open_store  # noqa: PLC0415
        from telemetry.viewer.server import Viewer  # noqa: PLC0415

        spec = self._spec
        self._sources = ClusterSources(spec.admin_address, spec.token, router_tls=spec.router_tls)
        failures = 0
        while True:
            viewer = Viewer(
                spec.settings,
                store=open_store(spec.telemetry),
                fleet=self._sources.fleet,
                scrape=self._sources.scrape,
            )
            try:
                addresses = await viewer.start()
            except OSError as error:
                delay_s = _RETRY_S[min(failures, len(_RETRY_S) - 1)]
                log.error("cannot serve the viewer: %s; again in %.0f s", error, delay_s)
                failures += 1
                await asyncio.sleep(delay_s)
                continue
            self._viewer = viewer
            log.info("viewer at %s, OTLP at %s", addresses.http, addresses.otlp)
            return


def viewer_spec(
    config: ClusterConfig, admin_address: str, front_cores: tuple[int, ...], token: str
) -> ViewerSpec | None:
    """Of a configuration whose ports are chosen; None where there is to be no viewer.

    Raises:
        BadInput: the file of API keys or the router's certificate cannot be read.
    """
    if not config.viewer.enabled:
        return None
    return ViewerSpec(
        settings=settings_of(config.viewer, config.telemetry, config.router, token),
        telemetry=config.telemetry,
        admin_address=admin_address,
        router_tls=router_tls(config.router),
        front_cores=front_cores,
        token=token,
    )


def start_viewer(spec: ViewerSpec) -> Any:
    """The viewer of the connected Ray's namespace, created on this node unless there is one. Blocks briefly.

    Nothing that serves requests waits for it, or fails with it: None when Ray will not have it.
    """
    options: dict[str, Any] = {
        "name": VIEWER_NAME,
        "get_if_exists": True,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 16,
        # Its ports were chosen on this host, and the store is here.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        ),
    }
    try:
        return ray.remote(ViewerActor).options(**options).remote(spec)
    except (RayError, ValueError) as error:
        log.error("there is no viewer: %s", error)
        return None


async def stop_viewer(actor: Any) -> None:
    """Ask it to stop, and kill it in any case."""
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await actor.stop.remote()
    with contextlib.suppress(RayError, ValueError):
        await asyncio.to_thread(ray.kill, actor, no_restart=True)


def _exit_if_failed(serving: asyncio.Future[None]) -> None:
    """Leave a viewer that broke in an unforeseen way to Ray, which restarts it."""
    if not serving.cancelled() and (error := serving.exception()) is not None:
        log.critical("the viewer could not start", exc_info=error)
        asyncio.get_running_loop().call_later(_RETRY_S[-1], os._exit, 1)
