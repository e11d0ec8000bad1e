"""Metrics of host and GPUs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fakes_metrics import FakeCollector

from telemetry import gpu
from telemetry.host import watch_host
from telemetry.metrics import Meters


class FakeNvml(SimpleNamespace):
    """A host with two GPUs, the second of which has no power meter."""

    NVML_TEMPERATURE_GPU = 0

    def nvmlInit(self) -> None:  # noqa: N802
        """Works."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:  # noqa: N802
        return b"GPU-%d" % handle

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "H"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=10 << 30, total=80 << 30)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        return 40 + handle

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        if handle:
            raise RuntimeError("not supported")
        return 350_000


def test_processors_and_memory_are_shown() -> None:
    collector = FakeCollector()
    watch_host(collector.meters)
    assert 0 <= collector.value("system.cpu.utilization") <= 1
    used = collector.value("system.memory.usage", system__memory__state="used")
    free = collector.value("system.memory.usage", system__memory__state="free")
    assert used > 0
    assert free > 0


def test_each_gpu_is_shown_with_what_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    collector = FakeCollector()
    gpu.watch(collector.meters)
    second = {"hw__id": "GPU-1", "hw__name": "H", "hw__type": "gpu", "hw__gpu__index": 1}
    assert collector.value("hw.gpu.utilization", **second) == 0.75
    assert collector.value("hw.gpu.memory.usage", **second) == 10 << 30
    assert collector.value("hw.gpu.memory.limit", **second) == 80 << 30
    assert collector.value("hw.temperature", **second) == 41
    (power,) = collector.points("hw.power")
    assert (power.value, power.attributes["hw.id"]) == (350.0, "GPU-0")


@pytest.mark.parametrize("why", ["no binding", "no driver"])
def test_without_nvml_there_are_no_gpu_metrics(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("no driver")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    for name in ("pynvml", "vllm.third_party.pynvml"):
        monkeypatch.setitem(sys.modules, name, None if why == "no binding" else FakeNvml(nvmlInit=fails))
    collector = FakeCollector()
    gpu.watch(collector.meters)
    assert not [name for name in collector.metrics() if name.startswith("hw.")]


def test_vllm_is_not_loaded_for_its_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    gpu.watch(FakeCollector().meters)
    assert "vllm" not in sys.modules


def test_nothing_is_looked_up_where_metrics_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "watch", lambda meters: pytest.fail("looked for GPUs"))
    watch_host(Meters.silent())
