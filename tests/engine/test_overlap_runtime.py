"""Which path a step takes, and what a shard says of it, over fakes: no engine is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context

from workers.overlap import attach as attaching
from workers.overlap import decoder
from workers.overlap import runtime as runtimes
from workers.overlap.channel import ChannelClock
from workers.overlap.meter import CpuMeter
from workers.overlap.models import OverlappedLlama
from workers.overlap.plan import Plan, PlanRow, forced
from workers.overlap.report import StepRecord
from workers.overlap.runtime import Runtime

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MEASURED = Plan((PlanRow(64, 1), PlanRow(128, 2), PlanRow(256, 4)), "measured")


class FakeChannel:
    """Never used: these decoders have no layers to reduce."""

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        raise AssertionError(f"nobody is to reduce {tuple(tensor.shape)}")


class FakeLayers:
    """Names the path it was on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.split: list[tuple[int, int]] = []
        monkeypatch.setattr(decoder, "run", self._run)

    def _run(self, _decoder: Any, _channel: Any, hidden: Any, _positions: Any, chunks: int) -> str:
        self.split.append((len(hidden), chunks))
        return "split"


class FakeObserver:
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)


class FakeModel:
    """As a *ForCausalLM of vLLM."""

    def __init__(self, **inner: Any) -> None:
        self.model = SimpleNamespace(**inner)

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids), 4)


def runtime_of(mode: str, *, why_stock: str = "", observer: FakeObserver | None = None) -> Runtime:
    return Runtime(
        rank=1,
        mode=mode,
        model="LlamaForCausalLM",
        collective="gloo",
        meter=CpuMeter(ChannelClock(), observer),
        decoder=None if why_stock else SimpleNamespace(layers=()),  # type: ignore[arg-type]
        channel=None if why_stock else FakeChannel(),
        why_stock=why_stock,
    )


def step(runtime: Runtime, tokens: int, model: FakeModel | None = None, **inputs: Any) -> str:
    """Which path a step of so many tokens takes."""
    runtime.meter.expect((("request", tokens),))
    given = {"input_ids": torch.zeros(tokens, dtype=torch.long), "positions": torch.arange(tokens)} | inputs
    found: str = runtime.forward(model or FakeModel(), lambda **_inputs: "stock", **given)
    return found


@contextmanager
def context(**changes: Any) -> Iterator[None]:
    with override_forward_context(ForwardContext({}, None, {}, **changes)):
        yield


@pytest.fixture(autouse=True)
def layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLayers]:
    with context():
        yield FakeLayers(monkeypatch)


@pytest.mark.parametrize("chunks", [2, 3, 4, 6, 8])
def test_a_forced_number_of_chunks_is_taken_from_its_threshold_on(chunks: int, layers: FakeLayers) -> None:
    runtime, threshold = runtime_of(str(chunks)), forced(chunks).threshold
    assert threshold is not None
    assert [step(runtime, n) for n in (1, threshold - 1, threshold)] == ["stock", "stock", "split"]
    assert layers.split == [(threshold, chunks)]


@pytest.mark.parametrize("mode", ["off", "1", "auto"])
def test_nothing_is_split_when_switched_off_or_not_measured_yet(mode: str) -> None:
    assert {step(runtime_of(mode), n) for n in (1, 64, 4096)} == {"stock"}


def test_a_measured_plan_is_followed_in_auto_alone(layers: FakeLayers) -> None:
    runtime = runtime_of("off")
    runtime.set_plan(MEASURED, "measured in 1.0 s")
    assert step(runtime, 4096) == "stock"
    runtime.set_mode("auto")
    assert [step(runtime, n) for n in (64, 127, 128, 255, 256)] == ["stock"] * 2 + ["split"] * 3
    assert layers.split == [(128, 2), (255, 2), (256, 4)]
    assert (runtime.report().path, runtime.report().reason) == ("overlapped", "measured in 1.0 s")
    runtime.set_mode("3")
    step(runtime, 96)
    assert layers.split[-1] == (96, 3)
    runtime.set_mode("auto")
    assert runtime.report().plan == MEASURED


def test_embeddings_that_are_given_are_not_looked_up_again(layers: FakeLayers) -> None:
    given = torch.ones(70, 4)
    assert step(runtime_of("2"), 70, input_ids=None, inputs_embeds=given) == "split"
    assert layers.split == [(70, 2)]


