"""What tests may do to each rank of a real engine, between two steps."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase

from workers.gloo import favour_communication, keep_off_shared_memory
from workers.overlap import plan_cache, planner
from workers.overlap import runtime as runtimes
from workers.overlap.channel import Channel, Reduction
from workers.overlap.families import NotSplittable, take_apart
from workers.overlap.report import OverlapReport, StepRecord
from workers.overlap.worker import OverlapWorker

keep_off_shared_memory()  # the ranks are on one host, and are to do as if they were not


class Worker(OverlapWorker):
    """Added to vLLM's worker class, as a shard's extension is; the shard's own part of the work is here."""

    model_runner: Any
    execute_model: Any

    def attach(self, mode: str) -> str:
        """As a shard does once its model is loaded."""
        from workers.overlap.attach import attach
        from workers.shard import announced

        planner._UNSTEADY = math.inf  # tests share their machine; what they measure is to be kept
        _steps.clear()
        runtime = attach(self._model, self.vllm_config, mode=mode, collective="gloo", observer=_Recorder())
        self.execute_model = announced(self.execute_model, runtime.meter)
        favour_communication()
        return runtime.report().reason

    def report(self) -> OverlapReport:
        return self._runtime.report()

    def steps(self) -> list[tuple[int, int]]:
        """(tokens, chunks) of each step since the last call."""
        steps = list(_steps)
        _steps.clear()
        return steps

    def stumble(self, seed: int, longest_s: float, share: float) -> None:
        """Sleep up to `longest_s` before this share of all matmuls of either path; each rank at others."""
        dice = random.Random(f"{seed}-{self._runtime.rank}")

        def before(apply: Callable[..., Any]) -> Callable[..., Any]:
            def stumbling(*args: Any, **kwargs: Any) -> Any:
                if dice.random() < share:
                    time.sleep(dice.uniform(0.0, longest_s))
                return apply(*args, **kwargs)

            return stumbling

        for method in self._methods().values():
            method.apply = before(method.apply)

    def steady(self) -> None:
        """Undo `stumble`."""
        for method in self._methods().values():
            del method.apply

    def slow_channel(self, seconds: float) -> None:
        """Every overlapped AllReduce takes this much longer from now on; 0: as it was."""
        channel = self._runtime.channel
        channel = channel.inner if isinstance(channel, _Slow) else channel
        assert channel is not None
        self._runtime.channel = _Slow(channel, seconds) if seconds else channel

    def trust_link(self, trusted: bool) -> None:
        """Whether an AllReduce is believed to take what it did: other work on this host slows it down too."""
        plan_cache.same_link = _SAME_LINK[trusted]

    def why_not_split(self, change: str) -> str:
        """The reason given for this engine's own model after a change to it, which is then undone."""
        with _CHANGES[change](self._model):
            try:
                take_apart(self._model, "fp8" if change == "quantization" else None)
            except NotSplittable as reason:
                return str(reason)
        return ""

    @property
    def _model(self) -> Any:
        return self.model_runner.get_model()

    @property
    def _runtime(self) -> runtimes.Runtime:
        runtime = runtimes.current()
        assert runtime is not None
        return runtime

    def _methods(self) -> dict[int, Any]:
        """vLLM's objects that multiply by the weights of the layers' linears; both paths go through them."""
        modules = self._model.model.layers.modules()
        return {id(m.quant_method): m.quant_method for m in modules if isinstance(m, LinearBase)}


class _Recorder:
    def step(self, record: StepRecord) -> None:
        _steps.append((record.tokens, record.chunks))


_steps: list[tuple[int, int]] = []


class _Slow:
    def __init__(self, channel: Channel, seconds: float) -> None:
        self.inner, self._seconds = channel, seconds

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        time.sleep(self._seconds)
        return self.inner.all_reduce(tensor)


def _no_difference(*_args: Any) -> None:
    return None


_SAME_LINK: dict[bool, Any] = {False: plan_cache.same_link, True: _no_difference}


@contextmanager
def _class_of(thing: Any, kind: type) -> Iterator[None]:
    before = thing.__class__
    thing.__class__ = kind
    try:
        yield
    finally:
        thing.__class__ = before


@contextmanager
def _attribute(thing: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, before)


def _subclass(name: str, of: Any) -> type:
    return type(name, (type(of),), {})


class _ScaledMethod:
    """Stands for any quantised linear's."""


@contextmanager
def _nothing(_model: Any) -> Iterator[None]:
    yield


_CHANGES: dict[str, Callable[[Any], Any]] = {
    "none": _nothing,
    "quantization": _nothing,
    "quantised linear": lambda model: _attribute(
        model.model.layers[1].self_attn.o_proj, "quant_method", _ScaledMethod()
    ),
    "layer class": lambda model: _class_of(
        model.model.layers[0], _subclass("ParallelResidualLayer", model.model.layers[0])
    ),
    "attention class": lambda model: _class_of(
        model.model.layers[0].self_attn, _subclass("GatedAttention", model.model.layers[0].self_attn)
    ),
    "lora linear": lambda model: _class_of(
        model.model.layers[2].mlp.down_proj,
        _subclass("RowParallelLinearWithLoRA", model.model.layers[2].mlp.down_proj),
    ),
    "final norm": lambda model: _class_of(model.model.norm, _subclass("OtherNorm", model.model.norm)),
    "auxiliary states": lambda model: _attribute(model.model, "aux_hidden_state_layers", (1,)),
}
