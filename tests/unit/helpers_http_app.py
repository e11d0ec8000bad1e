"""vLLM's own server app over a real router and fake replicas: everything but an engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fakes_cluster import FakeReplica, Script, model_info
from fakes_router import Stack, running_stack
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from cluster.openai import vllm_app
from cluster.openai.edge import Edge
from cluster.openai.keys import Keys
from cluster.openai.probes import Standing
from cluster.openai.router_health import RouterHealth
from cluster.openai.settings import IngressSettings
from protos import admin_pb2
from telemetry.setup import Telemetry

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CONTEXT = 128


def write_model(folder: Path) -> None:
    """A configuration and a tokenizer with one token per byte; no weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
    ).save_pretrained(folder)


def settings(*routers: str, arguments: tuple[str, ...] = ()) -> IngressSettings:
    return IngressSettings(
        cluster="c", routers=routers or ("127.0.0.1:1",), admin_address="127.0.0.1:1", token="t",
        arguments=arguments, request_timeout_s=20,
    )  # fmt: skip


@dataclass
class Face:
    """What a client talks to."""

    edge: Edge
    app: FastAPI
    stack: Stack

    @property
    def replica(self) -> FakeReplica:
        return self.stack.replicas[0]


@asynccontextmanager
async def running_face(
    folder: Path, script: Script | None = None, *, arguments: tuple[str, ...] = ()
) -> AsyncIterator[Face]:
    """Replica, router, vLLM's app and the edge around it; ready to serve."""
    info = model_info(max_model_len=CONTEXT, vocab_size=257)
    replica = FakeReplica("r0", script=script, model=info)
    async with running_stack(replicas=0, extra=[replica]) as stack:
        health = RouterHealth([stack.address])
        health.start()
        try:
            level = logging.getLogger().level
            files = admin_pb2.ModelFiles(model="fake", max_model_len=CONTEXT)
            app = await vllm_app.build(
                settings(stack.address, arguments=arguments), folder, files, stack.client, health
            )
            assert logging.getLogger().level == level, "vLLM's server has changed what this process logs"
            vllm_app.adopt(app, info)
            async with asyncio.timeout(5):
                await health.wait_serving()
            ready = Standing("ready", 1.0, started=True, ready=True)
            edge = Edge(
                Keys(()),
                Telemetry.silent(),
                lambda: app,
                lambda: ready,
                request_timeout_s=20,
                max_ongoing=100,
            )
            yield Face(edge, app, stack)
        finally:
            await health.stop()
