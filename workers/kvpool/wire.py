"""Blocks as messages between agents, and messages as blocks again. Pure.

A block travels as the parts of its ranks, in order; a part as pieces of at most `PIECE_BYTES`, which keeps
messages far below gRPC's limit whatever the model. Key and checksum come with a part's first piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from protos import kvpool_pb2
from workers.kvpool.layout import KEY_BYTES, Geometry

PIECE_BYTES: Final = 1 << 20


class MalformedError(Exception):
    """What came is not the blocks that were asked for: the sender does not do what this version does."""


class Part(NamedTuple):
    """One rank's bytes of a block."""

    pieces: list[bytes]
    checksum: int
    """What the sender says; of all pieces together."""


class Block(NamedTuple):
    position: int
    """Among those asked for."""
    key: bytes
    """The engine's."""
    parts: list[Part]
    """By rank."""


def messages(block: Block) -> Iterator[kvpool_pb2.BlockChunk]:
    """Ready to send, in order. The data is copied when a message is made, so make them one by one."""
    for rank, part in enumerate(block.parts):
        offset = 0
        for piece in part.pieces:
            for at in range(0, len(piece), PIECE_BYTES):
                chunk = kvpool_pb2.BlockChunk(block=block.position, rank=rank, offset=offset)
                chunk.data = piece if len(piece) <= PIECE_BYTES else piece[at : at + PIECE_BYTES]
                if not offset:
                    chunk.key, chunk.checksum = block.key, part.checksum
                offset += len(chunk.data)
                yield chunk


class Assembler:
    """Takes messages in the order in which they were sent; holds at most one block.

    Args:
        blocks: as many were asked for.
        shape: of the arena that they are for.
    """

    def __init__(self, blocks: int, shape: Geometry) -> None:
        self._blocks = blocks
        self._shape = shape
        self._index = 0
        self._key = b""
        self._parts: list[Part] = []
        self._pieces: list[bytes] = []
        self._checksum = 0
        self._filled = 0  # bytes of the part that is coming in

    def add(self, chunk: kvpool_pb2.BlockChunk) -> Block | None:
        """The block that this message completes, if it does.

        Raises MalformedError for any that does not go on where the last one ended, or carries more than fits.
        """
        if chunk.block != self._index or self._index >= self._blocks:
            raise self._malformed(f"block {chunk.block} of {self._blocks} came in the place of {self._index}")
        if chunk.rank != len(self._parts) or chunk.offset != self._filled:
            raise self._malformed(
                f"byte {chunk.offset} of rank {chunk.rank} came in the place of byte {self._filled} of rank "
                f"{len(self._parts)}"
            )
        if not 0 < len(chunk.data) <= self._shape.rank_bytes - self._filled:
            raise self._malformed(f"{len(chunk.data)} bytes came for a part of {self._shape.rank_bytes}")
        if not self._filled:
            self._begin(chunk)
        self._pieces.append(chunk.data)
        self._filled += len(chunk.data)
        return self._finish_part() if self._filled == self._shape.rank_bytes else None

    def _begin(self, chunk: kvpool_pb2.BlockChunk) -> None:
        if len(chunk.key) != KEY_BYTES or not chunk.checksum:
            raise self._malformed(f"a key of {len(chunk.key)} bytes and a checksum of {chunk.checksum} came")
        if self._parts and chunk.key != self._key:
            raise self._malformed("the parts of one block have different keys")
        self._key, self._checksum = chunk.key, chunk.checksum

    def _finish_part(self) -> Block | None:
        self._parts.append(Part(self._pieces, self._checksum))
        self._pieces, self._filled = [], 0
        if len(self._parts) < self._shape.ranks:
            return None
        block = Block(self._index, self._key, self._parts)
        self._parts, self._index = [], self._index + 1
        return block

    def _malformed(self, what: str) -> MalformedError:
        return MalformedError(f"{what} (block {self._index}): it is of another version, or another geometry")
