"""Two hosts' agents over real sockets: what goes between them, and what does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from helpers_kvagent import (
    DIGEST,
    LONG_S,
    TOKEN,
    a_host,
    a_peer,
    block,
    eventually,
    names,
    read,
    ready_numbers,
    spoiled,
    until_ready,
)
from helpers_kvpool import PART, RANKS, assert_ready_blocks_are_true, key

from protos import kvpool_pb2, kvpool_pb2_grpc
from protos.channels import bearer, bind, create_server, open_channel
from workers.kvpool.agent import AgentSettings, KvAgent
from workers.kvpool.pull import PullLimits
from workers.kvpool.transport import pack_names
from workers.kvpool.wire import Block, messages

Chunk = kvpool_pb2.BlockChunk


async def test_blocks_of_one_host_are_copied_to_another(tmp_path: Path) -> None:
    async with a_host(tmp_path / "a", blocks=range(12)) as a, a_host(tmp_path / "b") as b:
        answer = await b.pull(a.address, range(16))
        assert (answer.blocks, answer.bytes) == (12, 12 * RANKS * PART)
        assert answer.failed == f"{a.address} has 12 of 16 blocks only"
        assert list(ready_numbers(b.arena, range(16))) == list(range(12))
        assert assert_ready_blocks_are_true(b.arena) == 12
        assert a.arena.usage().leased == b.arena.usage().leased == 0
        sent, got = await a.agent.report(), await b.agent.report()
        assert (sent.blocks_sent, got.blocks_received, got.blocks_refused, got.pulls) == (12, 12, 0, 0)
        ((arena,), (peer,)) = (got.arenas, got.peers)
        assert (arena.namespace, arena.ready, arena.slots) == (DIGEST, 12, 64)
        assert (peer.agent, peer.blocks, peer.avoided) == (a.address, 12, "")
        assert peer.bytes_per_s > 0


async def test_a_third_host_gets_them_from_the_second(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        a, b, c = [
            await stack.enter_async_context(a_host(tmp_path / host, blocks=range(5) if host == "a" else ()))
            for host in "abc"
        ]
        assert (await b.pull(a.address, range(5))).failed == ""
        assert (await c.pull(b.address, range(5))).failed == ""
        assert assert_ready_blocks_are_true(c.arena) == 5


@pytest.mark.parametrize("read_batch_bytes", [1, 3 * RANKS * PART, 1 << 30])
async def test_a_read_is_the_longest_prefix_whatever_the_batch(tmp_path: Path, read_batch_bytes: int) -> None:
    blocks = [0, 1, 2, 3, 4, 6]
    async with a_host(tmp_path, blocks=blocks, read_batch_bytes=read_batch_bytes) as host:
        chunks = await read(host.address, range(8))
        assert [(chunk.block, chunk.rank) for chunk in chunks] == [
            (n, r) for n in range(5) for r in range(RANKS)
        ]
        assert await read(host.address, [5, 6]) == []


async def test_blocks_stored_and_evicted_since_are_known(tmp_path: Path) -> None:
    async with a_host(tmp_path, slots=4, blocks=range(4)) as host:
        assert len(await read(host.address, range(4))) == 4 * RANKS
        (lease,) = host.arena.lease([key(1)])
        assert lease is not None
        host.arena.corrupt(*lease)
        assert len(await read(host.address, range(4))) == RANKS


async def test_a_damaged_block_is_not_sent_and_is_freed(tmp_path: Path) -> None:
    async with a_host(tmp_path, blocks=range(4)) as host:
        (lease,) = host.arena.lease([key(2)])
        assert lease is not None
        host.arena._segment.part(lease.slot, 1)[7] ^= 1  # a stray write
        host.arena.release([lease])
        assert len(await read(host.address, range(4))) == 2 * RANKS
        assert list(ready_numbers(host.arena, range(4))) == [0, 1, 3]
        assert host.arena.counters().corrupt == 1


def short_key(chunk: Chunk) -> None:
    chunk.key = b"short"


def longer_part(chunk: Chunk) -> None:
    chunk.data = chunk.data + b"x"


def another_block(chunk: Chunk) -> None:
    chunk.block += 1


@pytest.mark.parametrize("spoil", [short_key, longer_part, another_block])
async def test_a_peer_of_another_geometry_is_dropped_and_avoided(
    tmp_path: Path, spoil: Callable[[Chunk], None]
) -> None:
    async def script(_: Any) -> AsyncIterator[Block | Chunk]:
        yield block(0, 0)
        first, *rest = messages(block(1, 1))
        spoil(first)
        for chunk in (first, *rest):
            yield chunk

    async with a_host(tmp_path) as host, a_peer(script) as peer:
        answer = await host.pull(peer, range(4))
        assert answer.blocks == 1
        assert "another geometry" in answer.failed
        assert (await host.agent.report()).blocks_refused == 1
        assert "is not asked" in (await host.pull(peer, range(4))).failed
        assert assert_ready_blocks_are_true(host.arena) == 1


async def test_flipped_bits_are_noticed_and_nothing_false_is_kept(tmp_path: Path) -> None:
    async def script(_: Any) -> AsyncIterator[Block]:
        yield block(0, 0)
        yield spoiled(1, 1)
        yield block(2, 2)

    async with a_host(tmp_path) as host, a_peer(script) as peer:
        answer = await host.pull(peer, range(3))
        assert (answer.blocks, answer.failed) == (
            1,
            f"{peer} sent a block that is not what its checksum says",
        )
        assert list(ready_numbers(host.arena, range(3))) == [0]
        assert host.arena.usage().writing == 0
        report = await host.agent.report()
        assert report.blocks_refused == 1
        assert report.peers[0].avoided == answer.failed
        assert report.peers[0].avoided_for_s == 1.0


async def test_a_host_that_has_not_that_namespace_is_avoided(tmp_path: Path) -> None:
    other = KvAgent(AgentSettings(tmp_path / "empty", "127.0.0.1"), TOKEN)
    address = await other.start()
    try:
        async with a_host(tmp_path / "b") as host:
            assert "no arena of namespace" in (await host.pull(address, range(2))).failed
            assert "is not asked" in (await host.pull(address, range(2))).failed
    finally:
        await other.stop()


async def test_a_peer_that_is_gone_costs_an_answer_and_is_avoided(tmp_path: Path) -> None:
    async with a_host(tmp_path / "a", blocks=range(2)) as a:
        gone = a.address
    async with a_host(tmp_path / "b") as b:
        answer = await b.pull(gone, range(2))
        assert (answer.blocks, answer.failed != "") == (0, True)
        assert "is not asked" in (await b.pull(gone, range(2))).failed


async def test_a_peer_that_falls_silent_is_given_up_before_the_deadline(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def script(_: Any) -> AsyncIterator[Block]:
        try:
            yield block(0, 0)
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with a_host(tmp_path, stall_s=0.3) as host, a_peer(script) as peer:
        answer = await host.pull(peer, range(4))
        assert (answer.blocks, answer.failed) == (1, f"{peer}: nothing came for 0.3 s")
        async with asyncio.timeout(LONG_S):
            await ended.wait()  # the call was cancelled
        assert "is not asked" in (await host.pull(peer, range(4))).failed


async def test_a_replica_that_hangs_up_ends_the_transfer(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def script(_: Any) -> AsyncIterator[Block]:
        try:
            yield block(0, 0)
            await asyncio.Event().wait()
        finally:
            ended.set()

    limits = PullLimits(batch_bytes=1)
    async with a_host(tmp_path, stall_s=LONG_S, limits=limits) as host, a_peer(script) as peer:
        pull = asyncio.create_task(host.pull(peer, range(4)))
        await until_ready(host.arena, 0)
        pull.cancel()
        async with asyncio.timeout(LONG_S):
            await ended.wait()
        await eventually(lambda: host.agent._puller.running == 0)


async def test_a_reader_that_hangs_up_leaves_no_lease_and_no_place_taken(tmp_path: Path) -> None:
    async with a_host(tmp_path, blocks=range(32), read_batch_bytes=1, reads=1) as host:
        for _ in range(5):
            async with open_channel(host.address) as channel:
                stub: Any = kvpool_pb2_grpc.KvAgentStub(channel)
                request = kvpool_pb2.ReadRequest(namespace=DIGEST, router_keys=pack_names(names(range(32))))
                call = stub.Read(request, metadata=bearer(TOKEN), timeout=LONG_S)
                await call.read()
                call.cancel()
            await eventually(lambda: host.agent._servicer._reads == 0)
        assert host.arena.usage().leased == 0
        assert len(await read(host.address, range(32))) == 32 * RANKS


async def refusal(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    code: grpc.StatusCode = error.value.code()
    return code


async def test_nobody_is_served_without_the_token(tmp_path: Path) -> None:
    async with a_host(tmp_path, blocks=range(2)) as host:
        assert await refusal(host.pull("a:1", [1], token="guess")) is grpc.StatusCode.UNAUTHENTICATED
        async with open_channel(host.address) as channel:
            stub: Any = kvpool_pb2_grpc.KvAgentStub(channel)
            request = kvpool_pb2.ReadRequest(namespace=DIGEST, router_keys=pack_names(names([1])))
            assert await refusal(stub.Read(request, timeout=LONG_S).read()) is grpc.StatusCode.UNAUTHENTICATED
            describe = stub.DescribeAgent(kvpool_pb2.DescribeAgentRequest(), timeout=LONG_S)
            assert await refusal(describe) is grpc.StatusCode.UNAUTHENTICATED


async def test_requests_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async with a_host(tmp_path, blocks=range(2), reads=0) as host, open_channel(host.address) as channel:
        stub: Any = kvpool_pb2_grpc.KvAgentStub(channel)

        def pull(**fields: Any) -> Any:
            whole = {"namespace": DIGEST, "source": "a:1", "router_keys": bytes(8), "timeout_s": 1.0}
            return stub.Pull(
                kvpool_pb2.PullRequest(**(whole | fields)), metadata=bearer(TOKEN), timeout=LONG_S
            )

        for fields in (
            {"router_keys": b""},
            {"router_keys": bytes(9)},
            {"source": ""},
            {"timeout_s": 0.0},
            {"timeout_s": float("nan")},
            {"namespace": "../../etc/passwd"},
        ):
            assert await refusal(pull(**fields)) is grpc.StatusCode.INVALID_ARGUMENT, fields
        assert await refusal(read(host.address, [1])) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await refusal(read(host.address, [1], timeout_s=None)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_or_misspelt_namespace_is_refused(tmp_path: Path) -> None:
    async with a_host(tmp_path, blocks=range(2)) as host:
        assert await refusal(read(host.address, [1], namespace="0" * 32)) is grpc.StatusCode.NOT_FOUND
        assert await refusal(read(host.address, [1], namespace="..")) is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_agent_comes_back_at_its_port_and_takes_another_when_that_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "agent.port"

    async def once() -> str:
        agent = KvAgent(AgentSettings(tmp_path, "127.0.0.1", port_file=file, port_wait_s=0.3), TOKEN)
        address = await agent.start()
        await agent.stop()
        return address

    first = await once()
    assert await once() == first
    other = create_server()
    bind(other, "127.0.0.1", int(first.rpartition(":")[2]))
    await other.start()
    try:
        assert await once() != first
    finally:
        await other.stop(None)
    file.write_text("nonsense")
    assert (await once()).startswith("127.0.0.1:")


async def test_stopping_while_blocks_are_on_their_way_frees_all(tmp_path: Path) -> None:
    async def script(_: Any) -> AsyncIterator[Block]:
        yield block(0, 0)
        await asyncio.Event().wait()

    async with a_peer(script) as peer:
        async with a_host(tmp_path, stall_s=LONG_S, limits=PullLimits(batch_bytes=1)) as host:
            pull = asyncio.create_task(host.pull(peer, range(4)))
            await until_ready(host.arena, 0)
        with pytest.raises(grpc.aio.AioRpcError):
            await pull
