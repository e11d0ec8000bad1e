"""vLLM's own HTTP server in a process of its own, none of Kvorum in it: what ours is compared with.

It is what `vllm serve` runs for one engine; that command itself cannot start on the CPU distribution, which
goes by another name than the one it looks its version up under.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_S = 300.0

ENGINE_FLAGS = (
    "--enforce-eager",
    "--max-num-seqs=32",
    "--max-num-batched-tokens=512",
    f"--kv-cache-memory-bytes={2**30}",
    "--max-model-len=4096",
    "--enable-prefix-caching",
)
"""What `kvorum up --max-model-len 4096` runs each of its engines with on CPU."""


@contextmanager
def bare_server(model: Path, log: Path, *arguments: str, served_name: str = "smollm2") -> Iterator[str]:
    """Its base URL, without /v1, once it answers; ended with everything it started.

    Raises:
        AssertionError: it ended, or did not answer within START_S; with the end of its log.
    """
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.launchers.api_server.entry",
        f"--model={model}",
        f"--served-model-name={served_name}",
        "--host=127.0.0.1",
        f"--port={port}",
        "--disable-uvicorn-access-log",
        *ENGINE_FLAGS,
        *arguments,
    ]
    environ = dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",  # one core, the one a cluster's first shard gets
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_PLUGINS": "",  # ours is installed beside it
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_it_answers(process, url, log)
        yield url
    finally:
        _end(process)


def _wait_until_it_answers(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(f"{url}/health", timeout=2),
        ):
            return
        time.sleep(0.3)
    raise AssertionError(f"bare vLLM did not serve within {START_S:.0f} s:\n{log.read_text()[-4000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its engine, had it outlived it
    process.wait(timeout=10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
