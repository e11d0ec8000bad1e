"""`null` where a request to /v1/responses may leave a field out.

vLLM 0.32 takes it, but repeats it in its answer, whose own model does not: such a request would be a 500.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse

FIELDS: Final = ("background", "truncation")


def null_means_default() -> None:
    """Let vLLM answer as if these fields had been left out, which is what null means there. Idempotent."""
    ours: Any = ResponsesResponse.from_request
    if getattr(ours.__func__, "kvorum", False):
        return

    def from_request(
        cls: type[ResponsesResponse], request: ResponsesRequest, *args: Any, **kwargs: Any
    ) -> Any:
        defaults = ResponsesRequest.model_fields
        missing = {name: defaults[name].default for name in FIELDS if getattr(request, name) is None}
        return ours.__func__(cls, request.model_copy(update=missing), *args, **kwargs)

    from_request.kvorum = True  # type: ignore[attr-defined]
    ResponsesResponse.from_request = classmethod(from_request)
