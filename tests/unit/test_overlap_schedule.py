"""The order of a pass in chunks, checked by running it on the plainest model of data flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from workers.overlap.plan import CHUNK_COUNTS
from workers.overlap.schedule import Action, Op, bounds, forward, layer, tail

LAYERS = st.integers(1, 4)
CHUNKS = st.sampled_from(CHUNK_COUNTS)
REDUCES = (Action.REDUCE_ATTENTION, Action.REDUCE_MLP)
AWAITS = (Action.AWAIT_ATTENTION, Action.AWAIT_MLP)
REDUCE_OF = dict(zip(AWAITS, REDUCES, strict=True))

# What each operation needs to have happened to the same tokens just before it.
DENSE_CHAIN = (
    Action.QKV,
    Action.ATTENTION,
    Action.O_PROJ,
    Action.REDUCE_ATTENTION,
    Action.AWAIT_ATTENTION,
    Action.MLP,
    Action.REDUCE_MLP,
    Action.AWAIT_MLP,
)
MOE_CHAIN = DENSE_CHAIN[:6]


def of_chunk(ops: tuple[Op, ...], chunk: int) -> list[Action]:
    """What happens to the tokens of one chunk, in order."""
    return [op.action for op in ops if op.chunk in (chunk, None)]


@settings(deadline=None)
@given(LAYERS, CHUNKS, st.booleans())
def test_each_chunk_goes_through_every_operation_of_every_layer_in_order(
    layers: int, chunks: int, mlp_chunked: bool
) -> None:
    ops = forward(layers, chunks, mlp_chunked)
    chain = DENSE_CHAIN if mlp_chunked else MOE_CHAIN
    for chunk in range(chunks):
        assert of_chunk(ops, chunk) == [*chain * layers, Action.NORM]


@settings(deadline=None)
@given(LAYERS, CHUNKS, st.booleans())
def test_every_all_reduce_is_awaited_once_and_before_the_same_buffer_is_reduced_again(
    layers: int, chunks: int, mlp_chunked: bool
) -> None:
    in_flight: Counter[Op] = Counter()
    for op in forward(layers, chunks, mlp_chunked):
        if op.action in REDUCES:
            in_flight[op] += 1
            assert in_flight[op] == 1
        elif op.action in AWAITS:
            in_flight[Op(REDUCE_OF[op.action], op.chunk)] -= 1
            assert in_flight[Op(REDUCE_OF[op.action], op.chunk)] == 0
    assert not +in_flight


@settings(deadline=None)
@given(LAYERS, CHUNKS, st.booleans())
def test_attention_is_the_barrier_of_all_chunks(layers: int, chunks: int, mlp_chunked: bool) -> None:
    projected: set[int] = set()
    in_flight = 0
    for op in forward(layers, chunks, mlp_chunked):
        in_flight += (op.action in REDUCES) - (op.action in AWAITS)
        if op.action is Action.QKV:
            projected |= set(range(chunks)) if op.chunk is None else {op.chunk}
        elif op.action is Action.ATTENTION:
            assert projected == set(range(chunks))
            assert in_flight == 0
            projected = set()


@settings(deadline=None)
@given(LAYERS, CHUNKS, st.booleans())
def test_all_reduces_are_awaited_in_the_order_in_which_they_are_issued(
    layers: int, chunks: int, mlp_chunked: bool
) -> None:
    ops = forward(layers, chunks, mlp_chunked)
    issued = [op for op in ops if op.action in REDUCES]
    awaited = [Op(REDUCE_OF[op.action], op.chunk) for op in ops if op.action in AWAITS]
    assert awaited == issued


@settings(deadline=None)
@given(LAYERS, CHUNKS, st.booleans())
def test_a_reduce_is_issued_right_after_its_matmul_and_awaited_right_before_its_use(
    layers: int, chunks: int, mlp_chunked: bool
) -> None:
    ops = forward(layers, chunks, mlp_chunked)
    for before, op, after in zip(ops, ops[1:], ops[2:], strict=False):
        if op.action in REDUCES:
            assert before.chunk == op.chunk
            assert before.action in (Action.O_PROJ, Action.MLP)
        if op.action in AWAITS and mlp_chunked:
            assert after.chunk == op.chunk
            assert after.action in (Action.MLP, Action.QKV, Action.NORM)


def test_between_issue_and_await_the_other_chunks_compute() -> None:
    ops = forward(2, 4)
    for reduce, wait in (
        (Action.REDUCE_ATTENTION, Action.AWAIT_ATTENTION),
        (Action.REDUCE_MLP, Action.AWAIT_MLP),
    ):
        for chunk in range(4):
            start = ops.index(Op(reduce, chunk))
            between = ops[start : ops.index(Op(wait, chunk), start)]
            others = {op.chunk for op in between if op.action in (Action.O_PROJ, Action.MLP, Action.QKV)}
            assert others == set(range(4)) - {chunk}


@settings(deadline=None)
@given(LAYERS, CHUNKS, st.booleans(), st.lists(st.integers(1, 8192), min_size=2, max_size=4))
def test_ranks_issue_the_same_collectives_whatever_sizes_they_see_first(
    layers: int, chunks: int, mlp_chunked: bool, history: list[int]
) -> None:
    def issued(ops: tuple[Op, ...]) -> list[Op]:
        return [op for op in ops if op.action in REDUCES]

    reference = issued(forward(layers, chunks, mlp_chunked))
    for tokens in history:
        bounds(tokens, chunks)
        assert issued(forward(layers, chunks, mlp_chunked)) == reference


def test_one_layer_in_two_chunks_reads_as_in_the_design() -> None:
    assert [f"{op.action}{'' if op.chunk is None else op.chunk}" for op in layer(2, first=False)] == [
        *("await_mlp0", "qkv0", "await_mlp1", "qkv1", "attention"),
        *("o_proj0", "reduce_attention0", "o_proj1", "reduce_attention1"),
        *("await_attention0", "mlp0", "reduce_mlp0", "await_attention1", "mlp1", "reduce_mlp1"),
    ]


def test_a_mixture_of_experts_cuts_only_o_proj() -> None:
    cut = {op.action for op in forward(3, 4, mlp_chunked=False) if op.chunk is not None}
    assert cut == {Action.O_PROJ, Action.REDUCE_ATTENTION, Action.AWAIT_ATTENTION}


def test_a_pass_is_its_layers_and_its_tail() -> None:
    for mlp_chunked in (True, False):
        first, other = (layer(3, first=first, mlp_chunked=mlp_chunked) for first in (True, False))
        assert forward(3, 3, mlp_chunked) == (*first, *other, *other, *tail(3, mlp_chunked))


@pytest.mark.parametrize(
    "call",
    [
        lambda: layer(0, first=True),
        lambda: tail(0),
        lambda: forward(0, 2),
        lambda: forward(2, 0),
        lambda: bounds(0, 1),
        lambda: bounds(8, 0),
        lambda: bounds(8, 2, multiple=0),
    ],
)
def test_nothing_to_cut_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"not 0|cannot cut"):
        call()


SIZES = st.integers(1, 20_000)
MULTIPLES = st.sampled_from((1, 2, 3, 4, 7, 16, 32, 128))


@settings(deadline=None)
@given(SIZES, st.integers(1, 12), MULTIPLES)
@example(5, 2, 2)
@example(33 * 4 - 1, 4, 32)
def test_bounds_cover_all_tokens_and_no_chunk_has_one_row(tokens: int, chunks: int, multiple: int) -> None:
    cuts = bounds(tokens, chunks, multiple)
    assert [start for start, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == tokens
    assert all(end - start >= min(2, tokens) for start, end in cuts)
    assert len(cuts) == max(1, min(chunks, tokens // 2))


@settings(deadline=None)
@given(SIZES, st.integers(1, 12), MULTIPLES)
def test_bounds_are_whole_units_where_all_chunks_can_have_one(
    tokens: int, chunks: int, multiple: int
) -> None:
    cuts = bounds(tokens, chunks, multiple)
    if tokens >= len(cuts) * multiple:
        assert all(start % multiple == 0 for start, _ in cuts)


@settings(deadline=None)
@given(SIZES, st.integers(1, 12), MULTIPLES)
def test_no_chunk_is_more_than_a_unit_off_the_even_share(tokens: int, chunks: int, multiple: int) -> None:
    cuts = bounds(tokens, chunks, multiple)
    unit = multiple if tokens >= len(cuts) * multiple else 1
    assert all(abs((end - start) - tokens / len(cuts)) <= unit for start, end in cuts)


@pytest.mark.parametrize(
    ("tokens", "chunks", "rows"),
    [
        (1024, 4, [256] * 4),
        (1024, 6, [160, 192, 160, 160, 192, 160]),
        (1000, 3, [320, 352, 328]),
        (129, 4, [32, 32, 32, 33]),
        (127, 4, [32, 32, 31, 32]),
        (8, 4, [2, 2, 2, 2]),
        (7, 4, [2, 3, 2]),
        (3, 8, [3]),
        (1, 2, [1]),
    ],
)
def test_bounds_by_example(tokens: int, chunks: int, rows: list[int]) -> None:
    assert [end - start for start, end in bounds(tokens, chunks)] == rows
