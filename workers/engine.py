"""One vLLM engine: AsyncLLM in this process, EngineCore in a child, shards in Ray actors.

The engine is the one source of truth about its cache and its load: `resident`, `journal`, `load`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import grpc
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from protos import common_pb2, replica_pb2
from protos.errors import KvorumError
from telemetry.config import TelemetryConfig
from workers import engine_args
from workers.config import EngineConfig
from workers.journal import Journal
from workers.kv_events import KvEvents
from workers.kvpool.agent_port import AgentAddress
from workers.kvpool.follower import PoolFollower
from workers.kvpool.pool_config import CONNECTOR, no_pool, pool_folder
from workers.load import LoadRecorder
from workers.placement import OverlapMode, ReplicaPlacement
from workers.pooled_tokens import PooledTokens
from workers.resident import ResidentBlocks
from workers.translate import refusal, to_reasoning_parser_kwargs, to_sampling_params

if TYPE_CHECKING:
    from workers.checkpoint import PreparedModel

log = logging.getLogger(__name__)

_WARM_UP_TIMEOUT_S = 120.0
_PLAN_TIMEOUT_S = 180.0
_RESET_TIMEOUT_S = 5.0
_OFF_DEVICE_BLOCKS = 1 << 20
"""Blocks a connector may report in host memory and storage, whose size the engine does not tell."""
_DEATH_CHECK_S = 0.25


@dataclass(frozen=True)
class EngineInfo:
    """What is fixed once the engine runs."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int
    core_pid: int


