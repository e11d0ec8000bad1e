"""Real engines of two ranks share blocks, over the end of the one that computed them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import overlap_engine
import pytest
import tiny_models

from workers.kvpool.arena import Arena
from workers.kvpool.pool_config import CONNECTOR, CONNECTOR_MODULE, PoolConfig

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@contextmanager
def two_ranks(model: Path, cache: Path, folder: Path | None) -> Iterator[overlap_engine.Engine]:
    more: dict[str, Any] = {}
    if folder is not None:
        from vllm.config import KVTransferConfig

        pool = PoolConfig(str(folder), 8 << 20, "lru", "a revision", adapters="")
        more["kv_transfer_config"] = KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_connector_module_path=CONNECTOR_MODULE,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=pool.to_extra(),
        )
    with overlap_engine.started(model, cache, kv_cache_memory_bytes=3 << 20, **more) as engine:
        yield engine


def test_two_ranks_load_what_a_replica_left_that_has_ended(tmp_path: Path) -> None:
    model, folder = tiny_models.build("llama", tmp_path / "model"), tmp_path / "pool"
    dice = random.Random(0)
    asked = overlap_engine.Arrival(tuple(dice.randrange(tiny_models.VOCABULARY) for _ in range(300)), 60)
    last = overlap_engine.Arrival(asked.prompt[::-1], 8)  # its steps see the first one's stores through
    with two_ranks(model, tmp_path, None) as alone:
        (right,) = alone.run([asked], "off").answers
    with two_ranks(model, tmp_path, folder) as first:
        assert first.run([asked], "off").answers == (right,)
        first.run([last], "off")
    (path,) = folder.glob("*.arena")
    with Arena.open(path) as arena:
        assert arena.reap() in (0, 1)
        assert arena.usage().ready >= 11
    with two_ranks(model, tmp_path, folder) as second:
        (answer,) = second.run([asked], "off").answers
        assert answer.cached == 9 * overlap_engine.BLOCK
        assert answer.tokens == right.tokens
        (split,) = second.run([asked], "4").answers  # overlapped steps go on from loaded blocks, too
        assert (split.tokens, split.cached) == (right.tokens, answer.cached)
