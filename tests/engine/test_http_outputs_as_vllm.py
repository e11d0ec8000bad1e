"""The same engine steps, once through vLLM's own output processor, once over the wire: equal outputs.

Over the wire: the replica's vLLM with the parameters it was sent, its servicer, protobuf bytes, and the
ingress's assembler. Only the model is missing; what it would sample is made up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fakes_replica import FakeContext, FakeObserver
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from cluster.openai.outputs import OutputAssembler
from cluster.openai.params import to_wire
from protos import common_pb2, replica_pb2
from workers.journal import Journal
from workers.load import LoadRecorder
from workers.pooled_tokens import PooledTokens
from workers.resident import ResidentBlocks
from workers.servicer import ReplicaServicer
from workers.translate import to_sampling_params

pytestmark = pytest.mark.engine

PROMPT_TEXT = "Grüße"
KINDS = list(RequestOutputKind)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that most characters of some scripts end amid a token's text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


TOKENIZER = tokenizer()
PROMPT = TOKENIZER.encode(PROMPT_TEXT)
EOS = TOKENIZER.eos_token_id
VOCABULARY = len(TOKENIZER)


class Steps:
    """What an engine says of one request, step by step; the same each time it is asked."""

    def __init__(self, said: list[tuple[str, int, bool]], params: SamplingParams) -> None:
        self._said, self._params = said, params

    def of(self, sequence: int, request_id: str) -> Iterator[EngineCoreOutput]:
        text, per_step, ends = self._said[sequence]
        tokens = TOKENIZER.encode(text) + ([EOS] if ends else [])
        random = np.random.default_rng(len(tokens) + sequence)
        for at in range(0, len(tokens), per_step):
            new = tokens[at : at + per_step]
            last = at + per_step >= len(tokens)
            stats = PrefillStats(num_cached_tokens=3, num_cache_creation_tokens=2) if at == 0 else None
            prompt = self._prompt_logprobs(np.random.default_rng(0)) if at == 0 else None
            yield EngineCoreOutput(
                request_id=request_id,
                new_token_ids=new,
                new_logprobs=self._logprobs(random, new),
                new_prompt_logprobs_tensors=prompt,
                finish_reason=(FinishReason.STOP if ends else FinishReason.LENGTH) if last else None,
                prefill_stats=stats,
            )

    def _logprobs(self, random: Any, new: list[int]) -> LogprobsLists | None:
        wanted = self._params.num_logprobs
        return None if wanted is None else LogprobsLists(*self._ranked(random, new, wanted))

    def _prompt_logprobs(self, random: Any) -> LogprobsTensors | None:
        wanted = self._params.prompt_logprobs
        if wanted is None:
            return None
        return LogprobsTensors(*(torch.from_numpy(part) for part in self._ranked(random, PROMPT[1:], wanted)))

    def _ranked(self, random: Any, tokens: list[int], wanted: int) -> tuple[Any, Any, Any]:
        """As vLLM's sampler: the token itself, then the top of the vocabulary, float32."""
        ids, values, ranks = [], [], []
        for token in tokens:
            scores = np.log(random.dirichlet(np.full(VOCABULARY, 0.1)) + 1e-30).astype(np.float32)
            order = np.argsort(-scores)
            ids.append([token, *order[:wanted]])
            values.append([scores[token], *scores[order[:wanted]]])
            ranks.append(int(np.where(order == token)[0][0]) + 1)
        return np.array(ids), np.array(values, np.float32), np.array(ranks)


def processed(params: SamplingParams, steps: Steps) -> Iterator[RequestOutput]:
    """What vLLM's output processor makes of the steps; sequences take turns."""
    processor = OutputProcessor(TOKENIZER, log_stats=False)
    ids = ["r"]
    parent = None
    if params.n > 1:
        parent = ParentRequest(core_request("r", params))
        children = [parent.get_child_info(i) for i in range(params.n)]
        ids = [child_id for child_id, _ in children]
        for index, (child_id, child) in enumerate(children):
            processor.add_request(core_request(child_id, child), PROMPT_TEXT, parent, index)
    else:
        processor.add_request(core_request("r", params), PROMPT_TEXT)
    running = [steps.of(index, request_id) for index, request_id in enumerate(ids)]
    while running:
        for stream in list(running):
            step = next(stream, None)
            if step is None:
                running.remove(stream)
                continue
            yield from processor.process_outputs([step], weight_version="default").request_outputs


