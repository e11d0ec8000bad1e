"""Blocks as messages, and what is no block's message."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from helpers_kvagent import block
from helpers_kvpool import PART, RANKS

from protos import kvpool_pb2
from workers.kvpool.checksum import checksum
from workers.kvpool.layout import Geometry
from workers.kvpool.wire import PIECE_BYTES, Assembler, Block, MalformedError, Part, messages

SHAPE = Geometry(8, RANKS, PART)

Chunk = kvpool_pb2.BlockChunk


def chunks(*blocks: Block) -> list[Chunk]:
    return [message for one in blocks for message in messages(one)]


def assembled(sent: Iterable[Chunk], blocks: int = 3, shape: Geometry = SHAPE) -> list[Block]:
    assembler = Assembler(blocks, shape)
    return [whole for chunk in sent if (whole := assembler.add(chunk)) is not None]


def joined(whole: Block) -> list[bytes]:
    return [b"".join(part.pieces) for part in whole.parts]


def test_blocks_come_out_as_they_went_in() -> None:
    sent = [block(10 + index, index) for index in range(3)]
    assert assembled(chunks(*sent)) == sent


def test_a_large_part_travels_in_pieces_that_fit_a_message() -> None:
    size = 2 * PIECE_BYTES + 5
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    large = Block(0, b"k" * 32, [Part([data], checksum(data))])
    sent = chunks(large)
    assert [len(chunk.data) for chunk in sent] == [PIECE_BYTES, PIECE_BYTES, 5]
    assert [chunk.key for chunk in sent] == [b"k" * 32, b"", b""]
    (came,) = assembled(sent, shape=Geometry(2, 1, size))
    assert joined(came) == [data]
    assert checksum(*came.parts[0].pieces) == large.parts[0].checksum


def test_a_block_that_is_cut_off_is_none() -> None:
    sent = chunks(block(1, 0), block(2, 1))
    assert len(assembled(sent[:-1])) == 1


def skip_a_block(sent: list[Chunk]) -> list[Chunk]:
    return sent[RANKS:]


def swap_ranks(sent: list[Chunk]) -> list[Chunk]:
    return [sent[1], sent[0], *sent[2:]]


def too_many_blocks(sent: list[Chunk]) -> list[Chunk]:
    return [*sent, *chunks(block(9, 3))]


def repeat(sent: list[Chunk]) -> list[Chunk]:
    return [sent[0], sent[0], *sent[1:]]


def changed(**fields: object) -> Callable[[list[Chunk]], list[Chunk]]:
    def change(sent: list[Chunk]) -> list[Chunk]:
        for field, value in fields.items():
            setattr(sent[0], field, value)
        return sent

    return change


def second_rank_of_another_block(sent: list[Chunk]) -> list[Chunk]:
    sent[1].key = bytes(32)
    return sent


@pytest.mark.parametrize(
    "spoil",
    [
        skip_a_block,
        swap_ranks,
        too_many_blocks,
        repeat,
        second_rank_of_another_block,
        changed(block=-1),
        changed(rank=7),
        changed(offset=1),
        changed(offset=-1),
        changed(data=b""),
        changed(data=bytes(PART + 1)),
        changed(key=b"short"),
        changed(checksum=0),
    ],
)
def test_what_does_not_go_on_where_the_last_message_ended_is_refused(
    spoil: Callable[[list[Chunk]], list[Chunk]],
) -> None:
    sent = chunks(*(block(10 + index, index) for index in range(3)))
    with pytest.raises(MalformedError):
        assembled(spoil(sent))


@pytest.mark.parametrize(
    "shape", [Geometry(8, RANKS, PART - 1), Geometry(8, RANKS, PART + 1), Geometry(8, 3, PART)]
)
def test_blocks_of_another_geometry_are_refused(shape: Geometry) -> None:
    with pytest.raises(MalformedError):
        assembled(chunks(*(block(10 + index, index) for index in range(3))), shape=shape)


def test_more_ranks_than_the_arena_has_are_refused() -> None:
    with pytest.raises(MalformedError):
        assembled(chunks(block(1, 0)), shape=Geometry(8, 1, PART))
