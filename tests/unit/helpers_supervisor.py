"""A supervisor's surroundings in tests: no Ray, no other replicas, nobody who hears of changes."""

from __future__ import annotations

from typing import Any

from cluster.config import ClusterConfig
from cluster.placement import Topology
from cluster.supervisor import Surroundings


def surroundings(engine: dict[str, Any], shards: int = 1) -> Surroundings:
    """Of one replica with so many shards; `engine`: settings that are not the default."""
    return Surroundings(
        config=ClusterConfig.model_validate({"engine": engine}),
        topology=Topology(1, shards, 1, {"CPU": 1.0}),
        device="cpu",
        namespace="ns",
        ray_address="127.0.0.1:1",
        token="t",
        front_cores=(),
        taken_cores=lambda _name: [],
        changed=lambda: None,
    )
