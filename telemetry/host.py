"""Metrics of the host that a process runs on: processors, memory, and GPUs where there are any."""

from __future__ import annotations

import psutil

from telemetry import gpu
from telemetry.metrics import Meters, Reading


def watch_host(meters: Meters) -> None:
    """Add the host's gauges to a process's metrics; its resource's host.name says which host that is."""
    if not meters.sent:
        return
    psutil.cpu_percent()  # the first call only marks where the next one measures from
    meters.gauge("system.cpu.utilization", "1", "share of all processors' time in use", _processors)
    meters.gauge("system.memory.usage", "By", "memory by state", _memory)
    gpu.watch(meters)


def _processors() -> list[Reading]:
    """Since the last reading."""
    return [(psutil.cpu_percent() / 100, {})]


def _memory() -> list[Reading]:
    memory = psutil.virtual_memory()
    used = memory.total - memory.available
    return [(used, {"system.memory.state": "used"}), (memory.available, {"system.memory.state": "free"})]