@pytest.mark.parametrize(
    ("model", "inputs", "changes"),
    [
        (FakeModel(), {"intermediate_tensors": object()}, {}),
        (FakeModel(aux_hidden_state_layers=(1, 2)), {}, {}),
        (FakeModel(), {}, {"cudagraph_runtime_mode": CUDAGraphMode.FULL}),
        (FakeModel(), {}, {"cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE}),
        (FakeModel(), {}, {"ubatch_slices": [object()]}),
    ],
    ids=["pipeline stage", "speculative states", "full graph", "piecewise graph", "micro-batches"],
)
def test_steps_that_are_more_than_layers_in_a_row_are_not_split(
    model: FakeModel, inputs: dict[str, Any], changes: dict[str, Any]
) -> None:
    with context(**changes):
        assert step(runtime_of("2"), 512, model, **inputs) == "stock"


def test_steps_are_counted_by_path_and_told_to_the_observer() -> None:
    observer = FakeObserver()
    runtime = runtime_of("4", observer=observer)
    for tokens in (5, 128, 300):
        step(runtime, tokens)
    report = runtime.report()
    assert (report.stock.steps, report.stock.tokens) == (1, 5)
    assert (report.overlapped.steps, report.overlapped.tokens) == (2, 428)
    assert [(r.number, r.tokens, r.chunks) for r in observer.records] == [(1, 5, 1), (2, 128, 4), (3, 300, 4)]
    assert observer.records[0].requests == (("request", 5),)


def test_a_pass_without_requests_is_not_counted() -> None:
    runtime = runtime_of("2")
    runtime.forward(FakeModel(), lambda **_inputs: "stock", positions=torch.arange(8))
    assert (runtime.report().stock.steps, runtime.report().overlapped.steps) == (0, 0)


@pytest.mark.parametrize(
    ("mode", "why_stock", "reason"),
    [
        ("off", "", "switched off"),
        ("auto", "", "not measured yet"),
        ("4", "", "4 chunks as told, not measured"),
        ("4", "LoRA adapters are loaded", "LoRA adapters are loaded"),
        ("auto", "one shard: there is nothing to reduce", "one shard: there is nothing to reduce"),
    ],
)
def test_a_report_gives_the_reason(mode: str, why_stock: str, reason: str) -> None:
    report = runtime_of(mode, why_stock=why_stock).report()
    assert (report.reason, report.rank, report.mode) == (reason, 1, mode)
    assert report.path == ("overlapped" if mode == "4" and not why_stock else "stock")


def test_a_plan_without_gain_says_so() -> None:
    runtime = runtime_of("auto")
    runtime.set_plan(Plan((PlanRow(64, 1), PlanRow(128, 1)), "measured"), "measured in 2.0 s")
    report = runtime.report()
    assert (report.path, report.plan.threshold) == ("stock", None)
    assert "no step gains enough" in report.reason
    assert "measured in 2.0 s" in report.reason


def test_a_replica_that_cannot_be_split_stays_stock_in_every_mode() -> None:
    runtime = runtime_of("4", why_stock="pipeline parallelism")
    runtime.set_plan(MEASURED, "measured")
    for mode in ("auto", "2"):
        runtime.set_mode(mode)
        assert step(runtime, 4096) == "stock"
    assert not runtime.splittable


def settings(**changes: Any) -> Any:
    """A VllmConfig as `attach` reads it."""
    given = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "lora_config": None} | changes
    parallel = SimpleNamespace(
        tensor_parallel_size=given["tensor_parallel_size"],
        pipeline_parallel_size=given["pipeline_parallel_size"],
    )
    model = SimpleNamespace(quantization=None, enforce_eager=False)
    return SimpleNamespace(
        parallel_config=parallel,
        lora_config=given["lora_config"],
        model_config=model,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
        compilation_config=SimpleNamespace(cudagraph_mode=None, max_cudagraph_capture_size=None),
    )


@pytest.mark.parametrize(
    ("changes", "collective", "why"),
    [
        ({"tensor_parallel_size": 1}, "none", "one shard"),
        ({"pipeline_parallel_size": 2}, "gloo", "pipeline parallelism"),
        ({"lora_config": object()}, "gloo", "LoRA adapters are loaded"),
        ({}, "shm", "one host"),
        ({}, "gloo", "not a model that is split"),
    ],
    ids=["one rank", "stages", "LoRA", "shared memory", "another model"],
)
def test_a_replica_that_is_never_split_says_why_and_makes_no_channel(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], collective: str, why: str
) -> None:
    group = SimpleNamespace(
        rank_in_group=0, world_size=1, device=torch.device("cpu"), device_communicator=None
    )
    monkeypatch.setattr(attaching, "get_tp_group", lambda: group)
    monkeypatch.setattr(runtimes, "_current", None)
    # Without the group's `make_sibling_device_group`: asking for one would fail.
    model = FakeModel() if why.startswith("not a model") else object.__new__(OverlappedLlama)
    runtime = attaching.attach(model, settings(**changes), mode="4", collective=collective, observer=None)
    assert why in runtime.report().reason
    assert runtime.report().path == "stock"
    assert runtimes.current() is runtime
    assert runtime.channel is None
