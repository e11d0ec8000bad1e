"""One request is one whole trace, and the command line shows it."""

from __future__ import annotations

import asyncio
import json

import pytest

from protos.errors import KvorumError
from router.client import KvorumClient
from telemetry import spans
from tests.e2e.conftest import RunningCluster, collect
from tests.e2e.span_tree import PARENTS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


async def test_a_request_is_one_trace_below_the_callers_span(
    client: KvorumClient, pair: RunningCluster
) -> None:
    caller = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    answer = await collect(client, "The sea is", max_tokens=6, ignore_eos=True, metadata=[caller])
    assert answer.served.trace_id == "0af7651916cd43dd8448eb211c80319c"
    found = await pair.trace(answer.served.trace_id, {spans.ROUTER_REQUEST, *PARENTS})
    assert found[spans.ROUTER_REQUEST].parent_id == "b7ad6b7169203331"
    for child, parent in PARENTS.items():
        assert found[child].parent_id == found[parent].span_id, child
        assert found[parent].start_ns <= found[child].start_ns, child
    generate = found[spans.REPLICA_GENERATE]
    assert generate.attributes[spans.GEN_AI_USAGE_OUTPUT_TOKENS] == 6
    assert generate.attributes[spans.REPLICA] == answer.served.replica


async def test_a_refused_and_a_cancelled_request_leave_closed_spans_with_the_reason(
    client: KvorumClient, pair: RunningCluster
) -> None:
    refused = ("traceparent", "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    with pytest.raises(KvorumError):
        await collect(client, "Hello", temperature=-1.0, metadata=[refused])
    found = await pair.trace(refused[1].split("-")[1], {spans.ROUTER_REQUEST})
    assert found[spans.ROUTER_REQUEST].attributes[spans.ERROR_TYPE] == "INVALID_REQUEST"

    cancelled = ("traceparent", "00-2af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    stream = client.generate("Hello", max_tokens=2000, ignore_eos=True, metadata=[cancelled])
    await anext(stream)
    await stream.aclose()
    names = {spans.ROUTER_REQUEST, spans.ROUTER_FORWARD, spans.REPLICA_GENERATE}
    found = await pair.trace(cancelled[1].split("-")[1], names)
    assert {found[name].attributes[spans.ERROR_TYPE] for name in names} == {"cancelled"}


async def test_the_command_line_generates_chats_and_draws_the_trace(pair: RunningCluster) -> None:
    done = await asyncio.to_thread(
        pair.cli, "generate", "The capital of France is", "--name", pair.name, "--max-tokens", "8",
        "--temperature", "0", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert "Paris" in json.dumps(shown)

    done = await asyncio.to_thread(
        pair.cli, "chat", "--name", pair.name, "--max-tokens", "16", stdin="Say hi.\n/exit\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()

    done = await asyncio.to_thread(pair.cli, "trace", "--last")
    assert done.returncode == 0, done.stderr
    assert spans.ROUTER_REQUEST in done.stdout
    assert spans.REPLICA_PREFILL in done.stdout

    done = await asyncio.to_thread(
        pair.cli, "generate", "Hello", "--name", pair.name, "--max-tokens", "99999"
    )
    assert done.returncode == 2
    assert "max_tokens" in done.stderr
    assert "Traceback" not in done.stderr
