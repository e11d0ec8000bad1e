"""A tokenizer whose tokens are easy to foretell: one per word, the word's length."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import admin_pb2, common_pb2
from protos.errors import invalid


class FakeTokenizer:
    """Word lengths as token ids; "{role}: {content}" lines as the chat template; BOS is 1."""

    def __init__(self, bundle: admin_pb2.TokenizerBundle) -> None:
        self.bundle = bundle
        self.max_chars_per_token = 1000
        self.threads: list[threading.Thread] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> NDArray[np.int32]:
        self.threads.append(threading.current_thread())
        ids = [1] if add_special_tokens else []
        return np.array(ids + [min(len(word), 999) for word in text.split()], np.int32)

    def encode_chat(
        self,
        messages: Sequence[common_pb2.ChatMessage],
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> tuple[NDArray[np.int32], str]:
        for message in messages:
            if message.role == "alien":
                raise invalid("chat.messages", "unknown role alien")
        text = "\n".join(f"{m.role}: {m.content}" for m in messages)
        if tools:
            text = f"tools: {len(tools)}\n{text}"
        if add_generation_prompt and not continue_final_message:
            text += "\nassistant:"
        return self.encode(text, False), text
