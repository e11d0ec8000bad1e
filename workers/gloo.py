"""gloo, which carries a CPU shard's AllReduces: kept off shared memory, and given the processor in time."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Literal

_NAMES = ("gloo_", "pt_gloo")
_SLICE_NS = 100_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = "IIQiIQQQ"
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period; see sched_setattr(2)."""

Favour = Literal["real-time", "short slices", "none"]


def keep_off_shared_memory() -> None:
    """Make vLLM's CPU communicator use torch.distributed (gloo). Call it before the model is loaded.

    It decides by comparing shared-memory group names that lack the host's name, so ranks on
    different hosts agree on a segment they do not share, and deadlock.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator  # noqa: PLC0415

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def communication_threads() -> list[int]:
    """Thread ids of gloo's threads in this process, by the names torch gives them."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text()
        except OSError:  # it has just ended
            continue
        if name.startswith(_NAMES):
            found.append(int(task.name))
    return found


def favour_communication() -> Favour:
    """Let gloo's threads preempt others. Returns how: what the kernel and our rights allow.

    They work for microseconds, but the whole link stands still until they have. Beside a thread that
    computes without a pause the kernel lets them wait for milliseconds.

    Real-time round-robin where this process may (root, CAP_SYS_NICE, RLIMIT_RTPRIO); else a short time
    slice, which Linux 6.12 and later takes as a wish for low latency. Call it once the groups exist.
    """
    threads = communication_threads()
    if not threads:
        return "none"
    try:
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
    except ProcessLookupError:
        return favour_communication()
    except OSError:
        return "short slices" if all(_shorten(thread) for thread in threads) else "none"
    return "real-time"


def _shorten(thread: int) -> bool:
    number = _SCHED_SETATTR.get(os.uname().machine)
    if number is None:
        return False
    size = struct.calcsize(_ATTRIBUTES)
    attributes = ctypes.create_string_buffer(struct.pack(_ATTRIBUTES, size, 0, 0, 0, 0, _SLICE_NS, 0, 0))
    return int(ctypes.CDLL(None).syscall(number, thread, attributes, 0)) == 0
