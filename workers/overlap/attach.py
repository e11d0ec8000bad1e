"""Puts the overlap into a shard whose model is loaded: channel, pieces of the model, meter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group
from vllm.platforms import current_platform

from workers.overlap import decoder as decoders
from workers.overlap.agreement import Agreement
from workers.overlap.channel import Channel, ChannelClock, GlooChannel, StreamChannel
from workers.overlap.families import NotSplittable, SplitDecoder, take_apart
from workers.overlap.meter import CpuMeter, StepMeter, StreamMeter
from workers.overlap.models import Overlapped
from workers.overlap.planner import Inputs, Measurable
from workers.overlap.report import StepObserver
from workers.overlap.runtime import Runtime, install
from workers.overlap.streams import CudaDevice, StreamClock


def attach(
    model: Any, config: VllmConfig, *, mode: str, collective: str, observer: StepObserver | None
) -> Runtime:
    """Make this process's runtime. A collective call: every rank of the replica makes it, after loading.

    A model or a replica that cannot be split gets one all the same: it tells why. If one rank cannot be,
    none is. Steps are timed where the model is one of ours and no LoRA adapters are loaded.

    Raises:
        RuntimeError: a rank or its link is gone.
    """
    group = get_tp_group()
    decoder, why = _take_part(model, config, collective)
    if group.world_size > 1 and (lacking := Agreement(group.cpu_group, group.rank_in_group).any(why)):
        rank, reason = lacking
        decoder, why = None, why or f"rank {rank} cannot split: {reason}"
    sibling = _sibling(config, group) if decoder else None
    meter, channel = _on_cpu(sibling, observer) if group.device.type == "cpu" else _on_cuda(sibling, observer)
    if channel is not None:  # now, not amid a step: NCCL takes its memory at its first collective
        channel.all_reduce(torch.zeros(8, dtype=config.model_config.dtype, device=group.device)).wait()
    runtime = Runtime(
        rank=group.rank_in_group,
        mode=mode,
        model=_architecture(model),
        collective=collective,
        meter=meter,
        decoder=decoder,
        channel=channel,
        why_stock=why,
        sizes=(largest_captured(config) + 1, int(config.scheduler_config.max_num_batched_tokens)),
    )
    install(runtime)
    if isinstance(model, Overlapped) and not config.lora_config:
        model.kvorum_overlap = runtime
        if config.model_config.enforce_eager and group.device_communicator is not None:
            meter.watch(group.device_communicator)
    return runtime


def largest_captured(config: VllmConfig) -> int:
    """Tokens of the largest step that is replayed from a captured graph, and so never split; 0 for none."""
    compilation = config.compilation_config
    if not current_platform.is_cuda() or compilation.cudagraph_mode == CUDAGraphMode.NONE:
        return 0
    return int(compilation.max_cudagraph_capture_size or 0)


def measurable(model: Any, runtime: Runtime, config: VllmConfig) -> tuple[Measurable, Agreement]:
    """What a planner needs of this shard; only for a splittable runtime."""
    group = get_tp_group()
    assert runtime.decoder is not None
    assert runtime.channel is not None
    hidden_size = config.model_config.get_hidden_size()
    attention = runtime.decoder.layers[0].attention_size

    def inputs(tokens: int) -> Inputs:
        like = {"dtype": config.model_config.dtype, "device": group.device}
        return Inputs(
            hidden=torch.rand(tokens, hidden_size, **like) - 0.5,
            positions=torch.arange(tokens, device=group.device) % config.model_config.max_model_len,
            attended=torch.rand(tokens, attention, **like) - 0.5,
        )

    def synchronize() -> None:
        if group.device.type == "cuda":
            torch.cuda.synchronize()

    measured = Measurable(
        decoder=runtime.decoder,
        channel=runtime.channel,
        stock_reduce=group.all_reduce,
        make_inputs=inputs,
        synchronize=synchronize,
        smallest=runtime.least_tokens,
        compiled=None if config.model_config.enforce_eager else _whole(model, runtime),
    )
    return measured, Agreement(group.cpu_group, group.rank_in_group)


def _whole(model: Any, runtime: Runtime) -> Callable[[Inputs, int], object]:
    """A pass of the whole model: stock, as it was compiled, for one chunk."""
    stock = super(Overlapped, model).forward
    decoder, channel = runtime.decoder, runtime.channel
    assert decoder is not None
    assert channel is not None

    def run(inputs: Inputs, chunks: int) -> object:
        ids = torch.ones(len(inputs.hidden), dtype=torch.int64, device=inputs.hidden.device)
        if chunks == 1:
            return stock(input_ids=ids, positions=inputs.positions)
        return decoders.run(decoder, channel, model.embed_input_ids(ids), inputs.positions, chunks)

    return run


def _take_part(model: Any, config: VllmConfig, collective: str) -> tuple[SplitDecoder | None, str]:
    """The model in pieces, or why this replica's steps are never split."""
    parallel, why = config.parallel_config, ""
    if parallel.tensor_parallel_size == 1:
        why = "one shard: there is nothing to reduce"
    elif parallel.pipeline_parallel_size > 1:
        why = "pipeline parallelism: stages are not split"
    elif config.lora_config:
        why = "LoRA adapters are loaded"
    elif collective == "shm":
        why = "one host: the shared-memory AllReduce leaves nothing to hide"
    elif not isinstance(model, Overlapped):
        name = type(model).__name__
        why = f"{name}: not a model that is split (or VLLM_PLUGINS leaves the kvorum plugin out)"
    if why:
        return None, why
    try:
        return take_apart(model, config.model_config.quantization), ""
    except NotSplittable as reason:
        return None, str(reason)


def _sibling(config: VllmConfig, group: GroupCoordinator) -> ProcessGroup:
    """Beside the engine's own group. Made even when the overlap is off: it may be switched on later."""
    with set_current_vllm_config(config):
        return group.make_sibling_device_group("kvorum-overlap")


def _on_cpu(sibling: ProcessGroup | None, observer: StepObserver | None) -> tuple[StepMeter, Channel | None]:
    clock = ChannelClock()
    return CpuMeter(clock, observer), GlooChannel(sibling, clock) if sibling else None


def _on_cuda(sibling: ProcessGroup | None, observer: StepObserver | None) -> tuple[StepMeter, Channel | None]:
    device = CudaDevice()
    clock = StreamClock(device)
    meter = StreamMeter(clock, observer)
    if sibling is None:
        return meter, None

    def reduce(tensor: torch.Tensor) -> None:
        torch.distributed.all_reduce(tensor, group=sibling)

    # High priority: a collective's few blocks take the next free places, not those after a whole matmul.
    return meter, StreamChannel(reduce, torch.cuda.Stream(priority=-1), device, clock)


def _architecture(model: Any) -> str:
    """vLLM's own name of the class that ours stands for."""
    for base in type(model).__mro__:
        if base.__module__.startswith("vllm."):
            return base.__name__
    return type(model).__name__
