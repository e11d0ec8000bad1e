"""Which engines may share blocks, and why one shares none."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workers.config import EngineConfig
from workers.kvpool.header import file_name
from workers.kvpool.keys import Build, namespace
from workers.kvpool.pool_config import PoolConfig, digest_of_adapters, no_pool, pool_config, pool_folder
from workers.placement import ReplicaPlacement, ShardSlot


def engine(folder: Path, **more: Any) -> EngineConfig:
    return EngineConfig(**{"kv_pool_gib": 0.001, "kv_pool_folder": str(folder)} | more)


def placed(*hosts: str) -> ReplicaPlacement:
    slots = tuple(ShardSlot(rank, rank, host, f"ip of {host}") for rank, host in enumerate(hosts))
    return ReplicaPlacement("r0", "e0", "n", "", "cpu", "gloo", slots, front_cores=(2, 3))


def test_a_pool_is_off_unless_asked_for() -> None:
    assert "engine.kv_pool_gib" in no_pool(EngineConfig(), "cpu")


def test_an_engine_on_one_host_can_have_a_pool(tmp_path: Path) -> None:
    assert no_pool(engine(tmp_path / "not there yet"), "cpu", placed("a", "a")) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "device", "hosts", "says"),
    [
        ({}, "cuda", "a", "no KV pool on CUDA yet"),
        ({}, "cpu", "ab", r"on 2 hosts \(ip of a, ip of b\)"),
        ({"pipeline_parallel_size": 2}, "cpu", "aa", "pipeline_parallel_size is 2"),
        ({"engine_args": {"enable_prefix_caching": False}}, "cpu", "a", "prefix caching is off"),
        (
            {"engine_args": {"prefix_caching_hash_algo": "xxhash"}},
            "cpu",
            "a",
            "xxhash is no cryptographic hash",
        ),
        ({"engine_args": {"kv_transfer_config": {}}}, "cpu", "a", "another connector"),
        ({"kv_pool_gib": 1e7}, "cpu", "a", r"10000000.00 GiB does not fit in .* GiB are free"),
    ],
)
def test_an_engine_that_can_have_none_says_why(
    tmp_path: Path, more: dict[str, Any], device: str, hosts: str, says: str
) -> None:
    assert re.search(says, no_pool(engine(tmp_path, **more), device, placed(*hosts)))


def test_an_arena_that_a_neighbour_made_needs_no_more_space(tmp_path: Path) -> None:
    (tmp_path / "x.arena").touch()
    assert no_pool(engine(tmp_path, kv_pool_gib=1e7), "cpu") == ""


def test_settings_travel_as_json(tmp_path: Path) -> None:
    config = pool_config(engine(tmp_path, kv_pool_admission="tinylfu"), "rev", placed("a"))
    assert config == PoolConfig(str(tmp_path), int(0.001 * 2**30), "tinylfu", "rev", "", (2, 3))
    extra = json.loads(json.dumps(config.to_extra()))
    assert PoolConfig.from_extra(extra) == config
    assert (extra["spec_name"], extra["spec_module_path"]) == ("ArenaSpec", "workers.kvpool.spec")


def test_each_cluster_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVORUM_CLUSTER_ID", "blue")
    assert pool_folder(EngineConfig()) == Path("/dev/shm/kvorum-blue")
    monkeypatch.delenv("KVORUM_CLUSTER_ID")
    assert pool_folder(EngineConfig()).parent == Path("/dev/shm")


def test_adapters_are_known_by_their_weights_and_not_by_their_folder(tmp_path: Path) -> None:
    for name, weights in (("one", b"1"), ("same", b"1"), ("two", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(weights)
    digest = {name: digest_of_adapters({"law": str(tmp_path / name)}) for name in ("one", "same", "two")}
    assert digest["one"] == digest["same"] != digest["two"]
    assert digest_of_adapters({"med": str(tmp_path / "one")}) != digest["one"]
    assert digest_of_adapters({}) == ""
    assert digest_of_adapters({"law": "org/law"}) != digest_of_adapters({"law": "org/law-2"})


BUILD = Build(vllm="0.32.0", torch="2.13", kernels="x86 amx", hash_seed="seed")


def made(
    build: Build = BUILD, revision: str = "rev", adapters: str = "", **changed: Any
) -> dict[str, str | int]:
    values = {
        "max_model_len": 512,
        "dtype": "torch.float32",
        "quantization": None,
        "rope": 10_000,
        "cache_dtype": "auto",
        "algo": "sha256",
        "kv_dtype": "float32",
        "layout": "LBHNC",
        "block": 32,
        "hash_block": 32,
        "tp": 1,
        "pp": 1,
        "pcp": 1,
        "dcp": 1,
        "path": "/here",
    } | changed
    v = SimpleNamespace(**values)
    hf = {"_name_or_path": v.path, "transformers_version": "5", "rope_theta": v.rope, "layers": [1, None]}
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=v.max_model_len,
            dtype=v.dtype,
            quantization=v.quantization,
            hf_config=SimpleNamespace(to_dict=lambda: hf),
        ),
        cache_config=SimpleNamespace(cache_dtype=v.cache_dtype, prefix_caching_hash_algo=v.algo),
    )
    kv: Any = SimpleNamespace(
        model=SimpleNamespace(dtype=v.kv_dtype),
        kv_cache_layout=v.layout,
        groups=(SimpleNamespace(tokens_per_block=v.block),),
        cache=SimpleNamespace(tokens_per_hash=v.hash_block),
        parallel=SimpleNamespace(tp_size=v.tp, pp_size=v.pp, pcp_size=v.pcp, dcp_size=v.dcp),
    )
    return namespace(config, kv, revision, adapters, build)


CHANGES: list[dict[str, Any]] = [
    {"revision": "other"},
    {"adapters": "other"},
    *({"build": replace(BUILD, **{name: "other"})} for name in asdict(BUILD)),
    {"max_model_len": 1024},
    {"dtype": "torch.bfloat16"},
    {"quantization": "fp8"},
    {"rope": 500_000},
    {"cache_dtype": "fp8"},
    {"algo": "sha256_cbor"},
    {"kv_dtype": "fp8"},
    {"layout": "LBNHC"},
    {"block": 64},
    {"hash_block": 16},
    {"tp": 2},
    {"pp": 2},
    {"pcp": 2},
    {"dcp": 2},
]


def test_whatever_changes_a_blocks_bytes_or_its_hash_has_an_arena_of_its_own() -> None:
    names = [file_name(made(**change)) for change in ({}, *CHANGES)]
    assert len(set(names)) == len(names)


def test_the_folder_of_a_model_changes_nothing() -> None:
    assert made(path="/there") == made()


def test_a_namespace_is_json_of_less_than_a_page_and_hides_the_seed() -> None:
    text = json.dumps(made(build=replace(BUILD, hash_seed="secret")))
    assert len(text) < 4096
    assert "secret" not in text
