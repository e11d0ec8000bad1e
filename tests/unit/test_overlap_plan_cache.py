"""Plans on disk: found again, or a reason why not."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.overlap.cost_model import Sample
from workers.overlap.plan import Plan, PlanRow, forced
from workers.overlap.plan_cache import (
    FILES_KEPT,
    FORMAT,
    Cached,
    Fingerprint,
    Miss,
    default_folder,
    load,
    same_link,
    store,
)

FINGERPRINT = Fingerprint(
    heads="4 of 12, 64 wide",
    experts="",
    compiled=False,
    model="org/tiny",
    revision="abc",
    tensor_parallel_size=2,
    dtype="bfloat16",
    layers=30,
    hidden_size=576,
    intermediate_size=1536,
    device="Some CPU",
    cores=1,
    link="two hosts",
    collective="gloo",
    max_tokens=2048,
    torch="2.9",
    vllm="0.32",
)
PLAN = Plan((PlanRow(256, 1, 8.0, 8.0, 3.0, 2.5), PlanRow(512, 4, 16.0, 11.5, 6.0, 5.0)), "measured")
SAMPLES = (Sample(256, 1e-3, 1e-3, 1e-3, 2.5e-3), Sample(1024, 4e-3, 4e-3, 4e-3, 10e-3))


def other(name: str) -> Fingerprint:
    """`FINGERPRINT` with one field changed."""
    value = getattr(FINGERPRINT, name)
    changes: dict[str, Any] = {name: value + (1 if isinstance(value, int) else "x")}
    return replace(FINGERPRINT, **changes)


def file_of(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def reason(found: Cached | Miss) -> str:
    assert isinstance(found, Miss)
    assert "\n" not in found.reason
    return found.reason


def test_a_stored_plan_is_found_again_and_says_that_it_is_cached(tmp_path: Path) -> None:
    assert store(FINGERPRINT, PLAN, SAMPLES, tmp_path / "made") is None
    assert load(FINGERPRINT, tmp_path / "made") == Cached(replace(PLAN, origin="cached"), SAMPLES)
    assert [path.suffix for path in (tmp_path / "made").iterdir()] == [".json"]


def test_a_newer_measurement_replaces_the_older_one(tmp_path: Path) -> None:
    store(FINGERPRINT, Plan((PlanRow(64, 2),), "measured"), SAMPLES[:1], tmp_path)
    store(FINGERPRINT, PLAN, SAMPLES, tmp_path)
    assert load(FINGERPRINT, tmp_path) == Cached(replace(PLAN, origin="cached"), SAMPLES)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", [field.name for field in fields(Fingerprint)])
def test_whatever_differs_the_plan_is_another_one(name: str, tmp_path: Path) -> None:
    store(FINGERPRINT, PLAN, SAMPLES, tmp_path)
    assert other(name).digest() != FINGERPRINT.digest()
    told = reason(load(other(name), tmp_path))
    if name == "model":
        assert told == "no plan was measured yet for org/tinyx"
    else:
        wanted, had = getattr(other(name), name), getattr(FINGERPRINT, name)
        assert f"{name.replace('_', ' ')} {had!r}, not {wanted!r}" in told


def test_the_reason_names_the_nearest_plan_of_the_model(tmp_path: Path) -> None:
    store(replace(FINGERPRINT, device="Old CPU", link="one host", dtype="float16"), PLAN, SAMPLES, tmp_path)
    store(replace(FINGERPRINT, device="Other CPU"), PLAN, SAMPLES, tmp_path)
    told = reason(load(FINGERPRINT, tmp_path))
    assert told == "the nearest cached plan differs: device 'Other CPU', not 'Some CPU'"


def test_nothing_stored_is_a_miss(tmp_path: Path) -> None:
    assert reason(load(FINGERPRINT, tmp_path / "absent")) == "no plan was measured yet for org/tiny"


def test_a_plan_copied_from_other_hardware_is_refused(tmp_path: Path) -> None:
    store(other("device"), PLAN, SAMPLES, tmp_path)
    file_of(tmp_path).rename(tmp_path / f"{FINGERPRINT.digest()}.json")
    assert "device 'Some CPUx', not 'Some CPU'" in reason(load(FINGERPRINT, tmp_path))


def set_in(path: Path, keys: tuple[str | int, ...], value: object) -> None:
    values = json.loads(path.read_text())
    inner = values
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("keys", "value", "told"),
    [
        (("format",), FORMAT + 1, f"format {FORMAT + 1}, and this version reads {FORMAT}"),
        (("format",), None, "format None"),
        (("plan", "rows", 1, "chunks"), 5, "chunks must be one of"),
        (("plan", "rows", 1, "chunks"), 4.0, "plan.rows.1.chunks"),
        (("plan", "rows", 1, "chunks"), True, "plan.rows.1.chunks"),
        (("plan", "rows", 1, "tokens"), "512", "plan.rows.1.tokens"),
        (("plan", "rows", 1, "tokens"), 128, "must increase"),
        (("plan", "origin"), "guessed", "plan.origin"),
        (("plan",), None, "plan"),
        (("samples", 0, "mlp_s"), -1.0, "finite times above 0"),
        (("samples", 0), {}, "samples.0"),
        (("fingerprint", "tensor_parallel_size"), "2", "tensor_parallel_size"),
    ],
)
def test_a_file_that_was_tampered_with_is_a_miss_with_a_reason(
    keys: tuple[str | int, ...], value: object, told: str, tmp_path: Path
) -> None:
    store(FINGERPRINT, PLAN, SAMPLES, tmp_path)
    set_in(file_of(tmp_path), keys, value)
    assert told in reason(load(FINGERPRINT, tmp_path))
    assert store(FINGERPRINT, PLAN, SAMPLES, tmp_path) is None
    assert isinstance(load(FINGERPRINT, tmp_path), Cached)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b" " * (2 << 20), b'"x"']
)
def test_a_file_that_is_something_else_is_a_miss_with_a_reason(content: bytes, tmp_path: Path) -> None:
    store(FINGERPRINT, PLAN, SAMPLES, tmp_path)
    file_of(tmp_path).write_bytes(content)
    assert "cannot be used" in reason(load(FINGERPRINT, tmp_path))
    reason(load(other("device"), tmp_path))  # looks at the file too, for the nearest plan


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_damaged_file_is_never_an_error_and_never_another_plan(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    store(FINGERPRINT, PLAN, SAMPLES, folder)
    path = file_of(folder)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:cut])
    reason(load(FINGERPRINT, folder))


def test_a_folder_that_is_a_file_is_a_reason_both_ways(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be used" in reason(load(FINGERPRINT, blocked))
    told = store(FINGERPRINT, PLAN, SAMPLES, blocked)
    assert told is not None
    assert str(blocked) in told
    assert "KVORUM_CACHE_DIR" in told


def test_a_failed_write_leaves_the_old_plan_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(FINGERPRINT, PLAN, SAMPLES, tmp_path)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    told = store(FINGERPRINT, Plan((), "measured"), SAMPLES, tmp_path)
    assert told is not None
    assert "No space left" in told
    assert len(list(tmp_path.iterdir())) == 1
    assert load(FINGERPRINT, tmp_path) == Cached(replace(PLAN, origin="cached"), SAMPLES)


def test_the_plans_used_last_are_kept(tmp_path: Path) -> None:
    first = replace(FINGERPRINT, revision="first")
    others = (replace(FINGERPRINT, revision=str(i)) for i in range(FILES_KEPT - 1))
    for i, stored in enumerate((first, *others)):
        store(stored, PLAN, SAMPLES, tmp_path)
        os.utime(tmp_path / f"{stored.digest()}.json", (1000 + i, 1000 + i))
    abandoned = tmp_path / ".abandoned-x1.json"
    abandoned.write_text("{")
    os.utime(abandoned, (500, 500))
    assert isinstance(load(first, tmp_path), Cached)
    store(FINGERPRINT, PLAN, SAMPLES, tmp_path)
    assert len(list(tmp_path.iterdir())) == FILES_KEPT
    assert not abandoned.exists()
    assert isinstance(load(first, tmp_path), Cached)
    assert isinstance(load(replace(FINGERPRINT, revision="0"), tmp_path), Miss)
    assert isinstance(load(replace(FINGERPRINT, revision="1"), tmp_path), Cached)


def test_readers_beside_writers_see_whole_plans_only(tmp_path: Path) -> None:
    store(FINGERPRINT, PLAN, SAMPLES, tmp_path)
    plans = (PLAN, Plan((PlanRow(64, 2),), "measured"))
    writers = [
        threading.Thread(target=lambda p=plan: [store(FINGERPRINT, p, SAMPLES, tmp_path) for _ in range(50)])
        for plan in plans
    ]
    for writer in writers:
        writer.start()
    seen = [load(FINGERPRINT, tmp_path) for _ in range(100)]
    for writer in writers:
        writer.join()
    whole = [Cached(replace(plan, origin="cached"), SAMPLES) for plan in plans]
    assert all(found in whole for found in seen)


@pytest.mark.parametrize("plan", [Plan(), forced(4), replace(PLAN, origin="cached")])
def test_only_what_was_measured_is_stored(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only a measured plan"):
        store(FINGERPRINT, plan, SAMPLES, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_folder_is_under_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVORUM_CACHE_DIR", str(tmp_path))
    assert store(FINGERPRINT, PLAN, SAMPLES) is None
    assert default_folder() == tmp_path / "overlap-plans"
    assert isinstance(load(FINGERPRINT), Cached)
    monkeypatch.delenv("KVORUM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "kvorum" / "overlap-plans"


@pytest.mark.parametrize(
    ("probes", "agrees"),
    [
        ({}, True),
        ({256: 2.5e-3, 1024: 12.9e-3}, True),
        ({1024: 7.8e-3}, True),
        ({1024: 13.1e-3}, False),
        ({1024: 7.6e-3}, False),
        ({512: 5e-3}, True),  # between the samples
        ({512: 50e-3}, False),
        ({256: 2.5e-3, 1024: float("inf")}, False),
        ({1024: float("nan")}, False),
        ({1024: 0.0}, False),
    ],
)
def test_a_link_is_the_same_while_probes_agree_with_the_samples(
    probes: dict[int, float], agrees: bool
) -> None:
    assert (same_link(SAMPLES, probes) is None) == agrees


def test_a_changed_link_is_told_in_figures() -> None:
    assert same_link(SAMPLES, {1024: 4e-3}) == (
        "an AllReduce of 1024 tokens takes 4.00 ms, and took 10.00 ms when the plan was measured: "
        "more than 30% apart"
    )