def core_request(request_id: str, params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id="id",
    )


class FakeEngine:
    """An engine whose steps are made up; all behind them is vLLM's."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.journal = Journal()
        self.resident = ResidentBlocks("revision", self.journal)
        self.load = LoadRecorder(self.resident, lambda: None)
        self.kv_pool = None
        self.pooled_tokens = PooledTokens()

    def on_change(self, observer: Any) -> None:
        return

    async def generate(self, request: replica_pb2.ReplicaGenerateRequest) -> AsyncIterator[RequestOutput]:
        for output in processed(to_sampling_params(request.sampling), self._steps):
            yield output


async def assembled(params: SamplingParams, steps: Steps) -> list[dict[str, Any]]:
    """What the ingress makes of the same steps, the replica's messages having been bytes."""
    snapshot = replica_pb2.ReplicaSnapshot(model=common_pb2.ModelInfo(vocab_size=VOCABULARY))
    engine: Any = FakeEngine(steps)
    observer: Any = FakeObserver()
    context: Any = FakeContext()
    request = replica_pb2.ReplicaGenerateRequest(
        request_id="id", prompt_token_ids=PROMPT, sampling=to_wire(params)
    )
    request = replica_pb2.ReplicaGenerateRequest.FromString(request.SerializeToString())
    assembler = OutputAssembler("id", PROMPT_TEXT, PROMPT, params, None)
    found = []
    async for message in ReplicaServicer(engine, snapshot, "e", observer).Generate(request, context):
        received = common_pb2.GenerateResponse.FromString(message.SerializeToString())
        found += [seen(output) for output in assembler.feed(received)]
    return found


def seen(output: RequestOutput) -> dict[str, Any]:
    """All that a front end can read of an output, as it is now: cumulative ones grow."""
    fields = dict(vars(output))
    fields["prompt_logprobs"] = positions(output.prompt_logprobs)
    fields["outputs"] = [
        {**vars(one), "token_ids": list(one.token_ids), "logprobs": positions(one.logprobs)}
        for one in output.outputs
    ]
    return fields


def positions(logprobs: Any) -> Any:
    """By position, in order; which container holds them is in the type's name."""
    if logprobs is None:
        return None
    found = [position and list(position.items()) for position in logprobs]
    return (type(logprobs).__name__, found)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 3},
    "the sampled token's logprob alone": {"logprobs": 0},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 1},
    "flat": {"prompt_logprobs": 1, "logprobs": 2, "flat_logprobs": True},
    "stop string": {"stop": ["ü", "never"], "logprobs": 1},
    "stop string kept": {"stop": ["ü"], "include_stop_str_in_output": True},
    "no text": {"detokenize": False, "logprobs": 1, "prompt_logprobs": 0},
    "special tokens shown": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "in intervals": {"stream_interval": 3, "logprobs": 1},
    "several": {"n": 3},
    "several with everything": {"n": 3, "logprobs": 2, "prompt_logprobs": 1, "stop": ["ü"]},
}
SAID = [("Füße tragen über 日本 und 🙂.", 1, True), ("kurz", 2, False), ("é" * 40, 3, True)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", CASES)
async def test_outputs_are_as_vllms_own(case: str, kind: RequestOutputKind) -> None:
    params = SamplingParams(output_kind=kind, **CASES[case])
    steps = Steps(SAID, params)
    expected = [seen(output) for output in processed(params, steps)]
    assert await assembled(params, steps) == expected
    assert expected[-1]["finished"]


@given(
    said=st.lists(
        st.tuples(st.text(min_size=1, max_size=20), st.integers(1, 4), st.booleans()), min_size=2, max_size=2
    ),
    kind=st.sampled_from(KINDS),
    options=st.fixed_dictionaries(
        {
            "n": st.integers(1, 2),
            "logprobs": st.sampled_from([None, 0, 2]),
            "stop": st.lists(st.text(min_size=1, max_size=3), max_size=2),
            "include_stop_str_in_output": st.booleans(),
            "stream_interval": st.sampled_from([None, 2]),
        }
    ),
)
async def test_any_text_is_as_vllms_own(
    said: list[tuple[str, int, bool]], kind: RequestOutputKind, options: dict[str, Any]
) -> None:
    params = SamplingParams(output_kind=kind, **options)
    steps = Steps(said, params)
    expected = [seen(output) for output in processed(params, steps)]
    assert await assembled(params, steps) == expected
