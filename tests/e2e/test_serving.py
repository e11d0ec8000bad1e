"""What a client of a running cluster may rely on."""

from __future__ import annotations

import asyncio
import json
import re

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import common_pb2
from protos.errors import KvorumError
from router.client import KvorumClient
from tests.e2e.conftest import RunningCluster, collect

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


async def test_a_stream_delivers_tokens_as_they_are_made_and_says_who_served(client: KvorumClient) -> None:
    answer = await collect(client, "The capital of France is", max_tokens=12, temperature=0, ignore_eos=True)
    assert len(answer.messages) > 1
    assert len(answer.tokens[0]) == 12
    assert answer.finish[0] == common_pb2.LENGTH
    assert answer.served.replica.startswith("replica-")
    assert answer.served.model == "smollm2"
    assert len(answer.served.trace_id) == 32
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 12
    assert "Paris" in answer.text


async def test_a_chat_goes_through_the_models_template(client: KvorumClient) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    rendered = await client.tokenize(messages=messages)
    assert "<|im_start|>user\nSay hello.<|im_end|>" in rendered.rendered
    answer = await collect(client, messages=messages, max_tokens=8, temperature=0)
    assert answer.usage.prompt_tokens == len(rendered.ids)
    assert answer.text


async def test_token_ids_give_the_same_answer_as_their_text(client: KvorumClient) -> None:
    text = "Water boils at a temperature of"
    ids = list((await client.tokenize(text)).ids)
    from_text = await collect(client, text, max_tokens=8, temperature=0)
    from_ids = await collect(client, ids, max_tokens=8, temperature=0)
    assert from_text.tokens == from_ids.tokens


async def test_n_sequences_are_told_apart_by_their_index(client: KvorumClient) -> None:
    answer = await collect(
        client, "Once upon a time", n=3, max_tokens=6, temperature=1.0, seed=7, ignore_eos=True
    )
    assert sorted(answer.tokens) == [0, 1, 2]
    assert all(len(tokens) == 6 for tokens in answer.tokens.values())
    assert answer.usage.completion_tokens == 18


async def test_a_seed_makes_sampling_repeatable(client: KvorumClient) -> None:
    first, second = [
        await collect(client, "My favourite colour is", max_tokens=10, temperature=0.9, seed=42)
        for _ in range(2)
    ]
    assert first.tokens == second.tokens


async def test_logprobs_come_with_every_token_and_for_the_prompt(client: KvorumClient) -> None:
    answer = await collect(
        client, "One two three", max_tokens=4, temperature=0, logprobs=3, prompt_logprobs=1
    )
    positions = [p for m in answer.messages for c in m.choices for p in c.logprobs]
    assert len(positions) == len(answer.tokens[0])
    for position, token in zip(positions, answer.tokens[0], strict=True):
        assert position.tokens[0].token_id == token
        assert position.tokens[0].rank == 1  # greedy takes the likeliest
        assert len(position.tokens) >= 3
        assert all(entry.logprob <= 0 for entry in position.tokens)
    assert len(answer.messages[0].prompt_logprobs) == answer.usage.prompt_tokens


async def test_a_stop_string_ends_the_text_before_itself(client: KvorumClient) -> None:
    answer = await collect(client, "Count: 1, 2, 3, 4, 5,", max_tokens=40, temperature=0, stop=["8"])
    assert answer.finish[0] == common_pb2.STOP
    assert "7" in answer.text
    assert "8" not in answer.text
    assert answer.messages[-1].choices[0].stop_string == "8"


async def test_structured_output_obeys_regex_choice_and_schema(client: KvorumClient) -> None:
    regex = common_pb2.StructuredOutput(regex=r"[0-9]{3}-[0-9]{4}")
    answer = await collect(client, "Phone:", max_tokens=24, temperature=0, structured=regex)
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", answer.text)

    choice = common_pb2.StructuredOutput(choice=common_pb2.StructuredOutput.Choices(option=["yes", "no"]))
    answer = await collect(client, "Is water wet? Answer:", max_tokens=8, temperature=0, structured=choice)
    assert answer.text in ("yes", "no")

    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    wanted = common_pb2.StructuredOutput(json_schema=json.dumps(schema))
    answer = await collect(client, "Give JSON:", max_tokens=64, temperature=0, structured=wanted)
    assert set(json.loads(answer.text)) == {"ok", "n"}


