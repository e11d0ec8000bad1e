"""Which routers can serve now: each is asked by grpc.health.v1, again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.channels import ClientTls, open_channel
from router.tasks import TaskGroup

log = logging.getLogger(__name__)

SERVICE = "kvorum.v1.Inference"
"""SERVING while a replica behind the router can serve."""

_INTERVAL_S = 1.0
_EAGER_S = 0.2
"""Between two questions while no router serves: someone waits for the first one that does."""
_ANSWER_S = 1.0
_SILENCES = 3
"""A router too busy to answer one question in time still serves; so many in a row, and it does not."""


class RouterHealth:
    """Watches routers from `start` to `stop`. `serving` and `serves` are what was heard last."""

    def __init__(self, addresses: Sequence[str], *, tls: ClientTls | None = None) -> None:
        self._serves = dict.fromkeys(addresses, False)
        self._tls = tls
        self._tasks = TaskGroup()
        self._changed = asyncio.Event()
        self._lost = ""

    @property
    def serving(self) -> bool:
        """Whether some router serves."""
        return any(self._serves.values())

    @property
    def lost(self) -> str:
        """Why some router is watched no more, which only a fresh start mends; empty: all are."""
        return self._lost

    def serves(self, address: str) -> bool:
        """Whether this router does."""
        return self._serves[address]

    async def wait_serving(self) -> None:
        """Return as soon as some router serves."""
        while not self.serving:
            self._changed.clear()
            await self._changed.wait()

    def start(self) -> None:
        """Begin to watch, on the running event loop."""
        for address in self._serves:
            self._tasks.spawn(f"health of router {address}", self._watch(address))

    async def stop(self) -> None:
        """End it."""
        await self._tasks.cancel()

    async def _watch(self, address: str) -> None:
        silences = 0
        try:
            async with open_channel(address, tls=self._tls) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                while True:
                    answer = await _ask(stub)
                    silences = silences + 1 if answer is None else 0
                    if answer is not None:
                        self._note(address, answer)
                    elif silences >= _SILENCES:
                        self._note(address, False)
                    await asyncio.sleep(_INTERVAL_S if self.serving else _EAGER_S)
        except Exception as error:
            self._note(address, False)  # nobody looks any more
            self._lost = f"router {address} is watched no more: {error or type(error).__name__}"
            raise

    def _note(self, address: str, serves: bool) -> None:
        if self._serves[address] == serves:
            return
        self._serves[address] = serves
        self._changed.set()
        log.info("router %s %s", address, "serves" if serves else "does not serve")


async def _ask(stub: health_pb2_grpc.HealthStub) -> bool | None:
    """What one router says; None when it did not say in time."""
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    try:
        answer = await stub.Check(request, timeout=_ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return None if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
