"""A request's prompt to token ids. Long texts are tokenised in a thread: the loop has streams to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from protos import common_pb2, inference_pb2
from protos.errors import invalid
from router.json_text import parse_object
from router.membership import Tokenizer

INLINE_CHARS = 2048
"""About 1 ms of tokenising; a hand-over to a thread costs about a tenth of that."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids, the field they came from (for errors), and the templated text of a chat."""

    ids: NDArray[np.int32]
    field: str
    rendered: str = ""


async def from_text(
    text: str, tokenizer: Tokenizer, *, max_tokens: int, add_special_tokens: bool = True, field: str = "text"
) -> Prompt:
    """Tokenise a plain text.

    Raises:
        KvorumError: INVALID_ARGUMENT when it is empty, or surely longer than `max_tokens`.
    """
    if not text:
        raise invalid(field, "the prompt is empty", common_pb2.PROMPT_EMPTY)
    most = max_tokens * tokenizer.max_chars_per_token
    if len(text) > most:  # tokenising megabytes to refuse them would take seconds
        raise invalid(
            field,
            f"{len(text)} characters are more than {max_tokens} tokens can hold, the model's context",
            common_pb2.PROMPT_TOO_LONG,
        )
    ids = await _near(len(text), lambda: tokenizer.encode(text, add_special_tokens))
    return Prompt(ids, field)


async def from_chat(chat: inference_pb2.ChatPrompt, tokenizer: Tokenizer, *, field: str = "chat") -> Prompt:
    """Render the chat template and tokenise.

    Raises:
        KvorumError: INVALID_ARGUMENT when there is no message, a JSON field does not hold an object, or
            the template refuses them.
    """
    if not chat.messages:
        raise invalid(f"{field}.messages", "there is no message", common_pb2.PROMPT_EMPTY)

    def encode() -> tuple[NDArray[np.int32], str]:
        tools = [parse_object(f"{field}.tools_json[{i}]", tool) for i, tool in enumerate(chat.tools_json)]
        kwargs = chat.template_kwargs_json
        return tokenizer.encode_chat(
            chat.messages,
            tools=tools or None,
            template_kwargs=parse_object(f"{field}.template_kwargs_json", kwargs) if kwargs else None,
            add_generation_prompt=not chat.HasField("add_generation_prompt") or chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
        )

    ids, rendered = await _near(chat.ByteSize(), encode)
    return Prompt(ids, f"{field}.messages", rendered)


async def _near(size: int, work: Callable[[], _T]) -> _T:
    return work() if size <= INLINE_CHARS else await asyncio.to_thread(work)
