"""A pool ends with its cluster, and nobody else's does; one that does not fit is refused beforehand."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import ray
from fakes_launch import fake_state
from ray.exceptions import RayError

from cluster import preflight
from cluster import state as states
from cluster.config import ClusterConfig, load
from cluster.failures import BadInput
from cluster.kv_pools import folder_of, remove_everywhere
from cluster.preflight import check_kv_pool
from cluster.teardown import tear_down
from workers.config import EngineConfig
from workers.kvpool.folder import folder_of_cluster, remove_folder
from workers.kvpool.pool_config import pool_folder


@pytest.fixture(autouse=True)
def _state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(states.STATE_DIR_VARIABLE, str(tmp_path / "state"))


def a_pool(base: Path, cluster_id: str) -> Path:
    folder = base / f"kvorum-{cluster_id}"
    folder.mkdir(parents=True)
    (folder / f"{'0' * 32}.arena").write_bytes(b"blocks")
    (folder / "agent-node.port").write_text("4000")
    return folder


def quiet(_line: str) -> None:
    pass


def test_a_cluster_that_ends_takes_its_pool_along_and_no_other(tmp_path: Path) -> None:
    own, other = a_pool(tmp_path, "blue"), a_pool(tmp_path, "red")
    state = fake_state(tmp_path / "work", id="blue", kv_pool_folder=own)
    assert tear_down(state, grace_s=0.0, say=quiet) == []
    assert not own.exists()
    assert len(list(other.iterdir())) == 2
    assert tear_down(state, grace_s=0.0, say=quiet) == []


def test_a_cluster_without_a_pool_leaves_everything(tmp_path: Path) -> None:
    pool = a_pool(tmp_path, "blue")
    assert tear_down(fake_state(tmp_path / "work", id="blue"), grace_s=0.0, say=quiet) == []
    assert pool.exists()


def test_a_pool_that_cannot_be_removed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, cluster_id: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("cluster.kv_pools.remove_folder", refuse)
    said: list[str] = []
    state = fake_state(tmp_path / "work", id="blue", kv_pool_folder=tmp_path / "kvorum-blue")
    assert tear_down(state, grace_s=0.0, say=said.append) == []
    assert said == [
        f"the KV pool in {tmp_path / 'kvorum-blue'} is left: Permission denied; remove it by hand"
    ]


@pytest.mark.parametrize("cluster_id", ["red", "", "lue"])
def test_a_folder_that_is_not_the_clusters_by_its_name_is_left(tmp_path: Path, cluster_id: str) -> None:
    pool = a_pool(tmp_path, "blue")
    remove_folder(pool, cluster_id)
    assert pool.exists()


def test_a_link_and_another_users_folder_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = a_pool(tmp_path, "blue")
    link = tmp_path / "there" / "kvorum-blue"
    link.parent.mkdir()
    link.symlink_to(pool)
    remove_folder(link, "blue")
    assert pool.exists()
    monkeypatch.setattr("workers.kvpool.folder.os.geteuid", lambda: os.getuid() + 1)
    remove_folder(pool, "blue")
    assert pool.exists()


def test_engines_and_teardown_mean_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVORUM_CLUSTER_ID", "blue")
    for engine in (EngineConfig(kv_pool_gib=1), EngineConfig(kv_pool_gib=1, kv_pool_folder=str(tmp_path))):
        assert pool_folder(engine) == folder_of(engine, "blue") == folder_of_cluster(engine, "blue")
        assert pool_folder(engine).name == "kvorum-blue"
    assert folder_of(EngineConfig(), "blue") is None


def test_a_relative_folder_means_the_same_to_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(None, {"engine": {"kv_pool_folder": "pools"}}).engine.kv_pool_folder == str(
        tmp_path / "pools"
    )


Space = namedtuple("Space", "f_bavail f_frsize f_blocks")
Memory = namedtuple("Memory", "available")


def check(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path | None = None,
    *,
    free_gib: float = 100.0,
    memory_gib: float = 100.0,
    limited: bool = True,
    **cluster: object,
) -> None:
    free = Space(int(free_gib * 2**30), 1, 200 * 2**30 if limited else 0)
    monkeypatch.setattr(preflight.os, "statvfs", lambda _path: free)
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: Memory(int(memory_gib * 2**30)))
    engine = {"kv_pool_gib": 8.0, "device": "cpu", "kv_pool_folder": str(folder) if folder else None}
    check_kv_pool(ClusterConfig.model_validate({"engine": engine} | cluster))


def test_a_pool_that_fits_is_fine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check(monkeypatch)
    check(monkeypatch, tmp_path / "not there yet", free_gib=8.0, memory_gib=1.0)
    check(monkeypatch, free_gib=0.0, limited=False)


def test_a_pool_that_does_not_fit_is_refused_with_the_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"8\.00 GiB does not fit in /dev/shm, where 7\.50 GiB of 200\.00 GiB"):
        check(monkeypatch, free_gib=7.5)
    with pytest.raises(BadInput, match=r"memory, of which 2\.00 GiB are available"):
        check(monkeypatch, memory_gib=2.0)
    monkeypatch.setattr(preflight.os, "access", lambda _path, _mode: False)
    with pytest.raises(
        BadInput, match=f"may not write to {tmp_path}; name another folder with --kv-pool-folder"
    ):
        check(monkeypatch, tmp_path / "a" / "b")


def test_what_other_hosts_have_is_theirs_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, free_gib=0.0, ray_address="10.0.0.1:6379")
    check_kv_pool(ClusterConfig())


class FakeRay:
    """Three nodes, of which one is dead; what is asked of a node is done at once, and fails on some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: set[str]) -> None:
        self.failing = failing
        self.asked: list[tuple[Path, str, str]] = []
        monkeypatch.setattr(ray, "nodes", self.nodes)
        monkeypatch.setattr(ray, "remote", lambda function: self)
        monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs, []))
        monkeypatch.setattr(ray, "get", self.get)

    def nodes(self) -> list[dict[str, object]]:
        return [
            {"NodeID": f"{number:056x}", "NodeManagerAddress": f"10.0.0.{number}", "Alive": number != 2}
            for number in (1, 2, 3)
        ]

    def options(self, *, num_cpus: int, max_retries: int, scheduling_strategy: Any) -> FakeRay:
        self.node = scheduling_strategy.node_id
        return self

    def remote(self, folder: Path, cluster_id: str) -> str:
        self.asked.append((folder, cluster_id, self.node[-1]))
        return str(self.node)

    def get(self, ref: str) -> None:
        if ref[-1] in self.failing:
            raise RayError("no such node any more")


@pytest.mark.parametrize(
    ("failing", "told"), [(set(), []), ({"3"}, [" on 10.0.0.3 (no such node any more)"])]
)
def test_a_dead_clusters_pool_is_removed_from_all_hosts_of_a_foreign_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: set[str], told: list[str]
) -> None:
    fake, said = FakeRay(monkeypatch, failing), []
    folder = tmp_path / "kvorum-blue"
    remove_everywhere(fake_state(tmp_path / "work", id="blue", kv_pool_folder=folder), said.append)
    assert fake.asked == [(folder, "blue", "1"), (folder, "blue", "3")]
    assert said == [f"the KV pool may be left in {folder}{where}" for where in told]
    remove_everywhere(fake_state(tmp_path / "work", id="blue"), said.append)
    assert len(fake.asked) == 2
