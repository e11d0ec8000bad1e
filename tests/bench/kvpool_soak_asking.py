"""The soak's client, as the process that makes the faults sees it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.bench.kvpool_soak_answers import Answer
from tests.lab.host import Host

_TELL_EVERY_S = 15.0
_END_S = 10.0


class SoakError(RuntimeError):
    """The soak itself went wrong, or what it waited for did not come."""


class Asking:
    """`kvpool_soak_client` at work on a host. Context manager; its end ends the client."""

    def __init__(self, host: Host, arguments: list[str], environ: Mapping[str, str], known: Path) -> None:
        """`known`: the file of prompts and answers."""
        command = [sys.executable, "-m", "tests.bench.kvpool_soak_client", *arguments]
        pipe = subprocess.PIPE
        self._process = host.popen(command, environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.seen: dict[str, Any] = {"done": 0, "in_flight": 0, "replicas": [], "agents": []}
        self._out = ""
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._follow, self._read)]
        for thread in self._threads:
            thread.start()
        self._say(json.dumps(json.loads(known.read_text())))

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_END_S)

    @property
    def done(self) -> int:
        return int(self.seen["done"])

    @property
    def in_flight(self) -> int:
        return int(self.seen["in_flight"])

    @property
    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.seen.get("replicas", [])
        return found

    def replica(self, host: Host) -> dict[str, Any]:
        """That of a host. Raises SoakError."""
        for replica in self.replicas:
            if replica["node"] == host.ip:
                return replica
        raise SoakError(f"no replica is known on {host.name}")

    def agent(self, host: Host) -> dict[str, Any]:
        """That of a host. Raises SoakError."""
        for agent in self.seen.get("agents", []):
            if agent["node"] == host.ip:
                found: dict[str, Any] = agent
                return found
        raise SoakError(f"no agent is known on {host.name}")

    def ready(self) -> bool:
        """Every replica is, and every agent answers; as of a status asked for later than now - 5 s."""
        fresh = time.time() - self.seen.get("asked_at", 0.0) < 5.0
        replicas, agents = self.replicas, self.seen.get("agents", [])
        return (
            fresh
            and bool(replicas)
            and all(replica["state"] == "READY" for replica in replicas)
            and not any(agent["silence"] for agent in agents)
        )

    def wait(self, condition: Callable[[], bool], what: str, within_s: float) -> None:
        """Raises SoakError when it did not come true, or the client has ended."""
        until = time.monotonic() + within_s
        while not condition():
            if self._process.poll() is not None:
                raise SoakError(f"the client ended with {self._process.returncode} before {what}")
            if time.monotonic() > until:
                raise SoakError(f"{what}: not within {within_s:.0f} s; {self.seen}")
            time.sleep(0.1)

    def pause(self, within_s: float) -> None:
        """Until nothing is in flight. Raises SoakError."""
        self._say("pause")
        time.sleep(1.5)  # what it told before is not to be believed
        self.wait(lambda: not self.in_flight, "all requests had ended", within_s)

    def go(self) -> None:
        self._say("go")

    def end(self, within_s: float) -> list[Answer]:
        """Of all requests, once they have been sent. Raises SoakError."""
        self._say("end")
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise SoakError(f"the client had not ended within {within_s:.0f} s; {self.seen}") from None
        for thread in self._threads:
            thread.join(_END_S)
        if self._process.returncode:
            raise SoakError(f"the client ended with {self._process.returncode}")
        return [Answer.from_list(values) for values in json.loads(self._out)]

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SoakError(f"the client is gone: {self._process.poll()}") from None

    def _follow(self) -> None:
        told_at = time.monotonic()
        for line in self._process.stderr or ():
            try:
                self.seen = json.loads(line)
            except ValueError:
                print(f"  client: {line.rstrip()}", file=sys.stderr, flush=True)
                continue
            if time.monotonic() - told_at > _TELL_EVERY_S:
                told_at = time.monotonic()
                states = ", ".join(f"{each['replica']} {each['state']}" for each in self.replicas)
                print(f"{self.done} done, {self.in_flight} in flight; {states}", file=sys.stderr, flush=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._out = self._process.stdout.read()
