"""One vLLM engine: AsyncLLM in this process, EngineCore in a child, shards in Ray actors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from protos import common_pb2, replica_pb2
from protos.errors import KvorumError
from workers import engine_args
from workers.config import EngineConfig
from workers.load import LoadRecorder
from workers.placement import ReplicaPlacement
from workers.translate import refusal, to_sampling_params

if TYPE_CHECKING:
    from workers.checkpoint import PreparedModel

_WARM_UP_TIMEOUT_S = 120.0
_DEATH_CHECK_S = 0.25


@dataclass(frozen=True)
class EngineInfo:
    """What is fixed once the engine runs."""

    max_model_len: int
    vocab_size: int
    block_size: int
    max_logprobs: int
    core_pid: int


class Engine:
    """Starts, serves and watches one engine. One epoch: a dead engine is replaced, never revived."""

    def __init__(self, config: EngineConfig, prepared: PreparedModel, placement: ReplicaPlacement) -> None:
        self._config = config
        self._prepared = prepared
        self._placement = placement
        self._llm: AsyncLLM | None = None
        self._loras = {
            name: LoRARequest(lora_name=name, lora_int_id=index, lora_path=path)
            for index, (name, path) in enumerate(sorted(config.lora_modules.items()), start=1)
        }
        self.load = LoadRecorder()

    def start(self) -> EngineInfo:
        """Load the model; blocks, and blocks the event loop it must be called on.

        Raises:
            Exception: whatever vLLM raised; the caller reports it as the replica's last error.
        """
        # The EngineCore is spawned with this environment and joins the cluster's Ray by it.
        os.environ["RAY_ADDRESS"] = self._placement.ray_address
        os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(self._placement.start_timeout_s))
        os.environ.setdefault("HF_HUB_OFFLINE", "1" if self._prepared.path.exists() else "0")
        args = engine_args.build(self._config, self._prepared, self._placement)
        self._llm = AsyncLLM.from_engine_args(args, stat_loggers=[self.load.stat_logger])
        config = self._llm.vllm_config
        return EngineInfo(
            max_model_len=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            block_size=config.cache_config.block_size,
            max_logprobs=config.model_config.max_logprobs,
            core_pid=self._core_pid(),
        )

    async def warm_up(self) -> None:
        """Run short requests down each path that initialises lazily, so that no user waits for it.

        Sampling with logprobs takes another path than greedy decoding.
        """
        plain = common_pb2.SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
        sampled = common_pb2.SamplingParams(max_tokens=2, top_p=0.9, top_k=20, seed=1, logprobs=2)
        for name, sampling in (("plain", plain), ("sampled", sampled)):
            wire = replica_pb2.ReplicaGenerateRequest(
                request_id=f"warm-up-{name}", prompt_token_ids=[1] * 16, sampling=sampling
            )
            async with asyncio.timeout(_WARM_UP_TIMEOUT_S):
                async for _ in self.generate(wire):
                    pass

    async def generate(self, request: replica_pb2.ReplicaGenerateRequest) -> AsyncIterator[RequestOutput]:
        """Stream deltas. Closing the iterator aborts the request and frees its blocks.

        Raises:
            KvorumError: INVALID_ARGUMENT for what vLLM refuses, NOT_FOUND for an unknown adapter,
                UNAVAILABLE when the engine is dead, RESOURCE_EXHAUSTED when it refuses for load.
        """
        llm = self._running()
        params = to_sampling_params(request.sampling)
        prompt = tokens_input(
            list(request.prompt_token_ids),
            prompt=request.prompt_text or None,
            cache_salt=request.cache_salt or None,
        )
        outputs = llm.generate(
            prompt,
            params,
            request.request_id,
            lora_request=self._lora(request.lora),
            priority=request.priority,
        )
        try:
            async for output in outputs:
                yield output
        except EngineDeadError as error:
            raise self._lost() from error
        except GracefulHTTPError as error:
            raise KvorumError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, common_pb2.OVERLOADED, error.message, retry_after_s=1.0
            ) from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise refusal(error) from error
        except EngineGenerateError as error:
            if llm.errored:
                raise self._lost() from error
            cause = error.__cause__
            if isinstance(cause, ValueError | TypeError):
                raise refusal(cause) from error
            raise KvorumError(
                grpc.StatusCode.INTERNAL, common_pb2.INTERNAL, f"the engine failed this request: {cause}"
            ) from error
        finally:
            await outputs.aclose()

    async def wait_dead(self) -> str:
        """Return, with the reason, once the engine cannot serve any more."""
        llm, core_pid = self._running(), self._core_pid()
        while True:
            if llm.errored:
                return f"the engine failed: EngineCore {core_pid}, a shard or a step; its log says which"
            if not _alive(core_pid):
                return f"the EngineCore process (pid {core_pid}) died"
            await asyncio.sleep(_DEATH_CHECK_S)

    def shutdown(self) -> None:
        """End EngineCore and shards; safe to call twice."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise self._lost()
        return self._llm

    def _lost(self) -> KvorumError:
        return KvorumError(
            grpc.StatusCode.UNAVAILABLE,
            common_pb2.REPLICA_LOST,
            f"the engine of {self._placement.replica} is down; a fresh one is being started",
            retry_after_s=5.0,
        )

    def _lora(self, name: str) -> LoRARequest | None:
        if not name:
            return None
        if name not in self._loras:
            known = ", ".join(self._loras) or "none"
            raise KvorumError(
                grpc.StatusCode.NOT_FOUND,
                common_pb2.LORA_NOT_FOUND,
                f"no LoRA adapter {name!r}; loaded: {known}",
            )
        return self._loras[name]

    def _core_pid(self) -> int:
        manager: Any = self._running().engine_core.resources.engine_manager
        return int(manager.processes[0].pid)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123 - polled; pathlib doubles its cost
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
