"""The router as a server: listening, health, reflection, draining. Start it inside any event loop."""

from __future__ import annotations

import asyncio
import logging

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import admin_pb2, admin_pb2_grpc
from protos.channels import ServerTls, bind, create_server
from router import router_admin, service
from router.config import RouterConfig
from router.lookaside import Lookaside
from router.membership import Membership, TokenizerFactory
from router.metrics import MeasuringObserver, RouterMetrics
from router.observe import Observer, SilentObserver
from router.router_admin import RouterAdminService
from router.service import InferenceService
from router.tasks import TaskGroup
from router.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_GAUGES_S = 1.0
_LAST_BYTES_S = 1.0
"""For the statuses of aborted streams to leave."""


class RouterServer:
    """One router. `start` once, `stop` once; it installs no signal handlers and makes no loop.

    Health: "", "kvorum.v1.Inference" and "model/NAME" are SERVING while a replica can serve.
    """

    def __init__(
        self,
        config: RouterConfig,
        controller_address: str,
        cluster_token: str | None = None,
        *,
        observer: Observer | None = None,
        metrics: RouterMetrics | None = None,
        make_tokenizer: TokenizerFactory = Tokenizer.from_bundle,
    ) -> None:
        self._config, self._cluster_token = config, cluster_token
        self.members = Membership(
            controller_address, config, make_tokenizer, token=cluster_token, on_change=self._members_changed
        )
        self._lookaside = Lookaside(cluster_token, ticket_s=config.ticket_s, most=config.max_streams)
        observer = observer or SilentObserver()
        self._metrics = metrics
        if metrics is not None:
            observer = MeasuringObserver(observer, metrics)
        self._service = InferenceService(config, self.members, self._lookaside, observer)
        self._admin = RouterAdminService(config.policy, self.members, lambda: self.in_flight)
        self._health = health.aio.HealthServicer()
        self._changed = asyncio.Event()
        self._tasks = TaskGroup()
        self._server: grpc.aio.Server | None = None

    @property
    def in_flight(self) -> int:
        """Streams now being served, those that clients run themselves included."""
        return self._service.in_flight + len(self._lookaside)

    def state(self) -> admin_pb2.RouterState:
        """What this router knows of its replicas, queues and leases."""
        return self._admin.state()

    async def start(self) -> str:
        """Listen, begin to watch the controller, and return the address as host:port.

        Raises:
            OSError: the port is in use, or a key file cannot be read.
            ValueError: the file of API keys holds none.
        """
        server = create_server(tokens=self._accepted_keys())
        try:
            port = bind(server, self._config.host, self._config.port, self._tls())
        except OSError:
            await server.stop(None)  # one that is dropped unstopped keeps the process from ending
            raise
        server.add_generic_rpc_handlers((self._service.handler(),))
        admin_pb2_grpc.add_RouterAdminServicer_to_server(self._admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (service.NAME, router_admin.NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        await self._publish_health()
        await self.members.start()
        await server.start()
        self._tasks.spawn("publish health", self._follow_health())
        if self._metrics is not None:
            self._tasks.spawn("refresh the gauges", self._refresh_gauges(self._metrics))
        self._server = server
        address = f"{self._config.host}:{port}"
        log.info("router listens on %s, policy %s", address, self._config.policy)
        return address

    async def stop(self, grace_s: float = 30.0) -> None:
        """Drain: unhealthy at once, new requests refused, running ones finish within `grace_s`."""
        if self._server is None:
            return
        server, self._server = self._server, None
        await self._tasks.cancel()
        await self._health.enter_graceful_shutdown()
        if not await self._service.drain(grace_s):
            log.warning("%d requests outlived the grace of %.1f s", self.in_flight, grace_s)
        self._lookaside.close()
        # Health watchers never end by themselves: they must not hold the grace.
        await server.stop(_LAST_BYTES_S)
        await self.members.stop()

    def hurry(self) -> None:
        """End the grace of a `stop` in progress."""
        self._service.cut_off()

    def _members_changed(self) -> None:
        self._changed.set()

    async def _follow_health(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._publish_health()

    async def _refresh_gauges(self, metrics: RouterMetrics) -> None:
        while True:
            metrics.read(self.state())
            await asyncio.sleep(_GAUGES_S)

    async def _publish_health(self) -> None:
        status = health_pb2.HealthCheckResponse
        serving: dict[str, bool] = {
            f"model/{info.name}": self.members.servable(info.name) for info in self.members.models()
        }
        serving[""] = serving[service.NAME] = any(serving.values())
        for name, able in serving.items():
            await self._health.set(name, status.SERVING if able else status.NOT_SERVING)

    def _accepted_keys(self) -> list[str]:
        """API keys, and the cluster's own token for its ingress. Empty: no key is asked for."""
        path = self._config.api_keys_file
        if path is None:
            return []
        lines = (line.strip() for line in path.read_text().splitlines())
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"{path} holds no API key: one a line, # starts a comment")
        return keys + ([self._cluster_token] if self._cluster_token else [])

    def _tls(self) -> ServerTls | None:
        certificate, key = self._config.tls_cert, self._config.tls_key
        if certificate is None or key is None:
            return None
        return ServerTls(certificate, key, self._config.tls_client_ca)
