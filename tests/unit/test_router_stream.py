"""A stream through a real router, in front of fake replicas and a fake controller."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from fakes_cluster import FakeReplica, Script, model_info
from fakes_router import collected, eventually, running_stack

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.errors import KvorumError, from_rpc_error

LOST = KvorumError(grpc.StatusCode.UNAVAILABLE, common_pb2.REPLICA_LOST, "the engine died")
REFUSED = KvorumError(
    grpc.StatusCode.FAILED_PRECONDITION, common_pb2.FEATURE_NOT_ENABLED, "no grammar backend"
)


async def test_text_is_tokenised_and_the_whole_stream_arrives_in_order() -> None:
    async with running_stack() as stack:
        messages = await collected(stack.client, "tell me more", max_tokens=3)
    assert [c.text for m in messages for c in m.choices] == [" t1", " t2", " t3"]
    assert list(stack.replicas[0].seen[0].request.prompt_token_ids) == [1, 4, 2, 4]
    assert messages[-1].choices[0].finish_reason == common_pb2.LENGTH


async def test_only_the_first_message_says_who_served() -> None:
    async with running_stack() as stack:
        messages = await collected(stack.client, [5, 6], max_tokens=2, request_id="mine")
        replica = stack.replicas[0]
    served = messages[0].served
    assert (served.request_id, served.model, served.replica) == ("mine", "fake", "r0")
    assert (served.epoch, served.attempt) == (replica.epoch, 1)
    assert messages[0].choices[0].token_ids == [1]
    assert not messages[1].HasField("served")


async def test_every_sampling_field_and_option_reaches_the_replica() -> None:
    sampling = common_pb2.SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=11, presence_penalty=0.25,
        frequency_penalty=-0.5, repetition_penalty=1.25, stop=["END"], stop_token_ids=[9],
        include_stop_in_output=True, ignore_eos=True, max_tokens=5, min_tokens=2, n=2, logprobs=3,
        prompt_logprobs=1, skip_special_tokens=False, logit_bias={3: -2.5}, bad_words=["no"],
        allowed_token_ids=[1, 2, 3], structured=common_pb2.StructuredOutput(regex="[0-9]+"),
    )  # fmt: skip
    async with running_stack() as stack, grpc.aio.insecure_channel(stack.address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        options = inference_pb2.RequestOptions(request_id="q", priority=3, cache_salt="s", lora="poet")
        tokens = inference_pb2.TokenIds(ids=[7, 8])
        request = inference_pb2.GenerateRequest(tokens=tokens, sampling=sampling, options=options)
        async for _ in stub.Generate(request, timeout=5):
            pass
        seen = stack.replicas[0].seen[0].request
    assert seen.sampling == sampling
    assert (seen.request_id, seen.priority, seen.cache_salt, seen.lora) == ("q", 3, "s", "poet")


async def test_chat_renders_the_template_before_it_tokenises() -> None:
    async with running_stack() as stack, grpc.aio.insecure_channel(stack.address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        chat = inference_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content="hi there")])
        async for _ in stub.Chat(inference_pb2.ChatRequest(chat=chat), timeout=5):
            pass
        ids = list(stack.replicas[0].seen[0].request.prompt_token_ids)
        assert ids == [5, 2, 5, 10]  # user: hi there assistant:
        answer = await stack.client.tokenize(messages=[{"role": "user", "content": "hi there"}])
    assert list(answer.ids) == ids
    assert answer.rendered == "user: hi there\nassistant:"


async def test_tokenize_adds_special_tokens_unless_told_not_to() -> None:
    async with running_stack() as stack, grpc.aio.insecure_channel(stack.address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        plain = await stub.Tokenize(inference_pb2.TokenizeRequest(text="a bc"), timeout=5)
        bare = await stub.Tokenize(
            inference_pb2.TokenizeRequest(text="a bc", add_special_tokens=False), timeout=5
        )
    assert (list(plain.ids), list(bare.ids)) == ([1, 1, 2], [1, 2])
    assert plain.max_model_len == 512


async def test_long_texts_are_tokenised_outside_the_event_loop() -> None:
    async with running_stack() as stack:
        await stack.client.tokenize("short")
        await stack.client.tokenize("word " * 500)
    loop_thread, worker_thread = stack.tokenizer.threads
    assert loop_thread is stack.thread
    assert worker_thread is not stack.thread


async def test_list_models_counts_ready_and_known_replicas() -> None:
    async with running_stack(replicas=2) as stack:
        stack.replicas[1].draining = True
        stack.replicas[1].push()
        await eventually(lambda: stack.server.members.counts("fake") == (1, 2))
        (model,) = await stack.client.list_models()
    assert (model.info.name, model.ready_replicas, model.known_replicas) == ("fake", 1, 2)


async def test_replica_lost_before_its_first_token_is_replaced_by_another() -> None:
    async with running_stack(replicas=2, policy="round-robin") as stack:
        stack.replicas[0].script = Script(error_at_start=LOST)
        served = [(await collected(stack.client, [1], max_tokens=2))[0].served for _ in range(2)]
        tried = len(stack.replicas[0].seen)
    assert tried >= 1
    assert {s.replica for s in served} == {"r1"}
    assert 2 in {s.attempt for s in served}


async def test_refusal_of_a_replica_is_passed_on_and_not_tried_elsewhere() -> None:
    async with running_stack(replicas=2) as stack:
        for replica in stack.replicas:
            replica.script = Script(error_at_start=REFUSED)
        with pytest.raises(KvorumError) as caught:
            await collected(stack.client, [1])
        seen = sum(len(replica.seen) for replica in stack.replicas)
    assert seen == 1
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.reason == common_pb2.FEATURE_NOT_ENABLED
    assert caught.value.message == "no grammar backend"


async def test_loss_after_the_first_token_ends_the_stream_as_unavailable() -> None:
    async with running_stack(replicas=2) as stack:
        for replica in stack.replicas:
            replica.script = Script(error_after=(2, LOST))
        stream = stack.client.generate([1], max_tokens=4)
        await anext(stream)
        await anext(stream)
        with pytest.raises(KvorumError) as caught:
            await anext(stream)
        seen = sum(len(replica.seen) for replica in stack.replicas)
    assert seen == 1
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.reason == common_pb2.REPLICA_LOST
    assert "after 2 tokens" in caught.value.message


async def test_killed_replica_breaks_its_stream_with_replica_lost() -> None:
    async with running_stack(script=Script(pace_s=0.05)) as stack:
        stream = stack.client.generate([1], max_tokens=100)
        await anext(stream)
        await stack.replicas[0].die()
        with pytest.raises(KvorumError) as caught:
            _ = [message async for message in stream]
    assert caught.value.reason == common_pb2.REPLICA_LOST


async def test_stream_that_ends_without_finish_reasons_is_an_error() -> None:
    async with running_stack(script=Script(end_early_after=2)) as stack:
        with pytest.raises(KvorumError) as caught:
            await collected(stack.client, [1], max_tokens=4)
    assert caught.value.reason == common_pb2.REPLICA_LOST
    assert "0 of 1 sequences" in caught.value.message


async def test_crash_in_the_replica_reaches_the_client_without_its_details() -> None:
    async with running_stack(script=Script(crash_after=0)) as stack:
        with pytest.raises(KvorumError) as caught:
            await collected(stack.client, [1])
    assert caught.value.code is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.message


async def test_fault_in_the_router_reaches_the_client_without_its_details() -> None:
    async with running_stack() as stack:

        def broken(text: str, add_special_tokens: bool = True) -> list[int]:
            raise RuntimeError("secret detail of the router")

        stack.tokenizer.encode = broken  # type: ignore[method-assign]
        for call in (collected(stack.client, "hi"), stack.client.tokenize("hi")):
            with pytest.raises(KvorumError) as caught:
                await call
            assert caught.value.code is grpc.StatusCode.INTERNAL
            assert "secret" not in caught.value.message
            assert "incident" in caught.value.message


async def test_client_that_goes_away_cancels_the_replica_and_frees_the_lease() -> None:
    async with running_stack(script=Script(pace_s=0.05)) as stack:
        stream = stack.client.generate([1, 2, 3], max_tokens=200)
        await anext(stream)
        held = stack.server.members.leased()[stack.key("r0")]
        assert (held.requests, held.prefill_tokens) == (1, 0)
        assert held.decode_tokens < 200
        await stream.aclose()
        await asyncio.wait_for(stack.replicas[0].seen[0].ended.wait(), 2)
        await eventually(lambda: not stack.server.members.leased())
    assert stack.replicas[0].seen[0].cancelled


async def test_client_that_goes_away_during_prefill_cancels_the_replica() -> None:
    async with running_stack(script=Script(first_token_s=60)) as stack:
        waiting = asyncio.ensure_future(anext(stack.client.generate([1], max_tokens=2)))
        await asyncio.wait_for(stack.replicas[0].arrived.wait(), 2)
        waiting.cancel()
        await asyncio.wait_for(stack.replicas[0].seen[0].ended.wait(), 2)
        await eventually(lambda: stack.server.in_flight == 0)
    assert stack.replicas[0].seen[0].cancelled


async def test_deadline_reaches_the_replica_and_ends_a_hanging_stream() -> None:
    async with running_stack(script=Script(hang_after=1)) as stack:
        with pytest.raises(KvorumError) as caught:
            await collected(stack.client, [1], max_tokens=3, timeout=0.3)
        seen = stack.replicas[0].seen[0]
        await asyncio.wait_for(seen.ended.wait(), 2)
        await eventually(lambda: not stack.server.members.leased())
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert seen.remaining_s is not None
    assert 0 < seen.remaining_s <= 0.31  # the wire rounds up


async def test_request_without_a_deadline_gets_the_default_one() -> None:
    async with (
        running_stack(script=Script(hang_after=1), default_deadline_s=0.3) as stack,
        grpc.aio.insecure_channel(stack.address) as channel,
    ):
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[1]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(request):
                pass
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        common_pb2.DEADLINE_EXCEEDED,
    )
    assert "after 1 generated tokens" in error.message


async def test_load_is_zero_after_any_mix_of_endings() -> None:
    async with running_stack(replicas=2, script=Script(pace_s=0.005)) as stack:
        scripts = [
            Script(pace_s=0.002),
            Script(error_at_start=LOST),
            Script(error_after=(1, LOST)),
            Script(crash_after=1),
            Script(end_early_after=1),
            Script(hang_after=1),
        ]

        async def one(i: int) -> None:
            stack.replicas[i % 2].script = scripts[i % len(scripts)]
            stream = stack.client.generate([1] * (i + 1), max_tokens=4, n=1 + i % 3, timeout=0.4)
            try:
                async for _ in stream:
                    if i % 5 == 0:
                        break
            except KvorumError:
                pass
            await stream.aclose()

        await asyncio.gather(*[one(i) for i in range(60)])
        await eventually(lambda: stack.server.in_flight == 0)
        assert stack.server.members.leased() == {}


async def test_n_sequences_must_all_finish_and_all_pass_through() -> None:
    async with running_stack() as stack:
        messages = await collected(stack.client, [1], max_tokens=2, n=3)
    finished = {c.index for m in messages for c in m.choices if c.finish_reason}
    assert finished == {0, 1, 2}


async def test_streams_beyond_the_bound_are_refused_as_overloaded() -> None:
    async with running_stack(script=Script(hang_after=1), max_streams=1) as stack:
        first = stack.client.generate([1], max_tokens=3)
        await anext(first)
        with pytest.raises(KvorumError) as caught:
            await collected(stack.client, [1])
        await first.aclose()
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.reason == common_pb2.OVERLOADED
    assert caught.value.retry_after_s == 1.0


async def test_without_a_ready_replica_the_client_is_told_when_to_come_back() -> None:
    async with running_stack() as stack:
        stack.replicas[0].draining = True
        stack.replicas[0].push()
        await eventually(lambda: stack.server.members.counts("fake") == (0, 1))
        with pytest.raises(KvorumError) as caught:
            await collected(stack.client, [1], timeout=1)
    assert caught.value.reason == common_pb2.NO_REPLICA_READY
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.retry_after_s is not None
    assert "0 of 1 ready" in caught.value.message


async def test_only_replica_lost_before_its_first_token_is_reported_with_the_cause() -> None:
    async with running_stack(script=Script(error_at_start=LOST)) as stack:
        with pytest.raises(KvorumError) as caught:
            await collected(stack.client, [1])
    assert caught.value.reason == common_pb2.REPLICA_LOST
    assert "the engine died" in caught.value.message


async def test_request_waits_for_a_replica_that_comes_back() -> None:
    async with running_stack() as stack:
        await stack.replicas[0].die()
        await eventually(lambda: stack.server.members.counts("fake")[0] == 0)
        waiting = asyncio.ensure_future(collected(stack.client, [1], max_tokens=2, timeout=20))
        await eventually(lambda: stack.server.state().queues[0].length == 1)
        await stack.replicas[0].restart()
        assert len(await waiting) == 2


async def test_replica_that_restarts_serves_again_under_its_new_epoch() -> None:
    async with running_stack() as stack:
        before = (await collected(stack.client, [1]))[0].served.epoch
        await stack.replicas[0].restart()
        await eventually(lambda: stack.server.members.counts("fake")[0] == 0)
        await eventually(lambda: stack.server.members.counts("fake")[0] == 1)
        after = (await collected(stack.client, [1]))[0].served.epoch
    assert before != after
    assert after == stack.replicas[0].epoch


async def test_client_metadata_does_not_leak_to_the_replica() -> None:
    async with running_stack() as stack:
        await collected(stack.client, [1], metadata=(("x-private", "1"),))
        metadata = stack.replicas[0].seen[0].metadata
    assert "x-private" not in metadata


async def test_replica_of_another_model_is_never_used() -> None:
    other = FakeReplica("r9", model=model_info("other"))
    async with running_stack(extra=[other]) as stack:
        for _ in range(8):
            message = (await collected(stack.client, [1], model="fake"))[0]
            assert message.served.replica == "r0"
        assert (await collected(stack.client, [1], model="other"))[0].served.replica == "r9"
        with pytest.raises(KvorumError) as caught:
            await collected(stack.client, [1])
    assert caught.value.violations[0].field == "model"
