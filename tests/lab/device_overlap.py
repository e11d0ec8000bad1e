"""Checks of the AllReduce overlap on a real GPU; needs torch alone.

    python3 -m tests.lab.device_overlap FOLDER [--device cpu] [--only CHECK ...]

Prints what it finds and writes FOLDER/device_overlap.json after each check. Ends with 0 when all is well,
with 1 when a check failed, with 3 without a GPU. `--device cpu` runs a tiny model on simulated streams, whose
times are simulated as well, and leaves out what only a GPU has.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tests.lab import device_checks, device_ranks, device_times
from tests.lab.device_checks import Results
from tests.lab.device_model import HALF_8B, TINY, Gpu, Shape, Simulated

NO_GPU = 3
LONGEST_S = 225
"""A hang ends the run with a traceback."""
SMALL = Shape(hidden=1024, heads=8, kv_heads=4, head=128, ffn=2048, layers=4)
"""A whole model that two ranks share."""


def checks_on_gpu() -> dict[str, Callable[[], Results]]:
    """By name, the most telling ones first."""
    gpu = Gpu.calibrated()
    sizes = (512, 1024, 2048, 4096, 8192)
    return {
        "right results": partial(device_checks.right_results, gpu, HALF_8B, 200),
        "wrong channels are noticed": partial(device_checks.wrong_channels_are_noticed, gpu, HALF_8B, 20),
        "abandoned memory": partial(device_checks.abandoned_memory, gpu),
        "hiding": partial(device_times.hiding, gpu, HALF_8B, 4, sizes, 7),
        "meter": partial(device_times.meter_agrees, gpu, HALF_8B, 4, 4096),
        "priorities": partial(device_times.priorities, gpu, HALF_8B, 4, 4096, 7),
        "memory": partial(device_times.memory, gpu, HALF_8B, 8, 8192),
        "NCCL, one rank": partial(device_ranks.nccl_alone, HALF_8B),
        "two ranks, gloo": partial(device_ranks.gloo_pair, "cuda", SMALL),
        "two ranks, NCCL": partial(device_ranks.nccl_pair, SMALL),
    }


def checks_on_cpu() -> dict[str, Callable[[], Results]]:
    """Those whose code needs no GPU."""
    simulated = Simulated()
    return {
        "right results": partial(device_checks.right_results, simulated, TINY, 20),
        "wrong channels are noticed": partial(device_checks.wrong_channels_are_noticed, simulated, TINY, 10),
        "hiding": partial(device_times.hiding, simulated, TINY, 1, (32,), 1),
        "meter": partial(device_times.meter_agrees, simulated, TINY, 1, 64),
        "priorities": partial(device_times.priorities, simulated, TINY, 1, 64, 1),
        "two ranks, gloo": partial(device_ranks.gloo_pair, "cpu", TINY),
    }


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", action="append", help="the name of a check; may be repeated")
    chosen = parser.parse_args(arguments)
    on_gpu = chosen.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees none here; run this on a machine that has one")
        return NO_GPU
    return _run(chosen.folder, on_gpu, chosen.only)


def _run(folder: Path, on_gpu: bool, only: list[str] | None) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    found: Results = {
        "device": torch.cuda.get_device_name() if on_gpu else "simulated",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "checks": {},
    }
    print(f"{found['device']}, torch {found['torch']}")
    began, failed = time.monotonic(), False
    checks = checks_on_gpu() if on_gpu else checks_on_cpu()
    for name, check in checks.items():
        if only and name not in only:
            continue
        before = time.monotonic()
        with torch.inference_mode(on_gpu), torch.no_grad():
            outcome = _outcome(check)
        outcome["took_s"] = round(time.monotonic() - before, 1)
        failed |= not outcome["passed"]
        found["checks"][name] = outcome
        found["passed"] = not failed
        (folder / "device_overlap.json").write_text(json.dumps(found, indent=1))
        print(f"{'ok  ' if outcome['passed'] else 'FAIL'} {name} ({outcome['took_s']} s)")
        if name == "hiding" and outcome["passed"]:
            device_times.print_hiding(outcome)
        else:
            shown = {key: value for key, value in outcome.items() if key not in ("passed", "took_s")}
            print(f"     {json.dumps(shown)[:1500]}")
    print(f"{'FAILED' if failed else 'all well'} after {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _outcome(check: Callable[[], Results]) -> Results:
    """One check that fails leaves the others their turn."""
    try:
        return {"passed": True, **check()}
    except Exception as error:
        traceback.print_exc()
        return {"passed": False, "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    sys.exit(main())
