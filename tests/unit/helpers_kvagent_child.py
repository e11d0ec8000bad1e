"""An agent as a program: serves one folder until it is killed, or its parent ends.

Arguments, as JSON: the folder, what to do, and settings for it:
    serve                   nothing else
    pause_reading {after}   sends so many blocks of each read, then nothing more
    pause_writing           takes a block's first bytes in and goes no further; says "writing" then
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from helpers_kvagent import TOKEN

from workers.kvpool import host_arena
from workers.kvpool.agent import AgentSettings, KvAgent
from workers.kvpool.pull import PullLimits

LONGEST_LIFE_S = 120


def pause_reading(after: int) -> None:
    whole = host_arena.HostArena.read

    def read(self: Any, keys: Any, first: int) -> Any:
        if first >= after:
            time.sleep(LONGEST_LIFE_S)
        return whole(self, keys[: after - first], first)

    host_arena.HostArena.read = read  # type: ignore[method-assign]


def pause_writing() -> None:
    def fill(target: memoryview, part: Any) -> None:
        target[:100] = part.pieces[0][:100]
        print("writing", flush=True)
        time.sleep(LONGEST_LIFE_S)

    host_arena._fill = fill


async def serve(folder: Path) -> None:
    settings = AgentSettings(
        folder,
        "127.0.0.1",
        port_file=folder / "agent-here.port",
        limits=PullLimits(batch_bytes=1),
        read_batch_bytes=1,
    )
    agent = KvAgent(settings, TOKEN)
    print(await agent.start(), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the parent ends
    await agent.stop()


def main() -> None:
    folder, what, more = json.loads(sys.argv[1])
    signal.alarm(LONGEST_LIFE_S)
    {"serve": lambda: None, "pause_reading": pause_reading, "pause_writing": pause_writing}[what](**more)
    asyncio.run(serve(Path(folder)))


if __name__ == "__main__":
    main()
