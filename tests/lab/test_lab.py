"""An emulated host is a host: its own processes, files, name and link, and nothing of it stays."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.lab.lab import ROOT, Host, Lab, LabError, marked

pytestmark = pytest.mark.lab

_RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 5000))
print('listening', flush=True)
peer, count, started = listener.accept()[0], 0, 0.0
while data := peer.recv(1 << 20):
    started = started or time.perf_counter()
    count += len(data)
print(count * 8 / (time.perf_counter() - started))
"""
_SEND = """
import socket, sys, time
peer, block, end = socket.create_connection((sys.argv[1], 5000)), bytes(1 << 16), time.monotonic() + 1.0
while time.monotonic() < end:
    peer.sendall(block)
"""
_ECHO = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5001))
print('listening', flush=True)
while True:
    peer = listener.accept()[0]
    peer.sendall(b'here')
    peer.close()
"""
_ASK = """
import socket, sys
print(socket.create_connection((sys.argv[1], 5001), 1.0).recv(4).decode())
"""
_TIME = """
import socket, sys, time
socket.create_connection((sys.argv[1], 5001), 1.0)  # for the address resolution
started = time.perf_counter()
socket.create_connection((sys.argv[1], 5001), 1.0)
print(time.perf_counter() - started)
"""
_OWNER = """
import sys, time
from tests.lab.lab import Lab
with Lab(2) as lab:
    lab.hosts[1].popen(['setsid', 'sleep', '600'])
    lab.hosts[0].run(['sh', '-c', 'nohup sleep 600 >/dev/null 2>&1 &'])
    print(lab.id, flush=True)
    time.sleep(600)
"""
_TELL = """
import signal
for number in (signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda received, _frame: print(signal.Signals(received).name, flush=True))
print('set', flush=True)
while True:
    signal.pause()
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2, "1gbit") as made:
        yield made


