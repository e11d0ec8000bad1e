"""Metrics of this host's NVIDIA GPUs, read through NVML. Where there is no NVML there are no such metrics."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from telemetry.metrics import Meters, Reading
from telemetry.tally import Value

logger = logging.getLogger(__name__)

_BINDINGS = ("pynvml", "vllm.third_party.pynvml")
"""NVIDIA's own; or the copy that vLLM brings, in a process that has loaded vLLM anyway."""


@dataclass(frozen=True)
class Gpu:
    """One device: its handle, and the attributes by which its metrics name it."""

    handle: Any
    attributes: Mapping[str, Value]


def watch(meters: Meters) -> None:
    """Add the gauges of every GPU of this host to a process's metrics; never raises."""
    nvml = _load()
    if nvml is None:
        return
    gpus = _devices(nvml)
    for name, unit, about, read in (
        ("hw.gpu.utilization", "1", "share of time with a kernel running", _utilization),
        ("hw.gpu.memory.usage", "By", "memory in use", _memory_used),
        ("hw.gpu.memory.limit", "By", "memory there is", _memory_total),
        ("hw.temperature", "Cel", "temperature", _temperature),
        ("hw.power", "W", "power drawn", _power),
    ):
        meters.gauge(name, unit, f"GPU: {about}", _reader(nvml, gpus, read))


def _load() -> ModuleType | None:
    for name in _BINDINGS:
        if name.partition(".")[0] == "vllm" and "vllm" not in sys.modules:
            continue
        try:
            nvml = importlib.import_module(name)
            nvml.nvmlInit()
        except ImportError:
            continue
        except Exception as error:  # NVML's errors have no common base that is there without it
            logger.debug("no GPU metrics: %s", error)
            return None
        else:
            return nvml
    return None


def _devices(nvml: Any) -> list[Gpu]:
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        facts: dict[str, Value] = {
            "hw.id": _text(nvml.nvmlDeviceGetUUID(handle)),
            "hw.name": _text(nvml.nvmlDeviceGetName(handle)),
            "hw.type": "gpu",
            "hw.gpu.index": index,
        }
        found.append(Gpu(handle, facts))
    return found


def _reader(nvml: Any, gpus: list[Gpu], read: Callable[[Any, Any], float]) -> Callable[[], list[Reading]]:
    def readings() -> list[Reading]:
        found: list[Reading] = []
        for gpu in gpus:
            try:
                found.append((read(nvml, gpu.handle), gpu.attributes))
            except Exception as error:  # what this device does not tell, or one that fell off the bus
                logger.debug("GPU %s: %s", gpu.attributes["hw.gpu.index"], error)
        return found

    return readings


def _utilization(nvml: Any, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100


def _memory_used(nvml: Any, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetMemoryInfo(handle).used)


def _memory_total(nvml: Any, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetMemoryInfo(handle).total)


def _temperature(nvml: Any, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))


def _power(nvml: Any, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1e3  # of milliwatts


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