class Engine:
    """Starts, serves and watches one engine. One epoch: a dead engine is replaced, never revived."""

    def __init__(
        self,
        config: EngineConfig,
        prepared: PreparedModel,
        placement: ReplicaPlacement,
        telemetry: TelemetryConfig | None = None,
    ) -> None:
        self._config = config
        self._prepared = prepared
        self._placement = placement
        self._telemetry = telemetry
        self._llm: AsyncLLM | None = None
        self._loras = {
            name: LoRARequest(lora_name=name, lora_int_id=index, lora_path=path)
            for index, (name, path) in enumerate(sorted(config.lora_modules.items()), start=1)
        }
        self._observers: list[Callable[[], None]] = []
        self._events: KvEvents | None = None
        self._follower: PoolFollower | None = None
        self._following: list[asyncio.Task[None]] = []
        self._resetting = asyncio.Lock()
        self.journal = Journal()
        self.resident = ResidentBlocks(prepared.revision, self.journal)
        self.load = LoadRecorder(self.resident, self._changed)
        self.pooled_tokens = PooledTokens()

    @property
    def kv_pool(self) -> replica_pb2.KvPool | None:
        """The memory that this engine shares blocks in, once found; None without. Replaced, never changed."""
        return self._follower.pool if self._follower is not None else None

    def on_change(self, observer: Callable[[], None]) -> None:
        """Call it, on the event loop, whenever the resident blocks or the load have changed."""
        self._observers.append(observer)

    def start(self) -> EngineInfo:
        """Load the model; blocks, and blocks the event loop it must be called on.

        Raises:
            Exception: whatever vLLM raised; the caller reports it as the replica's last error.
            OSError: there is no place for the sockets of the KV events; the message says what to set.
        """
        endpoints = None
        if why := engine_args.no_events(self._config):
            self.resident.fail(why)
        else:
            self._events = KvEvents(self.resident, self._changed, self.reset_prefix_cache)
            endpoints = self._events.open()
        placement = self._placement
        if self._config.kv_pool_gib and (why := no_pool(self._config, placement.device, placement)):
            log.warning("%s shares no KV blocks: %s", placement.replica, why)
        # The EngineCore is spawned with this environment and joins the cluster's Ray by it.
        os.environ["RAY_ADDRESS"] = self._placement.ray_address
        os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(int(self._placement.start_timeout_s))
        os.environ.setdefault("HF_HUB_OFFLINE", "1" if self._prepared.path.exists() else "0")
        try:
            args = engine_args.build(
                self._config, self._prepared, self._placement, endpoints, self._telemetry
            )
            self._llm = AsyncLLM.from_engine_args(args, stat_loggers=[self.load.stat_logger])
        except BaseException:
            if self._events is not None:
                self._events.close()
            raise
        config = self._llm.vllm_config
        self.resident.max_blocks = config.cache_config.num_gpu_blocks or 0
        if (transfer := config.kv_transfer_config) is not None:
            self.resident.max_blocks += _OFF_DEVICE_BLOCKS
            if transfer.kv_connector == CONNECTOR:
                folder = pool_folder(self._config)
                self._follower = PoolFollower(
                    folder,
                    self._core_pid(),
                    AgentAddress.of(placement, folder),
                    self.resident.pool,
                    self._pool_changed,
                )
                self.pooled_tokens.listen(self._llm.output_processor)
        if self._events is not None and not config.cache_config.enable_prefix_caching:
            self.resident.fail("vLLM has switched prefix caching off for this model")
        return EngineInfo(
            max_model_len=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            max_logprobs=config.model_config.max_logprobs,
            core_pid=self._core_pid(),
        )

    async def warm_up(self) -> None:
        """Run short requests down each path that initialises lazily, so that no user waits for it.

        Sampling with logprobs takes another path than greedy decoding. The first prompt is long enough to
        learn the block size from the engine's events; afterwards the cache is empty again. The speeds that
        the load report starts with are those of the last request, when all is warm.
        """
        if self._events is not None:
            self._following.append(asyncio.create_task(self._events.run(), name="kv-events"))
        await self._follow_pool()
        await self.plan_overlap()
        config = self._running().vllm_config
        longest = max(1, config.model_config.max_model_len - 8)
        length = min(longest, 2 * config.cache_config.block_size + 1)
        plain = common_pb2.SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
        sampled = common_pb2.SamplingParams(max_tokens=2, top_p=0.9, top_k=20, seed=1, logprobs=2)
        await self._warm("plain", [1] * length, plain)
        await self._warm("sampled", [1] * min(longest, 16), sampled)
        while not self.resident.degraded and self._events is not None:
            await self._events.check()
            if self.resident.block_size or length == longest:
                break
            length = min(longest, 4 * length)  # a hybrid model's blocks are larger than configured
            await self._warm(f"plain-{length}", [1] * length, plain)
        self.load.forget_speeds()
        await self._warm("measured", [2] * length, plain)
        if self._events is not None:
            self._events.forget_folder()
            if not await self.reset_prefix_cache():
                log.warning("the prefix cache could not be reset; the warm-up's blocks stay in it")

    async def _follow_pool(self) -> None:
        if self._follower is None:
            return
        if await self._follower.find():
            self._following.append(asyncio.create_task(self._follower.run(), name="kv-pool"))
        else:
            log.warning("%s shares no KV blocks: its EngineCore's log says why", self._placement.replica)
            self._follower = None

    async def _warm(self, name: str, prompt: list[int], sampling: common_pb2.SamplingParams) -> None:
        wire = replica_pb2.ReplicaGenerateRequest(
            request_id=f"warm-up-{name}",
            prompt_token_ids=prompt,
            sampling=sampling,
            cache_salt=self._placement.epoch,  # blocks that no other engine has left in the pool, or finds
        )
        try:
            async with asyncio.timeout(_WARM_UP_TIMEOUT_S):
                async for _ in self.generate(wire):
                    pass
        except TimeoutError:
            message = f"the warm-up request {name!r} was not answered in {_WARM_UP_TIMEOUT_S:.0f} s"
            raise TimeoutError(message) from None

    async def plan_overlap(self) -> str:
        """Load or measure the plan by which AllReduces are overlapped; the ranks do it in step.

        Returns a line about it. Raises TimeoutError when a shard does not answer.
        """
        try:
            async with asyncio.timeout(_PLAN_TIMEOUT_S):
                lines = await self._running().collective_rpc("plan_overlap")
        except TimeoutError:
            message = (
                f"the shards did not agree on an overlap plan in {_PLAN_TIMEOUT_S:.0f} s: their link is "
                "down, or one of them failed and its log says why; --overlap off starts without a plan"
            )
            raise TimeoutError(message) from None
        log.info("%s: overlap: %s", self._placement.replica, lines[0])
        return str(lines[0])

    async def set_overlap(self, mode: str) -> None:
        """Switch all ranks between two steps: auto, off, or a number of chunks as in EngineConfig.overlap.

        For measurements: `kvorum status` keeps the line it had. Raises ValueError on any other mode.
        """
        if mode not in get_args(OverlapMode):
            raise ValueError(f"{mode!r} is no overlap mode: one of {', '.join(get_args(OverlapMode))}")
        await self._tell_shards("set_overlap", mode)

    async def bypass_overlap(self, on: bool) -> None:
        """For benchmarks alone: let steps take vLLM's path, untimed, as if Kvorum were not there."""
        await self._tell_shards("bypass_overlap", on)

    async def _tell_shards(self, method: str, value: Any) -> None:
        try:
            async with asyncio.timeout(_PLAN_TIMEOUT_S):
                await self._running().collective_rpc(method, args=(value,))
        except TimeoutError:
            message = f"no answer to {method} from the shards in {_PLAN_TIMEOUT_S:.0f} s; it may happen yet"
            raise TimeoutError(message) from None

    async def reset_prefix_cache(self) -> bool:
        """Empty the engine's prefix cache and the resident set; False, and no change, while it is in use."""
        async with self._resetting:
            if self.load.accepted.sequences:
                return False
            before = self.resident.resets
            try:
                async with asyncio.timeout(_RESET_TIMEOUT_S):
                    done = bool(await self._running().reset_prefix_cache())
            except TimeoutError:  # should it happen after all, its event comes in order
                return False
            if done:
                self.resident.reset_done(before)
                self._changed()
            return done

    async def generate(self, request: replica_pb2.ReplicaGenerateRequest) -> AsyncIterator[RequestOutput]:
        """Stream deltas. Closing the iterator aborts the request and frees its blocks.

        Raises:
            KvorumError: INVALID_ARGUMENT for what vLLM refuses, NOT_FOUND for an unknown adapter,
                UNAVAILABLE when the engine is dead, RESOURCE_EXHAUSTED when it refuses for load.
        """
        llm = self._running()
        sampling = request.sampling
        params = to_sampling_params(sampling)
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
            reasoning_ended=sampling.reasoning_ended if sampling.HasField("reasoning_ended") else None,
            reasoning_parser_kwargs=to_reasoning_parser_kwargs(sampling),
        )
        try:
            with self.pooled_tokens.watching(request.request_id):
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
        """End EngineCore and shards; safe to call twice. Not to be called on the event loop."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()

    async def stop_following(self) -> None:
        """End the subscription to the engine's events, and that to its pool; before `shutdown`, on the event
        loop."""
        following, self._following = self._following, []
        for task in following:
            task.cancel()
        if following:
            await asyncio.wait(following, timeout=1.0)
        if self._events is not None:
            self._events.close()

    def _changed(self) -> None:
        for observer in self._observers:
            observer()

    def _pool_changed(self) -> None:
        assert self._follower is not None
        self.load.pool_part_bytes = self._follower.part_bytes
        self._changed()

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
