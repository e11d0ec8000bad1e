"""Emulated hosts on one Linux machine: namespaces joined by a switch whose links have a chosen rate.

A host has network, PID, mount, IPC and UTS namespaces of its own, hence its own address, processes, `/tmp`,
`/dev/shm` and name, and runs on cores of its own; other files, the clock and the memory are the machine's.
Nothing of a lab is visible in the machine's own network, and nothing can outlive the process that made it:
all of it hangs on one process, the switch's, that ends with its owner.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from tests.lab.host import NETDEV, Host
from tests.lab.namespaces import (
    FOLDER,
    MARKER,
    PYTHON,
    Keeper,
    LabError,
    entered,
    in_network,
    marked,
    unshared,
)

__all__ = ["Host", "Lab", "LabError", "marked", "missing"]

ROOT = Path(__file__).resolve().parents[2]

_NETWORK = "10.77.0"
_GATEWAY = f"{_NETWORK}.254"
_MOST_HOSTS = 100
_STOP_TIMEOUT_S = 10.0
_PRIVATE = (
    "mount -t tmpfs tmp /tmp && mount -t tmpfs shm /dev/shm && mount -t sysfs sys /sys"
    ' && hostname "$1" && printf "%s" "$2" > /tmp/.hosts && mount --bind /tmp/.hosts /etc/hosts'
    " && { [ ! -e /etc/resolv.conf ] || mount --bind /dev/null /etc/resolv.conf; }"
    ' && shift 2 && exec "$@"'
)
"""A name that is in no file is unknown at once: there is no server to wait for."""
_BURST = "128kb"
"""Two of the largest segments that TCP hands down at once: less would lower the rate."""
_FORWARDING, _DISABLED = "3", "0"
_HOST_KINDS = ("net", "pid", "mount", "ipc", "uts")

_TOOLS = ("sh", "mount", "hostname", "ip", "tc", "bridge", "unshare", "nsenter")
_TRIED = (
    ("bridges", "ip link add trial0 type bridge stp_state 0"),
    ("veth pairs", "ip link add trial1 type veth peer name trial2"),
    (
        "ports of a bridge that drop frames",
        f"ip link set trial1 master trial0 up && bridge link set dev trial1 state {_DISABLED}",
    ),
    (
        "links of a limited rate (tbf)",
        f"tc qdisc replace dev trial2 root tbf rate 1gbit burst {_BURST} latency 100ms",
    ),
)
_TRIAL_TIMEOUT_S = 10.0


def missing() -> str | None:
    """Why no lab can be made here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "emulated hosts need Linux and root"
    tools = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if tools:
        return f"emulated hosts need {', '.join(tools)} (packages iproute2, util-linux, mount and hostname)"
    hidden = [path for path in (ROOT, Path(sys.prefix)) if Path("/tmp") in path.parents]
    if hidden:
        return f"{hidden[0]} is under /tmp, which every emulated host replaces by its own"
    return _refused()


