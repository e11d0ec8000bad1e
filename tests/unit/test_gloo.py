"""gloo's threads get the processor first, and no other thread does."""

from __future__ import annotations

import ctypes
import json
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from workers import gloo

GROUPS = 8

# In a process of its own: the groups' threads, and what is done to them, end there.
SCRIPT = f"""
import json, os, time, torch.distributed as dist
from tests.unit.test_gloo import slice_ns
from workers import gloo

# As a shard is: a thread that was just made cannot run, nor take its name, before its maker sleeps.
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:1]))
nothing = gloo.favour_communication()
store, groups = dist.HashStore(), []
for number in range({GROUPS}):
    groups.append(dist.ProcessGroupGloo(dist.PrefixStore(str(number), store), 0, 1))
done = gloo.favour_communication()
time.sleep(0.3)  # by now even the youngest has its name
print(json.dumps([nothing, done, [slice_ns(t) for t in gloo.communication_threads()], slice_ns(0)]))
"""


def slice_ns(thread: int) -> int:
    """The time slice that this thread has asked for, ns (sched_getattr)."""
    size = struct.calcsize(gloo._ATTRIBUTES)
    buffer = ctypes.create_string_buffer(size)
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, thread, buffer, size, 0) == 0
    return int(struct.unpack(gloo._ATTRIBUTES, buffer.raw)[5])


@pytest.mark.skipif(
    platform.machine() not in gloo._SCHED_SETATTR or gloo._kernel() < gloo._KERNEL,
    reason="short slices need Linux 6.12 on x86-64 or arm64",
)
def test_every_thread_of_gloos_has_a_short_slice_and_no_other_has() -> None:
    """Those of groups made just before, too."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    without_groups, favoured, slices, main = json.loads(done.stdout)
    assert without_groups is True
    if not favoured:
        pytest.skip("this system does not let a process change its threads' slices")
    assert len(slices) >= 3 * GROUPS
    assert set(slices) == {gloo._SLICE_NS}
    assert main != gloo._SLICE_NS


def test_an_older_kernel_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "release", lambda: "5.15.0-91-generic")
    monkeypatch.setattr(gloo, "_shorten", lambda _thread: pytest.fail("asked"))
    assert gloo.favour_communication() is False


def test_kernels_of_all_spellings_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    for release, found in (("6.12.3", (6, 12)), ("6.18.44-fc-v657", (6, 18)), ("7.0-rc1", (7, 0))):
        monkeypatch.setattr(platform, "release", lambda release=release: release)
        assert gloo._kernel()[0] == found[0]
        assert gloo._kernel() >= found
