"""What fits a machine, and which cores a shard gets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import ClusterConfig
from cluster.placement import PlacementError, allocate, fit
from workers.placement import ReplicaPlacement, ShardSlot, choose_collective


def _config(replicas: int | None = None, **engine: object) -> ClusterConfig:
    return ClusterConfig.model_validate({"replicas": replicas, "engine": engine})


def test_two_cores_get_two_replicas_of_one_core() -> None:
    topology = fit(_config(), [2])
    assert (topology.replicas, topology.ranks, topology.cores_per_shard) == (2, 1, 1)
    assert topology.bundles() == [{"CPU": 1.0}]


def test_one_core_gets_one_replica() -> None:
    assert fit(_config(), [1]).replicas == 1


def test_a_core_is_left_for_the_front_ends_where_there_is_one_to_spare() -> None:
    assert fit(_config(), [16]).cores_per_shard == 7
    assert fit(_config(replicas=1), [2]).cores_per_shard == 1


def test_spinning_shards_that_outnumber_cores_are_refused_with_what_to_do() -> None:
    with pytest.raises(PlacementError, match=r"--replicas 1 .*--collective gloo"):
        fit(_config(replicas=2, tensor_parallel_size=2), [2])
    with pytest.raises(PlacementError, match="--tensor-parallel-size 2 or less"):
        fit(_config(tensor_parallel_size=4), [2])
    with pytest.raises(PlacementError, match="--cores-per-shard 2"):
        fit(_config(replicas=2, cores_per_shard=3), [4])


def test_shards_may_share_cores_over_gloo() -> None:
    topology = fit(_config(replicas=2, tensor_parallel_size=2, collective="gloo"), [2])
    assert topology.cores_per_shard == 0
    assert topology.replicas * topology.ranks * topology.bundle["CPU"] <= 2


def test_shards_are_sized_for_the_nodes_there_are_not_for_their_sum() -> None:
    assert fit(_config(), [4, 4, 4]).cores_per_shard == 3
    assert fit(_config(replicas=3), [2, 2, 2]).cores_per_shard == 1
    with pytest.raises(PlacementError, match="--cores-per-shard 4"):
        fit(_config(replicas=3, cores_per_shard=5), [4, 4, 4])


def test_gpus_bound_the_replicas_on_cuda() -> None:
    topology = fit(_config(tensor_parallel_size=4), [64], gpus=8, device="cuda")
    assert (topology.replicas, topology.bundle["GPU"]) == (2, 1.0)
    with pytest.raises(PlacementError, match="8 GPUs, there are 4"):
        fit(_config(replicas=2, tensor_parallel_size=4), [64], gpus=4, device="cuda")


@given(
    cores=st.integers(1, 256),
    replicas=st.none() | st.integers(1, 16),
    ranks=st.integers(1, 8),
)
def test_a_topology_never_needs_more_cores_than_there_are(
    cores: int, replicas: int | None, ranks: int
) -> None:
    try:
        topology = fit(_config(replicas=replicas, tensor_parallel_size=ranks), [cores])
    except PlacementError:
        assert (replicas or 1) * ranks > cores
        return
    assert topology.replicas * topology.ranks * topology.cores_per_shard <= cores
    assert topology.cores_per_shard >= 1


@given(
    layout=st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=8),
    per_shard=st.integers(1, 3),
)
def test_no_core_is_given_twice_and_neighbouring_ranks_share_nodes(layout: list[str], per_shard: int) -> None:
    nodes = [(node, f"ip-{node}") for node in layout]
    slots = allocate(nodes, per_shard, taken=[("a", 0)], cores_of=dict.fromkeys("abc", 32))
    assert [slot.rank for slot in slots] == list(range(len(layout)))
    assert sorted(slot.bundle for slot in slots) == list(range(len(layout)))
    given_out = [(slot.node_id, core) for slot in slots for core in slot.cores]
    assert len(given_out) == len(set(given_out)) == per_shard * len(layout)
    assert ("a", 0) not in given_out
    order = [slot.node_id for slot in slots]
    assert order[0] == layout[0]
    changes = sum(left != right for left, right in itertools.pairwise(order))
    assert changes == len(set(layout)) - 1


def test_a_full_node_is_named() -> None:
    with pytest.raises(PlacementError, match=r"rank 1 needs 1 core.* on node 10.0.0.1, which has 0 left"):
        allocate([("a", "10.0.0.1")] * 2, 1, taken=[], cores_of={"a": 1})


def _slots(*places: tuple[str, tuple[int, ...]]) -> tuple[ShardSlot, ...]:
    return tuple(ShardSlot(rank, rank, node, node, cores) for rank, (node, cores) in enumerate(places))


def test_shared_memory_needs_one_host_and_a_core_for_each_rank() -> None:
    assert choose_collective("cpu", _slots(("a", (0,)))) == "none"
    assert choose_collective("cpu", _slots(("a", (0,)), ("a", (1,)))) == "shm"
    assert choose_collective("cpu", _slots(("a", (0,)), ("b", (0,)))) == "gloo"
    assert choose_collective("cpu", _slots(("a", ()), ("a", ()))) == "gloo"
    assert choose_collective("cpu", _slots(("a", (0,)), ("a", (0,)))) == "gloo"
    assert choose_collective("cpu", _slots(("a", (0,)), ("a", (1,))), "gloo") == "gloo"
    assert choose_collective("cuda", _slots(("a", ()), ("b", ()))) == "nccl"


def test_a_placement_survives_its_trip_through_vllms_config() -> None:
    placement = ReplicaPlacement(
        "replica-0", "e1", "ns", "127.0.0.1:1", "cpu", "shm", _slots(("a", (0,)), ("a", (1,))), overlap="4"
    )
    assert ReplicaPlacement.from_config(placement.to_config()) == placement