@functools.cache
def _refused() -> str | None:
    """What the kernel does not allow of all that a host takes, tried in namespaces that are thrown away."""
    steps = "".join(f"{{ {step}; }} || {{ echo {name!r}; exit 1; }}\n" for name, step in _TRIED)
    inside = ["sh", "-c", _PRIVATE, "sh", "trial", "", "sh", "-c", steps]
    try:
        tried = subprocess.run(
            [*unshared(*_HOST_KINDS), *inside],
            capture_output=True,
            text=True,
            timeout=_TRIAL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"this system made no new namespaces within {_TRIAL_TIMEOUT_S:.0f} s"
    if not tried.returncode:
        return None
    return f"this system allows no {tried.stdout.strip() or 'new namespaces'}: {tried.stderr.strip()}"


class Lab:
    """Context manager: so many hosts on one switch, each sending at most at `rate`.

    The hosts reach each other at `hosts[i].ip`, or by name, and nothing else.

    Args:
        hosts: how many.
        rate: what one host can send, as `tc` writes it (`1gbit`, `2.5gbit`); None: without limit.
        delay_ms: how long each frame is under way, in either direction. A process that takes its share of the
            machine's cores delays them; with 2.5 Gbit/s and more it may not keep up.
        cores: the cores of each host; by default host i has core i, modulo the cores there are.

    Raises:
        LabError: it cannot be made; `missing()` tells most reasons beforehand.
    """

    def __init__(
        self,
        hosts: int = 2,
        rate: str | None = "1gbit",
        *,
        delay_ms: float = 0.0,
        cores: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if not 1 <= hosts <= _MOST_HOSTS:
            raise ValueError(f"a lab has 1 to {_MOST_HOSTS} hosts, not {hosts}")
        if delay_ms < 0:
            raise ValueError(f"a delay of {delay_ms} ms would be in the past")
        own = sorted(os.sched_getaffinity(0))
        self._cores = cores or [(own[i % len(own)],) for i in range(hosts)]
        if len(self._cores) != hosts:
            raise ValueError(f"{hosts} hosts, but cores for {len(self._cores)}")
        self.id = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.rate = rate
        self.delay_ms = delay_ms
        self.hosts: list[Host] = []
        self._count = hosts
        self._switch: Keeper | None = None
        self._relay: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Lab:
        if reason := missing():
            raise LabError(reason)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the lab. Its interfaces, mounts and namespaces go with the last of them.

        Raises:
            subprocess.TimeoutExpired: one could not be ended; all others were.
        """
        with ExitStack() as ends:  # in reverse order, and all of them even when one raises
            if self._relay is not None:
                ends.callback(_end, self._relay)
            if self._switch is not None:
                ends.callback(self._switch.stop)
            for host in self.hosts:
                ends.callback(host.power_off)

    def set_rate(self, rate: str | None) -> None:
        """Change what each host can send, while traffic flows."""
        for host in self.hosts:
            self._limit(host, rate)
        self.rate = rate

    def partition(self, index: int) -> None:
        """Drop silently all that host `index` sends and is sent; its link stays up."""
        self._on_switch("bridge", "link", "set", "dev", self._port(index), "state", _DISABLED)

    def heal(self, index: int) -> None:
        """Undo `partition`."""
        self._on_switch("bridge", "link", "set", "dev", self._port(index), "state", _FORWARDING)

    def processes(self) -> list[psutil.Process]:
        """All processes of the hosts besides their process 1."""
        return [process for host in self.hosts for process in host.processes()]

    def _build(self) -> None:
        environ = os.environ | {MARKER: self.id}
        keeper = [*PYTHON, str(FOLDER / "keeper.py")]
        self._switch = switch = Keeper([*unshared("net", "pid", "mount"), *keeper], environ)
        self._on_switch("ip", "link", "add", "switch", "type", "bridge", "stp_state", "0")
        self._on_switch("ip", "address", "add", f"{_GATEWAY}/24", "dev", "switch")
        self._on_switch("ip", "link", "set", "switch", "up")
        names = [(f"host{index}", f"{_NETWORK}.{index + 1}") for index in range(self._count)]
        known = "".join(f"{ip} {name}\n" for name, ip in (("localhost", "127.0.0.1"), *names))
        for index, (name, ip) in enumerate(names):
            private = ["sh", "-c", _PRIVATE, "sh", name, known]
            inside = [*unshared(*_HOST_KINDS), *private, *keeper]
            host = Host(
                index,
                name,
                ip,
                tuple(self._cores[index]),
                {
                    MARKER: self.id,
                    "VLLM_HOST_IP": ip,
                    "GLOO_SOCKET_IFNAME": NETDEV,
                    "NCCL_SOCKET_IFNAME": NETDEV,
                    "PYTHONPATH": str(ROOT),
                },
                _keeper=Keeper(entered(switch.pid, (), inside), environ),
            )
            self.hosts.append(host)
            self._cable(host)
            self._limit(host, self.rate)
        if self.delay_ms:
            self._start_delay()

    def _port(self, index: int) -> str:
        """The port of the switch for this host; with a delay, the device behind the detour."""
        return f"late{index}" if self.delay_ms else f"port{index}"

    def _cable(self, host: Host) -> None:
        end, port = f"port{host.index}", self._port(host.index)
        peer = ("peer", "name", NETDEV, "netns", str(host.pid))
        self._on_switch("ip", "link", "add", end, "type", "veth", *peer)
        self._on_switch("ip", "link", "set", end, "up")
        if self.delay_ms:
            self._detour(end, port, f"wait{host.index}")
        self._on_switch("ip", "link", "set", port, "master", "switch", "up")
        in_network(host.pid, "ip", "link", "set", "lo", "up")
        in_network(host.pid, "ip", "address", "add", f"{host.ip}/24", "dev", NETDEV)
        in_network(host.pid, "ip", "link", "set", NETDEV, "up")
        # Without one, Ray takes 127.0.0.1 for the host's address.
        in_network(host.pid, "ip", "route", "add", "default", "via", _GATEWAY)

    def _detour(self, end: str, port: str, wait: str) -> None:
        """What the host sends takes the way over `wait`, where `delay.py` holds it, to `port`."""
        self._on_switch("ip", "link", "add", port, "type", "veth", "peer", "name", wait)
        self._on_switch("ip", "link", "set", wait, "up")
        every_frame = ("u32", "match", "u32", "0", "0", "action", "mirred")
        for device, way, redirect in (
            (end, "ingress", ("ingress", "redirect", "dev", wait)),
            (port, "egress", ("egress", "redirect", "dev", end)),
        ):
            self._on_switch("tc", "qdisc", "add", "dev", device, "clsact")
            self._on_switch(
                "tc", "filter", "add", "dev", device, way, "protocol", "all", *every_frame, *redirect
            )

    def _start_delay(self) -> None:
        assert self._switch is not None
        waits = [f"wait{host.index}" for host in self.hosts]
        relay = [*PYTHON, str(FOLDER / "delay.py"), str(self.delay_ms / 1000), *waits]
        self._relay = subprocess.Popen(
            entered(self._switch.pid, (), relay), stdout=subprocess.PIPE, env=os.environ | {MARKER: self.id}
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != b"ready\n":
            raise LabError("the process that delays frames did not start")

    def _limit(self, host: Host, rate: str | None) -> None:
        shaping = ("tbf", "rate", rate, "burst", _BURST, "latency", "100ms") if rate else ("noqueue",)
        in_network(host.pid, "tc", "qdisc", "replace", "dev", NETDEV, "root", *shaping)

    def _on_switch(self, *command: str) -> None:
        assert self._switch is not None
        in_network(self._switch.pid, *command)


def _end(relay: subprocess.Popen[bytes]) -> None:
    """Wait for the process that the switch's end has ended; kill it if it stays."""
    assert relay.stdout is not None
    relay.stdout.close()
    try:
        relay.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        relay.kill()
        relay.wait(_STOP_TIMEOUT_S)
