"""vLLM's decoder models with a choice of path before each step, registered out of tree.

Weights, layers, compiled graphs and every other path are vLLM's own: the only thing added is the
look at `kvorum_overlap` in the outer forward, which torch.compile does not trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen2_moe import Qwen2MoeForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

if TYPE_CHECKING:
    from workers.overlap.runtime import Runtime


class Overlapped:
    """Mixed in before a vLLM model. Without a runtime it is that model."""

    kvorum_overlap: Runtime | None = None

    def forward(
        self,
        input_ids: Any,
        positions: Any,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **more: Any,
    ) -> Any:
        stock = super().forward  # type: ignore[misc]
        inputs = {
            "input_ids": input_ids,
            "positions": positions,
            "intermediate_tensors": intermediate_tensors,
            "inputs_embeds": inputs_embeds,
        }
        runtime = self.kvorum_overlap
        if runtime is None or runtime.bypassed or more:
            return stock(**inputs, **more)
        return runtime.forward(self, stock, **inputs)


class OverlappedLlama(Overlapped, LlamaForCausalLM): ...


class OverlappedMistral(Overlapped, MistralForCausalLM): ...


class OverlappedQwen2(Overlapped, Qwen2ForCausalLM): ...


class OverlappedQwen3(Overlapped, Qwen3ForCausalLM): ...


class OverlappedMixtral(Overlapped, MixtralForCausalLM): ...


class OverlappedQwen2Moe(Overlapped, Qwen2MoeForCausalLM): ...


class OverlappedQwen3Moe(Overlapped, Qwen3MoeForCausalLM): ...
