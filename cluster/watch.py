"""The controller's view of its replicas' load, for `status` and later for autoscaling."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

import grpc

from protos import common_pb2, replica_pb2, replica_pb2_grpc
from protos.channels import bearer, open_channel

log = logging.getLogger(__name__)

_REDIAL_S = 1.0


class LoadWatch:
    """Follows WatchReplica of every ready replica; forgets those that left."""

    def __init__(self, token: str) -> None:
        self._credential = bearer(token)
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._loads: dict[str, common_pb2.ReplicaLoad] = {}

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Watch exactly these replicas (name -> address)."""
        wanted = set(addresses.items())
        for key in [key for key in self._tasks if key not in wanted or self._tasks[key].done()]:
            self._tasks.pop(key).cancel()
            self._loads.pop(key[0], None)
        for key in wanted - self._tasks.keys():
            self._tasks[key] = asyncio.create_task(self._watch(*key), name=f"load of {key[0]}")

    def load(self, replica: str) -> common_pb2.ReplicaLoad | None:
        """The latest load, None before the first or after the replica has gone."""
        return self._loads.get(replica)

    def close(self) -> None:
        """Stop watching."""
        self.follow({})

    async def _watch(self, replica: str, address: str) -> None:
        async with open_channel(address) as channel:
            stub = replica_pb2_grpc.ReplicaStub(channel)
            request = replica_pb2.WatchReplicaRequest()
            while True:
                with contextlib.suppress(grpc.RpcError):
                    async for update in stub.WatchReplica(request, metadata=self._credential):
                        self._loads[replica] = update.load
                self._loads.pop(replica, None)
                await asyncio.sleep(_REDIAL_S)