def python(host: Host, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return host.run([sys.executable, "-c", source, *arguments], check=False)


def listening(host: Host, source: str) -> subprocess.Popen[str]:
    """Start a server on a host and wait until it listens."""
    server = host.popen([sys.executable, "-c", source, host.ip], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    return server


def bits_per_second(sender: Host, receiver: Host) -> float:
    server = listening(receiver, _RECEIVE)
    assert python(sender, _SEND, receiver.ip).returncode == 0
    return float(server.communicate(timeout=30)[0])


def network(pid: int) -> str:
    """The number of a process's network namespace."""
    return str(Path(f"/proc/{pid}/ns/net").readlink()).strip("net:[]")


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_a_host_sees_only_its_own_processes_files_name_and_core(lab: Lab) -> None:
    first, second = lab.hosts
    held = first.popen(["sleep", "60"])
    first.path("/tmp/only-here").write_text("mine")
    first.run(["sh", "-c", "echo mine > /dev/shm/only-here"])
    try:
        assert first.run(["hostname"]).stdout.strip() == "host0"
        assert first.run(["ls", "/tmp", "/dev/shm"]).stdout.count("only-here") == 2
        assert "only-here" not in second.run(["ls", "/tmp", "/dev/shm"]).stdout
        assert "sleep" in first.run(["ps", "-e"]).stdout
        assert "sleep" not in second.run(["ps", "-e"]).stdout
        assert first.run(["nproc"]).stdout.strip() == str(len(first.cores))
    finally:
        held.kill()
        held.wait()


def test_a_host_finds_the_others_by_name_and_has_a_default_route(lab: Lab) -> None:
    assert lab.hosts[1].run(["getent", "hosts", "host0"]).stdout.split() == [lab.hosts[0].ip, "host0"]
    assert lab.hosts[1].run(["ip", "route", "get", "192.0.2.1"]).stdout.split()[-4] == lab.hosts[1].ip


def test_the_machine_sees_no_interface_of_a_lab() -> None:
    before = psutil.net_if_addrs().keys()
    with Lab(3):
        assert psutil.net_if_addrs().keys() == before


def test_the_exit_status_and_signals_of_a_command_pass_through(lab: Lab) -> None:
    host = lab.hosts[0]
    assert host.run(["sh", "-c", "exit 3"], check=False).returncode == 3
    assert host.run(["no-such-command"], check=False).returncode == 127
    with pytest.raises(LabError, match=r"(?s)host0.*ended with 3.*out of luck"):
        host.run(["sh", "-c", "echo out of luck >&2; exit 3"])
    asked = host.popen(["sh", "-c", "trap 'exit 7' TERM; echo set; while :; do sleep 0.01; done"], stdout=-1)
    assert asked.stdout is not None
    asked.stdout.readline()
    asked.terminate()
    assert asked.wait(10) == 7
    killed = host.popen(["sleep", "60"])
    assert eventually(lambda: any(p.name() == "sleep" for p in host.processes()))
    killed.kill()
    assert killed.wait(10) == -signal.SIGKILL
    assert eventually(lambda: host.processes() == [])


def test_ctrl_c_at_a_terminal_reaches_the_command_once(lab: Lab) -> None:
    terminal, its_end = pty.openpty()
    command = lab.hosts[0].popen(
        [sys.executable, "-c", _TELL],
        stdin=its_end,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        assert command.stdout is not None
        assert command.stdout.readline() == "set\n"
        os.write(terminal, b"\x03")
        assert command.stdout.readline() == "SIGINT\n"
        command.send_signal(signal.SIGUSR1)
        assert command.stdout.readline() == "SIGUSR1\n"
        command.send_signal(signal.SIGINT)
        assert command.stdout.readline() == "SIGINT\n"
    finally:
        command.kill()
        command.wait()
        os.close(terminal)
        os.close(its_end)


@pytest.mark.parametrize(("rate", "bits"), [("100mbit", 1e8), ("1gbit", 1e9)])
def test_a_link_carries_its_rate_and_no_more_in_both_directions(lab: Lab, rate: str, bits: float) -> None:
    lab.set_rate(rate)
    for sender, receiver in (lab.hosts, reversed(lab.hosts)):
        # The lower bound is far below what an idle machine carries, which is 95 %: a busy one may not.
        assert 0.05 * bits < bits_per_second(sender, receiver) < 1.1 * bits


def test_a_rate_can_be_lifted_and_set_while_the_lab_is_in_use(lab: Lab) -> None:
    lab.set_rate("10mbit")
    assert bits_per_second(*lab.hosts) < 13e6
    lab.set_rate(None)
    assert bits_per_second(*lab.hosts) > 13e6
    lab.set_rate("1gbit")


def test_a_delay_holds_each_frame_as_long_and_lets_all_pass() -> None:
    with Lab(2, "1gbit", delay_ms=20) as lab:
        server = listening(lab.hosts[1], _ECHO)
        taken_s = [float(python(lab.hosts[0], _TIME, lab.hosts[1].ip).stdout) for _ in range(5)]
        server.kill()
        server.wait()
        assert min(taken_s) >= 0.04
        assert bits_per_second(*lab.hosts) > 1e6
        lab.partition(1)
        assert python(lab.hosts[0], _ASK, lab.hosts[1].ip).returncode != 0


def test_a_partitioned_host_is_silent_until_it_is_healed(lab: Lab) -> None:
    asking, asked = lab.hosts
    server = listening(asked, _ECHO)
    try:
        assert python(asking, _ASK, asked.ip).stdout == "here\n"
        lab.partition(asked.index)
        assert "timed out" in python(asking, _ASK, asked.ip).stderr
        assert asked.run(["cat", f"/sys/class/net/{asked.netdev}/carrier"]).stdout == "1\n"
        lab.heal(asked.index)
        assert python(asking, _ASK, asked.ip).stdout == "here\n"
    finally:
        server.kill()
        server.wait()


def test_a_host_that_loses_power_takes_its_processes_and_spares_the_others() -> None:
    with Lab(2) as lab:
        lost, spared = (host.popen(["sleep", "60"]) for host in lab.hosts)
        assert eventually(lambda: len(lab.processes()) == 2)
        lab.hosts[0].power_off()
        assert lost.wait(10) == -signal.SIGKILL
        assert not lab.hosts[0].alive
        with pytest.raises(LabError, match="host0 was powered off"):
            lab.hosts[0].run(["true"])
        assert spared.poll() is None
        assert lab.hosts[1].run(["echo", "fine"]).stdout == "fine\n"


def test_an_exception_leaves_nothing() -> None:
    lab = Lab(2)

    def fail_within() -> None:
        with lab:
            lab.hosts[0].popen(["setsid", "sleep", "600"])
            assert eventually(lambda: lab.processes() != [])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_within()
    assert eventually(lambda: marked(lab.id) == [])


def test_a_host_that_fails_to_end_spares_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(2, delay_ms=1)
    lab.__enter__()
    end = Host.power_off

    def end_badly(host: Host) -> None:
        end(host)
        raise ZeroDivisionError

    monkeypatch.setattr(Host, "power_off", end_badly)
    with pytest.raises(ZeroDivisionError):
        lab.close()
    assert eventually(lambda: marked(lab.id) == [])


def test_kill_9_of_the_owner_leaves_nothing() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert owner.stdout is not None
    lab_id = owner.stdout.readline().strip()
    assert eventually(lambda: [process.name() for process in marked(lab_id)].count("sleep") == 2)
    made = {network(process.pid) for process in marked(lab_id) if process.name() == "sleep"}
    owner.kill()
    owner.wait()
    assert len(made) == 2
    assert eventually(lambda: marked(lab_id) == [])
    left = subprocess.run(["lsns", "-t", "net", "-n", "-o", "NS"], capture_output=True, text=True, check=True)
    assert made.isdisjoint(left.stdout.split())


def test_a_lab_that_cannot_be_made_says_why_and_leaves_nothing() -> None:
    lab = Lab(2, "as fast as light")
    with pytest.raises(LabError, match="as fast as light"):
        lab.__enter__()
    assert eventually(lambda: marked(lab.id) == [])


def test_numbers_of_hosts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="not 0"):
        Lab(0)
    with pytest.raises(ValueError, match="in the past"):
        Lab(2, delay_ms=-1)
    with pytest.raises(ValueError, match="cores for 1"):
        Lab(2, cores=[(0,)])
