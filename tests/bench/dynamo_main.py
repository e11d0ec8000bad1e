"""The other side of `make bench NAME=router`: Dynamo's bindings, run by the Python that has them.

Standard library and `ai-dynamo-runtime` only. Reads a JSON command a line, answers with a JSON line.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from dynamo.llm import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]


class Side:
    """Their index, and the measurements asked of it."""

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._tree: Any = RadixTree()
        self._sequence: list[int] = []
        self._event = 0

    def hash(self, tokens: int, block: int, count: int) -> dict[str, Any]:
        """Milliseconds of each hash of a prompt, given as the list that the binding takes."""
        prompt = [self._rng.randrange(150_000) for _ in range(tokens)]
        return {"ms": _times(lambda: compute_block_hash_for_seq(prompt, block), count)}

    def fill(self, rows: int, blocks: int, batch: int, others: int) -> dict[str, Any]:
        """Worker r holds (r + 1) / rows of one prompt, stored in batches; `others`: foreign blocks first."""
        self._tree = RadixTree()
        for start in range(0, others, 1000):
            self._store(start // 1000 % rows, self._chain(1000), None)
        chain = self._chain(blocks)
        for row in range(rows):
            depth, parent = blocks * (row + 1) // rows, None
            for start in range(0, depth, batch):
                piece = chain[start : min(start + batch, depth)]
                self._store(row, piece, parent)
                parent = piece[-1][0]
                if others:
                    self._store(row, self._chain(3), None)
        self._sequence = [tokens_hash for _, tokens_hash in chain]
        scores = self._tree.find_matches(self._sequence).scores
        return {"depths": sorted(scores.values())}

    def lookup(self, count: int) -> dict[str, Any]:
        """Milliseconds of each `find_matches`, without turning its result into Python's objects."""
        return {"ms": _times(lambda: self._tree.find_matches(self._sequence), count)}

    def events(self, batch: int, steps: int, kept: int) -> dict[str, Any]:
        """Seconds for so many batches stored and as many removed, by workers that hold `kept` batches."""
        tree = RadixTree()
        held: list[deque[list[tuple[int, int]]]] = [deque() for _ in range(4)]
        todo: list[tuple[int, bytes]] = []
        for step in range(steps + 4 * kept):
            row = step % 4
            chain = self._chain(batch)
            todo.append((row, self._stored(chain, None)))
            held[row].append(chain)
            if len(held[row]) > kept:
                gone = [block for block, _ in reversed(held[row].popleft())]
                todo.append((row, self._serialised({"removed": {"block_hashes": gone}})))
        for row, event in todo[: 4 * kept]:
            tree.apply_event(row, event)
        start = time.perf_counter()
        for row, event in todo[4 * kept :]:
            tree.apply_event(row, event)
        tree.find_matches([1])  # answered after every event before it
        return {"seconds": time.perf_counter() - start}

    def memory(self, blocks: int) -> dict[str, Any]:
        """MiB that the process grows by for so many distinct blocks."""
        tree, before = RadixTree(), _rss()
        for start in range(0, blocks, 1000):
            tree.apply_event(start // 1000 % 64, self._stored(self._chain(1000), None))
        tree.find_matches([1])
        return {"mib": (_rss() - before) / 2**20}

    def _chain(self, blocks: int) -> list[tuple[int, int]]:
        """(block hash, hash of its tokens) of so many blocks."""
        bits = self._rng.getrandbits
        return [(bits(63) | 1, bits(63) | 1) for _ in range(blocks)]

    def _store(self, row: int, chain: list[tuple[int, int]], parent: int | None) -> None:
        self._tree.apply_event(row, self._stored(chain, parent))

    def _stored(self, chain: list[tuple[int, int]], parent: int | None) -> bytes:
        blocks = [{"block_hash": block, "tokens_hash": tokens} for block, tokens in chain]
        return self._serialised({"stored": {"parent_hash": parent, "blocks": blocks}})

    def _serialised(self, data: dict[str, Any]) -> bytes:
        self._event += 1
        return json.dumps({"event_id": self._event, "data": data, "dp_rank": 0}).encode()


def _times(call: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    side = Side()
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(side, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
