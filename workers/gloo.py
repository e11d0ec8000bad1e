"""gloo, which carries a CPU shard's AllReduces: kept off shared memory, and given the processor in time."""

from __future__ import annotations

import ctypes
import platform
import struct
import time
from pathlib import Path

_NAMES = ("gloo_", "pt_gloo")
_SLICE_NS = 100_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = "IIQiIQQQ"
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period; see sched_setattr(2)."""
_KERNEL = (6, 12)
"""The first Linux that takes a short slice of an ordinary thread as a wish for low latency."""
_NAMING_S = 0.05
_NAMING_ROUNDS = 20


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


def favour_communication() -> bool:
    """Let gloo's threads preempt others, by short time slices. False where the kernel knows no such thing.

    They work for microseconds, but the whole link stands still until they have. Beside a thread that
    computes without a pause the kernel lets them wait for milliseconds. Call it once the groups exist.

    Real-time priority would gain a little more and is not used: gloo's event loop polls a lock that another
    of its threads holds, and a real-time one keeps a lesser one on its core from ever giving it back.
    """
    if _SCHED_SETATTR.get(platform.machine()) is None or _kernel() < _KERNEL:
        return False
    return all(list(map(_shorten, _named_threads())))


def _kernel() -> tuple[int, int]:
    major, minor, *_rest = platform.release().split(".")
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def _named_threads() -> list[int]:
    """All of gloo's threads, once no new one has taken its name for a while: each does when it first runs."""
    found: list[int] = []
    for _round in range(_NAMING_ROUNDS):
        time.sleep(_NAMING_S)
        before, found = found, communication_threads()
        if found == before:
            break
    return found


def _shorten(thread: int) -> bool:
    size = struct.calcsize(_ATTRIBUTES)
    attributes = ctypes.create_string_buffer(struct.pack(_ATTRIBUTES, size, 0, 0, 0, 0, _SLICE_NS, 0, 0))
    call = _SCHED_SETATTR[platform.machine()]
    # A thread that has ended meanwhile needs no favour.
    return int(ctypes.CDLL(None).syscall(call, thread, attributes, 0)) == 0 or not _alive(thread)


def _alive(thread: int) -> bool:
    return Path(f"/proc/self/task/{thread}").exists()
