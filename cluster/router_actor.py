"""Hosts a router in a Ray actor, and keeps it alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ClusterConfig
from protos import admin_pb2
from router.config import RouterConfig
from telemetry.config import TelemetryConfig
from telemetry.logs import configure_logging
from workers.pinning import pin_process

log = logging.getLogger(__name__)

_RESTART_S = 0.5
_ADOPT_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RouterInfo:
    """Where a router actor listens."""

    address: str
    pid: int
    node: str


class RouterActor:
    """The router's server inside an actor; the tokens never pass through Ray."""

    def __init__(
        self,
        name: str,
        config: RouterConfig,
        telemetry: TelemetryConfig,
        controller_address: str,
        token: str,
        *,
        front_cores: tuple[int, ...],
    ) -> None:
        from router.metrics import RouterMetrics  # noqa: PLC0415
        from router.server import RouterServer  # noqa: PLC0415
        from router.tracing import TracingObserver  # noqa: PLC0415
        from telemetry.setup import configure  # noqa: PLC0415

        configure_logging("kvorum.router", format=telemetry.log_format)
        pin_process(front_cores)
        self._telemetry = configure("kvorum.router", name, telemetry)
        self._server = RouterServer(
            config,
            controller_address,
            token,
            observer=TracingObserver(self._telemetry),
            metrics=RouterMetrics(self._telemetry.meters, tenants=telemetry.tenant_metrics),
        )
        self._closed = asyncio.Event()
        self._address = ""

    async def start(self) -> RouterInfo:
        """Listen. Raises OSError when the port is taken."""
        self._address = await self._server.start()
        return RouterInfo(self._address, os.getpid(), ray.util.get_node_ip_address())

    async def describe(self) -> RouterInfo:
        """The same, of a router that runs; without an address while it starts."""
        return RouterInfo(self._address, os.getpid(), ray.util.get_node_ip_address())

    async def wait_closed(self) -> None:
        """Return after `stop`; an actor's death shows as an error here."""
        await self._closed.wait()

    async def stop(self, grace_s: float) -> None:
        """Let running streams finish for a while, then end them; flush telemetry."""
        await self._server.stop(grace_s)
        await asyncio.to_thread(self._telemetry.shutdown)
        self._closed.set()


class RouterSupervisor:
    """Starts the router actor, and another whenever it dies."""

    def __init__(
        self,
        name: str,
        config: ClusterConfig,
        *,
        namespace: str,
        port: int,
        admin_address: str,
        token: str,
        front_cores: tuple[int, ...],
    ) -> None:
        self._name = name
        self._config = config
        self._namespace = namespace
        self._router_config = config.router.model_copy(update={"port": port})
        self._admin_address = admin_address
        self._token = token
        self._front_cores = front_cores
        self._actor: Any = None
        self._info: RouterInfo | None = None
        self._stopping = False

    async def run(self) -> None:
        """Until stopped."""
        while not self._stopping:
            try:
                if self._info is None:
                    self._actor = self._create()
                    async with asyncio.timeout(_START_TIMEOUT_S):
                        self._info = await self._actor.start.remote()
                await self._actor.wait_closed.remote()
            except (RayError, OSError, ValueError, TimeoutError) as error:
                if not self._stopping:
                    log.error("router %s ended: %s", self._name, (str(error) or "no answer").splitlines()[-1])
            self._info = None
            if not self._stopping:
                await self._kill_named()
                await asyncio.sleep(_RESTART_S)

    async def stop(self, grace_s: float) -> None:
        """End the router."""
        self._stopping = True
        actor, self._actor = self._actor, None
        if actor is None:
            return
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(grace_s + 5.0):
                await actor.stop.remote(grace_s)
        with contextlib.suppress(RayError, ValueError):
            await asyncio.to_thread(ray.kill, actor)

    def status(self) -> admin_pb2.RouterStatus:
        """As the admin API shows it."""
        info = self._info
        return admin_pb2.RouterStatus(
            name=self._name,
            address=info.address if info else "",
            pid=info.pid if info else 0,
            node=info.node if info else "",
            alive=info is not None,
        )

    async def _kill_named(self) -> None:
        with contextlib.suppress(RayError, ValueError):
            actor = await asyncio.to_thread(ray.get_actor, self._name, self._namespace)
            await asyncio.to_thread(ray.kill, actor)

    async def adopt(self) -> None:
        """Take over the router that a controller before us started. Call it before `run`."""
        try:
            actor = await asyncio.to_thread(ray.get_actor, self._name, self._namespace)
            async with asyncio.timeout(_ADOPT_TIMEOUT_S):
                info: RouterInfo = await actor.describe.remote()
        except ValueError:
            return  # there is none
        except (RayError, TimeoutError):
            await self._kill_named()
            return
        if not info.address:
            await self._kill_named()
            return
        self._info = info
        self._actor = actor

    def _create(self) -> Any:
        options: dict[str, Any] = {
            "name": self._name,
            "namespace": self._namespace,
            "lifetime": "detached",
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": 64,
            # Its port was chosen on this host, and clients look for it here.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            ),
        }
        arguments = (
            self._name,
            self._router_config,
            self._config.telemetry,
            self._admin_address,
            self._token,
        )
        actor = ray.remote(RouterActor).options(**options)
        return actor.remote(*arguments, front_cores=self._front_cores)
