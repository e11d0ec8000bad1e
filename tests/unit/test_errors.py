"""Errors survive the wire with all their details."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from protos import common_pb2
from protos.errors import FieldViolation, KvorumError, from_rpc_error, invalid, to_status

FULL = KvorumError(
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    common_pb2.OVERLOADED,
    "the queue is full",
    (FieldViolation("sampling.n", "too many"), FieldViolation("model", "unknown")),
    retry_after_s=1.5,
    metadata={"replica": "r0"},
)


async def over_the_wire(error: KvorumError | None, plain: tuple[Any, str] | None = None) -> KvorumError:
    """What a client reads when a handler refuses with `error`, or aborts plainly."""

    async def handler(_request: bytes, context: Any) -> bytes:
        if plain is not None:
            await context.abort(*plain)
        assert error is not None
        await context.abort_with_status(to_status(error))
        return b""

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Call": grpc.unary_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_unary("/t.T/Call")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=5)
            return from_rpc_error(caught.value)
    finally:
        await server.stop(None)


def fields(error: KvorumError) -> tuple[Any, ...]:
    parts: tuple[Any, ...] = error.__reduce__()[1]
    return parts


async def test_every_part_of_an_error_arrives() -> None:
    assert fields(await over_the_wire(FULL)) == fields(FULL)


async def test_error_without_details_gets_no_invented_ones() -> None:
    bare = KvorumError(grpc.StatusCode.NOT_FOUND, common_pb2.MODEL_NOT_FOUND, "no such model")
    assert fields(await over_the_wire(bare)) == fields(bare)


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
async def test_every_code_can_be_sent(code: grpc.StatusCode) -> None:
    read = await over_the_wire(KvorumError(code, common_pb2.INTERNAL, "m"))
    assert (read.code, read.reason) == (code, common_pb2.INTERNAL)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, common_pb2.REPLICA_LOST),
        (grpc.StatusCode.DEADLINE_EXCEEDED, common_pb2.DEADLINE_EXCEEDED),
        (grpc.StatusCode.UNAUTHENTICATED, common_pb2.UNAUTHENTICATED),
        (grpc.StatusCode.UNKNOWN, common_pb2.INTERNAL),
    ],
)
async def test_error_of_another_system_keeps_its_code(
    code: grpc.StatusCode, reason: common_pb2.Reason.ValueType
) -> None:
    read = await over_the_wire(None, (code, "plain text"))
    assert (read.code, read.reason, read.message) == (code, reason, "plain text")


def test_invalid_names_the_field_in_message_and_violation() -> None:
    error = invalid("sampling.top_p", "must be in (0, 1]")
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.message == "sampling.top_p: must be in (0, 1]"
    assert error.violations == (FieldViolation("sampling.top_p", "must be in (0, 1]"),)


def test_status_carries_the_reason_in_our_domain() -> None:
    (_, raw), *_ = to_status(FULL).trailing_metadata
    assert error_details_pb2.ErrorInfo.DESCRIPTOR.full_name.encode() in raw
    assert b"OVERLOADED" in raw
    assert b"kvorum" in raw


def test_error_survives_pickling() -> None:
    assert fields(pickle.loads(pickle.dumps(FULL))) == fields(FULL)


def test_error_passes_through_a_context_manager() -> None:
    @contextlib.contextmanager
    def block() -> Iterator[None]:
        yield

    with pytest.raises(KvorumError) as caught, block():
        raise FULL
    assert caught.value is FULL
