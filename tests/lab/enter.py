"""`enter.py PID CORES COMMAND...`: run a command in all namespaces of process PID, on these cores.

`nsenter` does it too, but a signal sent to it does not reach the command. Here the two live and die together:
signals of processes are passed on, the exit status comes back, and the command is killed if this process is.
What a terminal sends (Ctrl-C) it sends to its whole foreground group: the command has it already.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_NAMESPACES = ("ipc", "uts", "net", "pid", "mnt")  # mnt last: after it, /proc is another
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_AWAITED = (*_PASSED_ON, signal.SIGCHLD)
_SI_USER = 0
"""`si_code` of a signal that a process sent, or less; the kernel's own have greater ones."""
_PR_SET_PDEATHSIG = 1
_NOT_FOUND = 127


def main() -> None:
    """Never returns normally: exits with the command's status, or by the signal that ended it."""
    pid, cores, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    folder = os.getcwd()  # noqa: PTH109 - entering another mount namespace resets it
    _enter(pid)
    with contextlib.suppress(FileNotFoundError):
        os.chdir(folder)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)  # none may be lost around the fork
    child = os.fork()
    if child == 0:
        _execute(cores, command)
    code = _awaited(child)
    if code < 0:
        if -code in _PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def _awaited(child: int) -> int:
    """The exit code of the child, to which signals are passed on until it ends."""
    while True:
        received = signal.sigwaitinfo(_AWAITED)
        if received.si_signo != signal.SIGCHLD:
            if received.si_code <= _SI_USER:
                os.kill(child, received.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)


def _enter(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in _NAMESPACES]
    for name, file in zip(_NAMESPACES, files, strict=True):
        if libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the {name} namespace of process {pid}")


def _execute(cores: str, command: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        os._exit(_NOT_FOUND)


if __name__ == "__main__":
    main()
