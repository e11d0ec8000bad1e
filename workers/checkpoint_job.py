"""The heavy steps of preparing a model, each in a child process: `python -m workers.checkpoint_job`.

A child, because torch and transformers would stay in the caller for good, and because a child that
is killed (by the user, by the kernel for memory) takes nothing else with it. The step arrives as one
line of JSON on stdin; progress, then a result or an error, leave as lines of JSON on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from workers.checkpoint_cache import CheckpointError, Progress

Step = Literal["convert", "pad", "bundle"]

COMMAND = ("-m", "workers.checkpoint_job")
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # everything is on disk by now
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
}


def run_step(step: Step, arguments: dict[str, Any], progress: Progress) -> None:
    """Run one step in a child and wait for it; a caller who is interrupted takes the child along.

    Raises:
        CheckpointError: the step failed, or its process ended without a word.
    """
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *COMMAND]
    with tempfile.TemporaryFile("w+") as stderr:
        child = subprocess.Popen(  # noqa: S603 (our own module)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True
        )
        try:
            failure = _follow(child, {"step": step, **arguments}, progress)
        finally:
            child.kill()  # no effect on one that has ended
            child.wait()
        if failure is None and child.returncode != 0:
            failure = _silent_death(step, arguments, child.returncode, stderr)
    if failure is not None:
        raise CheckpointError(failure)


def _follow(child: subprocess.Popen[str], job: dict[str, Any], progress: Progress) -> str | None:
    """Feed the child, pass its progress on, and return its error if it names one."""
    if child.stdin is None or child.stdout is None:
        raise RuntimeError("the child's pipes were not opened")
    try:
        with child.stdin as stdin:
            stdin.write(json.dumps(job))
    except BrokenPipeError:
        pass  # it died at once: its exit status tells more
    failure = None
    with child.stdout as stdout:
        for line in stdout:
            message = json.loads(line)
            if "error" in message:
                failure = str(message["error"])
            else:
                progress(message["stage"], float(message["fraction"]))
    child.wait()
    return failure


def _silent_death(step: Step, arguments: dict[str, Any], code: int, stderr: Any) -> str:
    how = f"with exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    hint = "; is there enough free memory?" if code == -signal.SIGKILL else ""
    stderr.seek(0)
    last = [line.strip() for line in stderr.read()[-4000:].splitlines() if line.strip()][-1:]
    said = f"; it last said: {last[0]}" if last else ""
    return f"step '{step}' with {arguments} ended {how}{hint}{said}"


def main() -> int:
    """Run the step described on stdin."""
    # Libraries print to stdout as they please; the protocol keeps the original descriptor for itself.
    protocol = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def progress(stage: str, fraction: float) -> None:
        print(json.dumps({"stage": stage, "fraction": fraction}), file=protocol)

    job = json.loads(sys.stdin.read())
    try:
        _run(job, progress)
    except CheckpointError as error:
        print(json.dumps({"error": str(error)}), file=protocol)
        return 1
    except OSError as error:
        reason = f"cannot {job['step']} {job['source']}: {error}; check the free space and the rights"
        print(json.dumps({"error": reason}), file=protocol)
        return 1
    return 0


def _run(job: dict[str, Any], progress: Progress) -> None:
    # Imported per step: each of these brings torch, and only one is needed.
    source, target = Path(job["source"]), Path(job["target"])
    if job["step"] == "convert":
        from workers.gguf import convert_gguf  # noqa: PLC0415

        convert_gguf(source, target, progress)
    elif job["step"] == "pad":
        from workers.padded_checkpoint import pad_checkpoint  # noqa: PLC0415
        from workers.padding import PaddingPlan  # noqa: PLC0415

        pad_checkpoint(source, target, PaddingPlan(**job["plan"]), progress)
    else:
        from workers.tokenizer_bundle import build_bundle  # noqa: PLC0415

        progress("tokenizer", 0.0)
        target.write_bytes(build_bundle(source).SerializeToString(deterministic=True))
        progress("tokenizer", 1.0)


if __name__ == "__main__":
    sys.exit(main())
