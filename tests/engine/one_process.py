"""A real engine without Ray."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers import engine_args
from workers.checkpoint import PreparedModel
from workers.config import EngineConfig
from workers.engine import Engine, EngineInfo
from workers.placement import ReplicaPlacement


def start_engine(config: EngineConfig, prepared: PreparedModel) -> tuple[Engine, EngineInfo]:
    """Started, with one process instead of a Ray actor per shard: everything else is as in production."""
    placement = ReplicaPlacement("r0", "e0", "test", "", "cpu", "none", ())
    build = engine_args.build
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # threads that spin fight over few cores
        patch.setattr(engine_args, "build", lambda *a: replace(build(*a), distributed_executor_backend="uni"))
        engine = Engine(config, prepared, placement)
        return engine, engine.start()
