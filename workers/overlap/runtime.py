"""The overlap of one shard: decides for each step which path it takes, and runs the overlapped one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from workers.overlap import decoder as decoders
from workers.overlap.channel import Channel
from workers.overlap.families import SplitDecoder
from workers.overlap.meter import StepMeter
from workers.overlap.plan import Plan, forced
from workers.overlap.report import OverlapReport

OFF, AUTO = "off", "auto"


class Runtime:
    """Held by the model (`models.Overlapped`) and by the shard; one per process.

    All ranks must be told the same mode and plan between the same two steps: an engine-wide
    `collective_rpc` does that. What a step does then depends on its number of tokens alone.

    Args:
        decoder: the model taken apart; None with `why_stock` when it cannot be.
        sizes: the tokens of the smallest and of the largest step that may be split; below, steps are
            replayed from captured graphs.
    """

    def __init__(
        self,
        *,
        rank: int,
        mode: str,
        model: str,
        collective: str,
        meter: StepMeter,
        decoder: SplitDecoder | None = None,
        channel: Channel | None = None,
        why_stock: str = "",
        sizes: tuple[int, int] = (1, 1 << 30),
    ) -> None:
        self.rank, self.model, self.collective, self.meter = rank, model, collective, meter
        self.decoder, self.channel = decoder, channel
        self._why_stock = why_stock or ("" if decoder and channel else "no channel")
        self._measured = Plan()
        self._measured_why = "not measured yet"
        self.least_tokens, self.max_tokens = sizes
        self.bypassed = False
        """For benchmarks alone: whether steps take vLLM's path without so much as a look at the plan."""
        self._plan = Plan()
        self._mode = OFF
        self.set_mode(mode)

    @property
    def mode(self) -> str:
        return self._mode

    @property
    def planned(self) -> bool:
        """Whether there is a plan for `auto` to follow."""
        return self._measured.origin != "none"

    @property
    def splittable(self) -> bool:
        """Whether the overlapped path exists at all on this shard."""
        return not self._why_stock

    def set_mode(self, mode: str) -> None:
        """auto: by the measured plan; off: never split; a number: that many chunks, unmeasured.

        Raises ValueError, and changes nothing, on any other.
        """
        if mode in (OFF, AUTO):
            plan = self._measured if mode == AUTO else Plan()
        else:
            plan = forced(int(mode), self.least_tokens)
        self._mode, self._plan = mode, plan if self.splittable else Plan()

    def set_plan(self, plan: Plan, why: str) -> None:
        """The plan that `auto` follows, and one line about where it comes from."""
        self._measured, self._measured_why = plan, why
        self.set_mode(self._mode)

    def forward(self, model: Any, stock: Callable[..., Any], **inputs: Any) -> Any:
        """One pass of the model: by the plan, or `stock(**inputs)`, which is what vLLM would have done."""
        tokens = inputs["positions"].shape[-1]
        chunks = self._chunks(model, tokens, inputs)
        with self.meter.step(tokens, chunks):
            if chunks == 1:
                return stock(**inputs)
            assert self.decoder is not None
            assert self.channel is not None
            hidden = inputs.get("inputs_embeds")
            if hidden is None:
                hidden = model.embed_input_ids(inputs["input_ids"])
            return decoders.run(self.decoder, self.channel, hidden, inputs["positions"], chunks)

    def report(self) -> OverlapReport:
        """What this shard says of itself."""
        threshold = self._plan.threshold
        too_small = threshold is not None and threshold > self.max_tokens
        threshold = None if too_small else threshold
        path: Literal["overlapped", "stock"] = "overlapped" if threshold else "stock"
        if self._why_stock:
            reason = self._why_stock
        elif self._mode == OFF:
            reason = "switched off"
        elif too_small:
            reason = f"no step holds the {self._plan.threshold} tokens from which it would be split"
        elif self._mode == AUTO and self._measured.rows and not threshold:
            reason = f"no step gains enough by it, {self._measured_why}"
        elif self._mode == AUTO:
            reason = self._measured_why
        else:
            reason = f"{self._mode} chunks as told, not measured"
        return OverlapReport(
            rank=self.rank,
            mode=self._mode,
            path=path,
            reason=reason,
            model=self.model,
            collective=self.collective,
            plan=self._plan,
            stock=self.meter.stock,
            overlapped=self.meter.overlapped,
        )

    def _chunks(self, model: Any, tokens: int, inputs: dict[str, Any]) -> int:
        chunks = self._plan.chunks(tokens)
        if chunks == 1 or not self.meter.expecting or inputs.get("intermediate_tensors") is not None:
            return 1  # a pass without requests is the engine's own, to compile and to profile the stock path
        if getattr(model.model, "aux_hidden_state_layers", ()):
            return 1
        context = get_forward_context()
        captured = context.cudagraph_runtime_mode != CUDAGraphMode.NONE
        return 1 if captured or context.ubatch_slices is not None else chunks


_current: Runtime | None = None


def install(runtime: Runtime) -> None:
    """Make it the one of this process."""
    global _current  # noqa: PLW0603 - one shard a process; vLLM hands our worker extension no place to keep it
    _current = runtime


def current() -> Runtime | None:
    """The runtime of this process, once its shard has loaded."""
    return _current