async def test_a_repeated_long_prompt_is_found_in_the_cache(
    client: KvorumClient, pair: RunningCluster
) -> None:
    prompt = " ".join(f"Item {i} of the list." for i in range(160))
    answers = [await collect(client, prompt, max_tokens=2, temperature=0) for _ in range(6)]
    assert answers[0].usage.prompt_tokens > 512
    replicas = {answer.served.replica for answer in answers}
    cached = [answer.usage.cached_tokens for answer in answers]
    # Whichever replicas were picked, all but their first visit find every whole block.
    assert sum(count > 512 for count in cached) >= len(answers) - len(replicas)


async def test_a_cache_salt_keeps_tenants_apart(client: KvorumClient) -> None:
    prompt = " ".join(f"Clause {i} of the contract." for i in range(120))
    for _ in range(4):
        await collect(client, prompt, max_tokens=2, temperature=0, cache_salt="tenant-a")
    other = [
        await collect(client, prompt, max_tokens=2, temperature=0, cache_salt=f"tenant-{i}") for i in range(3)
    ]
    assert [answer.usage.cached_tokens for answer in other] == [0, 0, 0]


async def test_a_deadline_ends_the_request_everywhere(client: KvorumClient, pair: RunningCluster) -> None:
    with pytest.raises(KvorumError) as refused:
        await collect(client, "Tell me a story.", max_tokens=3000, ignore_eos=True, timeout=1.5)
    assert refused.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    pair.wait(_idle, "idle engine after the deadline", 10)


async def test_a_client_that_goes_away_frees_the_engine(client: KvorumClient, pair: RunningCluster) -> None:
    stream = client.generate("Tell me a story.", max_tokens=3000, ignore_eos=True)
    await anext(stream)
    pair.wait(lambda shown: not _idle(shown), "running request", 10)
    await stream.aclose()
    pair.wait(_idle, "idle engine after the client left", 10)


async def test_a_client_that_goes_away_during_prefill_frees_the_engine(
    client: KvorumClient, pair: RunningCluster
) -> None:
    prompt = [(i * 37) % 40_000 + 100 for i in range(3900)]
    stream = client.generate(prompt, max_tokens=8)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.7)
    assert not first.done(), "the prefill was over before the client could leave"
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await stream.aclose()
    pair.wait(_idle, "idle engine after the client left", 10)


async def test_many_streams_at_once_all_finish(client: KvorumClient) -> None:
    answers = await asyncio.gather(
        *(collect(client, f"Story {i}:", max_tokens=24, temperature=0, ignore_eos=True) for i in range(24))
    )
    assert all(len(answer.tokens[0]) == 24 for answer in answers)
    assert {answer.served.replica for answer in answers} == {"replica-0", "replica-1"}


async def test_models_health_and_reflection_tell_the_truth(
    client: KvorumClient, pair: RunningCluster
) -> None:
    (model,) = await client.list_models()
    assert (model.info.name, model.ready_replicas, model.info.max_model_len) == ("smollm2", 2, 4096)
    async with grpc.aio.insecure_channel(pair.state.router_addresses[0]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvorum.v1.Inference", "model/smollm2"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="kvorum.v1.Inference"), timeout=5)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5
        )
        async for response in listing:
            names = {service.name for service in response.list_services_response.service}
            assert "kvorum.v1.Inference" in names
            break


def _idle(shown: dict) -> bool:  # type: ignore[type-arg]
    loads = [replica.get("load", {}) for replica in shown["replicas"]]
    return all(int(load.get("running", 0)) == 0 and int(load.get("waiting", 0)) == 0 for load in loads)
