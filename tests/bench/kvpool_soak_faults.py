"""Makes the faults of `kvpool_soak_plan` while the client asks, and says of each what was seen.

A process that is to die at something is stopped when it seems to be at it, looked at, and killed if it is;
else it goes on, and the next try comes.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from tests.bench.kvpool_soak_arena import Held, SeenArena
from tests.bench.kvpool_soak_asking import Asking, SoakError
from tests.bench.kvpool_soak_plan import CAUGHT, KILLS, Fault, Made
from tests.bench.kvpool_soak_processes import hurried, kill, outer_pid, stack, stopped
from tests.lab.lab import Lab

TRY_S: Final = 120.0
"""For one process to be caught at what it is to die at."""
AGENT_TRY_S: Final = 25.0
STALL_S: Final = 8.0
FLIPPED: Final = 8
"""Slots at a time."""
BACK_S: Final = 240.0
APART_S: Final = 30.0
"""From a replica's end to the next one's."""
LEFT_S: Final = 20.0
QUIET_S: Final = 150.0
AGAIN_S: Final = 5.0
"""For requests to be in flight again."""
_NAP_S: Final = 0.0003
_COPYING: Final = "kvorum-pool-copy"
_LOOKED_FOR_S: Final = 60.0
"""After which a shard is killed that has a load at hand, be it in the copy or not."""


class Faults:
    """Acts on a lab's hosts. `arenas`: by host."""

    def __init__(
        self,
        lab: Lab,
        asking: Asking,
        arenas: Mapping[int, SeenArena],
        leases_of_routers: Callable[[], dict[str, int]],
        dice: random.Random,
    ) -> None:
        self._lab = lab
        self._asking = asking
        self._arenas = arenas
        self._leases_of_routers = leases_of_routers
        self._dice = dice
        self._replica_killed_at = 0.0

    def make(self, fault: Fault) -> Made:
        """Whatever becomes of it. Raises SoakError when the cluster does not come back."""
        acts: dict[str, Callable[[Fault], Made]] = {
            "writer shard": self._writer,
            "writer core": self._writer,
            "reader shard": self._reader,
            "reader core": self._reader,
            "agent killed": self._agent,
            "agent stalled": self._agent,
            "flips": self._flip,
            "quiet": self._quiet,
            "host killed": self._host,
        }
        if fault.kind in KILLS:
            time.sleep(max(0.0, self._replica_killed_at + APART_S - time.monotonic()))
        before = self._identity(fault)
        with hurried() if fault.kind in CAUGHT else nullcontext():
            made = acts[fault.kind](fault)
        if not made.done or fault.kind == "host killed":
            return made
        if fault.kind in KILLS:
            self._replica_killed_at = time.monotonic()
        if fault.kind == "agent stalled":
            made.until = time.time()
        try:
            self._asking.wait(lambda: self._back(fault, before), "what it took was back", BACK_S)
            made.until = made.until or time.time()
        except SoakError as error:
            made.back, made.seen = False, f"{made.seen}; {error}"
        return made

    def _identity(self, fault: Fault) -> object:
        """Changes when what the fault kills is there again. None: it kills nothing."""
        host = self._lab.hosts[fault.host]
        if fault.kind in KILLS:
            return self._asking.replica(host)["epoch"]
        return self._asking.agent(host)["pid"] if fault.kind == "agent killed" else None

    def _back(self, fault: Fault, before: object) -> bool:
        return (before is None or self._identity(fault) != before) and self._asking.ready()

    def _writer(self, fault: Fault) -> Made:
        """The shard or EngineCore of a host, while the shard writes slots."""
        arena, owner, pid = self._victim(fault)
        began: dict[Held, bytes] = {}
        until, tries = time.monotonic() + TRY_S, 0
        while time.monotonic() < until:
            slots = arena.unsealed(owner)
            began = {held: began.get(held) or arena.beginning(held.slot) for held in slots}
            if not _begun(arena, began):
                time.sleep(_NAP_S)
                continue
            tries += 1
            with stopped(pid):
                left = {held: began[held] for held in arena.unsealed(owner) if held in began}
                if number := _begun(arena, left):
                    made = self._made(fault)
                    kill(pid)
                    made.seen = f"{number} of {len(left)} unsealed slots were partly or wholly written"
                    return _said(made, tries)
            began = {}
        return self._not_made(fault, f"no writer was caught in {tries} tries, {TRY_S:.0f} s")

    def _reader(self, fault: Fault) -> Made:
        """The EngineCore of a host while it has leases, or its shard in the copy from a leased slot."""
        arena, owner, pid = self._victim(fault)
        began, tries = time.monotonic(), 0
        while time.monotonic() < began + TRY_S:
            if not arena.leased(owner):
                time.sleep(_NAP_S)
                continue
            if fault.kind == "reader shard":
                time.sleep(self._dice.uniform(0.0, 0.01))
            tries += 1
            with stopped(pid):
                time.sleep(0.05)  # what it has said already is heard: such leases are given back
                if not (slots := arena.leased(owner)):
                    continue
                where = ""
                if fault.kind == "reader shard":
                    where = stack(pid, _COPYING)
                    hurry = time.monotonic() > began + _LOOKED_FOR_S
                    if "_load" not in where and not hurry:
                        continue
                made = self._made(fault)
                kill(pid)
                made.seen = f"{len(slots)} slots leased" + (f"; copying thread in {where}" if where else "")
                return _said(made, tries)
        return self._not_made(fault, f"no reader was caught in {tries} tries, {TRY_S:.0f} s")

    def _agent(self, fault: Fault) -> Made:
        """Killed, or stopped for a while; while it has leases or writes slots, if it is seen at that."""
        host = self._lab.hosts[fault.host]
        arena, inner = self._arenas[fault.host], int(self._asking.agent(host)["pid"])
        pid = outer_pid(host, inner)
        if pid is None:
            return self._not_made(fault, f"its process {inner} was not found")
        until, tries = time.monotonic() + AGENT_TRY_S, 0
        while True:
            owner = arena.entry(inner)
            late = time.monotonic() > until
            if not late and (owner is None or not (arena.leased(owner) or arena.unsealed(owner))):
                time.sleep(_NAP_S)
                continue
            tries += 1
            with stopped(pid):
                leased = arena.leased(owner) if owner is not None else []
                written = arena.unsealed(owner) if owner is not None else []
                if not (leased or written or late):
                    continue
                made = self._made(fault)
                made.seen = f"{len(leased)} slots leased, {len(written)} being written"
                if fault.kind == "agent killed":
                    kill(pid)
                else:
                    time.sleep(STALL_S)
                    made.seen += f"; stopped for {time.time() - made.at:.1f} s"
                return _said(made, tries)

    def _flip(self, fault: Fault) -> Made:
        made = self._made(fault)
        slots = self._arenas[fault.host].flip(self._dice, FLIPPED)
        made.done, made.seen = len(slots) == FLIPPED, f"a byte in each of {len(slots)} ready slots"
        return made

    def _quiet(self, fault: Fault) -> Made:
        """Let all requests end, and look for what is held nevertheless, on every host."""
        made = self._made(fault)
        self._asking.pause(QUIET_S)
        made.leaks = self.leaks()
        made.done, made.seen = True, ", ".join(f"{name} {count}" for name, count in made.leaks.items())
        self._asking.go()
        time.sleep(AGAIN_S)
        return made

    def leaks(self) -> dict[str, int]:
        """In the arenas and routers, now that nothing is asked."""
        found: dict[str, int] = {}
        for index, arena in self._arenas.items():
            left = arena.left(LEFT_S)
            found[f"leases on host {index}"] = left.leases
            found[f"slots being written on host {index}"] = left.writing
            found[f"violations on host {index}"] = len(left.violations)
            for violation in left.violations:
                print(f"host {index}: {violation}", file=sys.stderr, flush=True)
        until = time.monotonic() + LEFT_S
        while any((routers := self._leases_of_routers()).values()) and time.monotonic() < until:
            time.sleep(1.0)
        return found | routers

    def _host(self, fault: Fault) -> Made:
        host = self._lab.hosts[fault.host]
        self._asking.wait(lambda: self._asking.replica(host)["sequences"] > 1, "its replica worked", BACK_S)
        made = self._made(fault)
        its = self._asking.replica(host)["sequences"]
        host.power_off()
        made.done, made.seen = not host.alive, f"{its} sequences were on its replica"
        return made

    def _victim(self, fault: Fault) -> tuple[SeenArena, int, int]:
        """Its arena, its EngineCore's entry there, and the process to be killed. Raises SoakError."""
        host, arena = self._lab.hosts[fault.host], self._arenas[fault.host]
        replica = self._asking.replica(host)
        owner = arena.entry(replica["core_pid"])
        inner = replica["shard_pids"][0] if fault.kind.endswith("shard") else replica["core_pid"]
        pid = outer_pid(host, inner)
        if owner is None or pid is None:
            raise SoakError(f"{fault.name}: process {inner} or its entry was not found: {replica}")
        return arena, owner, pid

    def _made(self, fault: Fault) -> Made:
        return Made(fault, time.time(), in_flight=self._asking.in_flight)

    def _not_made(self, fault: Fault, why: str) -> Made:
        return Made(fault, time.time(), seen=why, in_flight=self._asking.in_flight)


def arena_of(lab: Lab, index: int, folder: Path) -> SeenArena:
    """The only one of a host. Raises SoakError."""
    found = list(lab.hosts[index].path(folder).glob("*.arena"))
    if len(found) != 1:
        raise SoakError(f"host {index} has {len(found)} arenas in {folder}, and should have one")
    return SeenArena(found[0])


def _begun(arena: SeenArena, began: Mapping[Held, bytes]) -> int:
    """How many slots' beginnings are not what they were."""
    return sum(arena.beginning(held.slot) != before for held, before in began.items())


def _said(made: Made, tries: int) -> Made:
    made.done = True
    made.seen += f" (try {tries})"
    return made
