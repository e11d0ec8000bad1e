"""What Ray knows a shard by.

Whoever asks Ray for an actor imports the module of its class. The controller does, and vLLM would cost it
seconds and half a gigabyte: so this module imports it only inside the actor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from workers.overlap.report import OverlapReport
    from workers.placement import ShardInfo


class ShardActor:
    """The actor of one rank: hands every call on to its `workers.shard.Shard`.

    The `health` concurrency group answers while `run`, which lasts as long as the shard, is busy.
    """

    def __init__(self, **arguments: Any) -> None:
        from workers.shard import Shard  # noqa: PLC0415 - see the module

        self._shard = Shard(**arguments)

    def place(self) -> tuple[str, str, list[int]]:
        """See `Shard.place`."""
        return self._shard.place()

    def create_dist_init_method(self) -> str:
        """See `Shard.create_dist_init_method`."""
        return self._shard.create_dist_init_method()

    def initialize_worker(self, *args: Any, **kwargs: Any) -> None:
        """See `Shard.initialize_worker`."""
        self._shard.initialize_worker(*args, **kwargs)

    def wait_for_init(self) -> Any:
        """What the engine needs to read this shard's answers; see vLLM's `RayWorkerProc`."""
        return self._shard.wait_for_init()

    def run(self) -> None:
        """See `Shard.run`."""
        self._shard.run()

    @ray.method(concurrency_group="health")
    def overlap(self) -> OverlapReport | None:
        """See `Shard.overlap`."""
        return self._shard.overlap()

    @ray.method(concurrency_group="health")
    def describe(self) -> ShardInfo:
        """See `Shard.describe`."""
        return self._shard.describe()
