"""A prefix cache that publishes what vLLM's does, and a publisher that loses what a test tells it to."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from workers.kv_messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, Hash

END = (-1).to_bytes(8, "big", signed=True)


def fake_hash(parent: Hash | None, tokens: Sequence[int], extra: Sequence[Any] | None) -> bytes:
    """A block's name that depends on all that vLLM's depends on."""
    return hashlib.sha256(repr((parent, tuple(tokens), extra)).encode()).digest()


def stored(
    tokens: Sequence[int],
    block_size: int = 4,
    parent: Hash | None = None,
    *,
    lora: str | None = None,
    salt: str = "",
    group: int | None = 0,
    kind: str | None = "full_attention",
    medium: str | None = "GPU",
    extra: list[tuple[Any, ...] | None] | None = None,
) -> BlockStored:
    """The event of one request that stored these tokens, whose length is a multiple of the block size."""
    hashes: list[Hash] = []
    extras: list[tuple[Any, ...] | None] = []
    last = parent
    for index in range(len(tokens) // block_size):
        keys = [lora] if lora is not None else []
        if index == 0 and parent is None and salt:
            keys.append(salt)
        extras.append(extra[index] if extra else tuple(keys) or None)
        block = tokens[index * block_size : (index + 1) * block_size]
        last = fake_hash(last, block, extras[-1])
        hashes.append(last)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=list(tokens),
        block_size=block_size,
        medium=medium,
        lora_name=lora,
        extra_keys=extras or None,
        group_idx=group,
        kv_cache_spec_kind=kind,
    )


def removed(*blocks: Hash, group: int | None = 0, medium: str | None = "GPU") -> BlockRemoved:
    return BlockRemoved(block_hashes=list(blocks), medium=medium, group_idx=group)


class FakeBlockPool:
    """Physical blocks, several of which may hold the same content, evicted least recently used first."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self.block_size = block_size
        self._capacity = capacity
        self._blocks: OrderedDict[int, Hash] = OrderedDict()
        self._ids = iter(range(10**9))

    def cached_blocks(self, tokens: Sequence[int], salt: str = "") -> int:
        """Leading blocks of the prompt that a request would find; the last token is always recomputed."""
        held, found = set(self._blocks.values()), 0
        for block in stored(self._whole(tokens), self.block_size, salt=salt).block_hashes:
            if block not in held or (found + 1) * self.block_size >= len(tokens):
                break
            found += 1
        return found

    def run(self, tokens: Sequence[int], salt: str = "", *, duplicate: bool = False) -> list[Event]:
        """A request: reuses its cached prefix, unless `duplicate`, and stores the rest."""
        every = stored(self._whole(tokens), self.block_size, salt=salt)
        hit = 0 if duplicate else self.cached_blocks(tokens, salt)
        for number in [n for n, held in self._blocks.items() if held in every.block_hashes[:hit]]:
            self._blocks.move_to_end(number)
        events: list[Event] = []
        for block in every.block_hashes[hit:]:
            if len(self._blocks) == self._capacity:
                events.append(removed(self._blocks.popitem(last=False)[1]))
            self._blocks[next(self._ids)] = block
        if hit < len(every.block_hashes):
            assert every.extra_keys is not None
            events.append(
                BlockStored(
                    block_hashes=every.block_hashes[hit:],
                    parent_block_hash=every.block_hashes[hit - 1] if hit else None,
                    token_ids=every.token_ids[hit * self.block_size :],
                    block_size=self.block_size,
                    medium="GPU",
                    extra_keys=every.extra_keys[hit:],
                    group_idx=0,
                    kv_cache_spec_kind="full_attention",
                )
            )
        return events

    def reset(self) -> list[Event]:
        self._blocks.clear()
        return [AllBlocksCleared()]

    def distinct(self) -> int:
        return len(set(self._blocks.values()))

    def _whole(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[: len(tokens) // self.block_size * self.block_size]


class FakePublisher:
    """Publishes numbered batches like vLLM's ZmqEventPublisher, or drops them on the way."""

    def __init__(self, endpoints: tuple[str, str]) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(endpoints[0])
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(endpoints[1])
        self.kept: list[tuple[int, bytes]] = []
        self.next = 0
        self.replays = 0
        self._serving = asyncio.create_task(self._serve())

    async def publish(self, *events: Event, lost: bool = False, forgotten: bool = False) -> None:
        """One batch; `lost` on the way to the subscriber, `forgotten` also for a replay."""
        payload = msgspec.msgpack.encode(EventBatch(0.0, list(events)))
        number, self.next = self.next, self.next + 1
        if not forgotten:
            self.kept.append((number, payload))
        if not lost:
            await self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def again(self, number: int) -> None:
        """Send one batch a second time."""
        await self._pub.send_multipart([b"", number.to_bytes(8, "big"), dict(self.kept)[number]])

    async def raw(self, *frames: bytes) -> None:
        """Send whatever a test wants."""
        await self._pub.send_multipart(list(frames))

    def die_silently(self) -> None:
        """Answer no replay any more."""
        self._serving.cancel()

    async def stop(self) -> None:
        self._serving.cancel()
        await asyncio.wait([self._serving])
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.replays += 1
            for number, payload in self.kept:
                if number >= int.from_bytes(start, "big"):
                    frames = [client, b"", b"", number.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([client, b"", b"", END, b""])
