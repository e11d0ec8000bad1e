"""Processes that share an arena and die in it.

Run as a program, this forks a child for each line it reads (JSON: what to do, the arena's path, a seed) and
answers with the child's process id once the child is where it shall be. Children end with the test's process.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from helpers_kvpool import PATIENT, content, key, keys, read, store, write

from workers.kvpool.arena import Arena
from workers.kvpool.errors import ArenaClosedError, SlotLostError
from workers.kvpool.owners import OwnerKind

BLOCKS = 40
"""Keys that mutating children use."""
LONGEST_LIFE_S = 60


class Children:
    """The parent's side."""

    def __init__(self) -> None:
        folder = Path(__file__).parent
        paths = os.pathsep.join([str(folder), str(folder.parents[1])])
        self._program = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        )

    def start(self, what: str, path: Path, seed: int = 0) -> int:
        """The process id of a child that is ready."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        print(json.dumps([what, str(path), seed]), file=self._program.stdin, flush=True)
        assert select.select([self._program.stdout], [], [], 30)[0], f"no child that can {what}"
        answer = self._program.stdout.readline().split()
        assert answer[1:] == ["ready"], answer
        return int(answer[0])

    def kill(self, child: int) -> None:
        """At once, whatever it does; returns when it is gone."""
        gone = os.pidfd_open(child)
        os.kill(child, signal.SIGKILL)
        assert select.select([gone], [], [], 20)[0]
        os.close(gone)

    def close(self) -> None:
        """Children's children, too."""
        os.killpg(self._program.pid, signal.SIGKILL)
        self._program.communicate(timeout=20)


def ready() -> None:
    os.write(1, b"%d ready\n" % os.getpid())


def mutate(arena: Arena, seed: int) -> None:
    """All that an engine does, in any order, for ever; one with a seed finds damage where there is none."""
    rng = random.Random(seed)
    ready()
    while True:
        start = rng.randrange(BLOCKS)
        some = keys(range(start, start + rng.randrange(1, 6)))
        arena.lookup(some)
        what = rng.random()
        if what < 0.4:
            store(arena, some)
        elif what < 0.5:
            slots = [slot for slot in arena.allocate(some, [0] * len(some)) if slot is not None]
            arena.abandon(slots)
        elif what < 0.6:
            arena.touch(some)
        elif what < 0.65:
            arena.reap()
        else:
            leases = [lease for lease in arena.lease(some) if lease is not None]
            for lease in leases:
                with suppress(SlotLostError):  # somebody else called it corrupt
                    if read(arena, lease, 0) is None or (seed and rng.random() < 0.1):
                        arena.corrupt(*lease)
            arena.release(leases)


def hold(arena: Arena, _: int) -> None:
    """The mutex, in the middle of a mutation, until told to go on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    with arena._guard.changing(20.0):
        table = arena._segment.table.copy()
        arena._segment.table[:] = 7  # half done
        ready()
        signal.sigwait({signal.SIGUSR1})
        arena._segment.table[:] = table
    signal.pause()


def write_half(arena: Arena, _: int) -> None:
    """Dies over the second part of its second block."""
    slots = arena.allocate(keys([0, 1]), [0, 1])
    assert slots[0] is not None
    assert slots[1] is not None
    write(arena, slots[0], key(0))
    write(arena, slots[1], key(1), ranks=[0])
    part = arena.write_part(*slots[1], 1)
    part[: len(part) // 2] = content(key(1), 1)[: len(part) // 2]
    ready()
    signal.pause()


def lease(arena: Arena, _: int) -> None:
    """Dies while it copies."""
    assert None not in arena.lease(keys([0, 1]))
    ready()
    signal.pause()


def fork(arena: Arena, _: int) -> None:
    """Dies, and leaves a child that has inherited all it had open."""
    arena.lease(keys([0, 1]))
    readable, writable = os.pipe()
    if os.fork():
        os.close(writable)
        assert os.read(readable, 1) == b"."
        ready()
        signal.pause()
    signal.alarm(LONGEST_LIFE_S)  # of its own: a fork inherits no alarm
    try:
        arena.lookup([])
    except ArenaClosedError:
        os.write(writable, b".")
    os.close(writable)
    signal.pause()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    for line in sys.stdin:
        what, path, seed = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.alarm(LONGEST_LIFE_S)
            arena = Arena.open(Path(path), timing=PATIENT)
            arena.attach(OwnerKind.ENGINE)
            {"mutate": mutate, "hold": hold, "write_half": write_half, "lease": lease, "fork": fork}[what](
                arena, seed
            )
            os._exit(0)


if __name__ == "__main__":
    main()
