"""Text and chats to token ids, equal to the engine's own, from a TokenizerBundle alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import tokenizers

from protos import admin_pb2, common_pb2
from router.chat_template import ChatTemplate
from router.token_cache import CachedEncoder, Ids, encode_plain
from router.token_split import UnsplittableError

log = logging.getLogger(__name__)


class Tokenizer:
    """One model's tokenizer and chat template.

    Safe to share between threads. Encoding holds the GIL only to hand over the text and to fetch the
    ids, so a caller who moves long texts to a thread keeps its event loop free: about 1 s per 2 MB.
    What lies between two special tokens, such as a chat's earlier turns, is tokenised once and remembered.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, template: ChatTemplate, *, chat_specials: bool, name: str = ""
    ) -> None:
        """`backend` neither truncates nor pads; `name` is for the log."""
        try:
            self._encode = CachedEncoder.proven(backend).encode
        except UnsplittableError as reason:
            log.info("tokenizer %s: every text is tokenised from its start: %s", name, reason)
            self._encode = partial(encode_plain, backend)
        self._template = template
        self._chat_specials = chat_specials
        self.max_chars_per_token = max((len(token) for token in backend.get_vocab()), default=1)
        """A text of more than n times this many characters has more than n tokens: no need to encode it."""

    @classmethod
    def from_bundle(cls, bundle: admin_pb2.TokenizerBundle) -> Self:
        """Raises ValueError when the bundle's tokenizer or template cannot be read."""
        try:
            backend = tokenizers.Tokenizer.from_str(bundle.tokenizer_json.decode())
        except Exception as error:
            # The Rust side raises bare Exception.
            raise ValueError(f"tokenizer bundle {bundle.digest[:12]} is unreadable: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        template = ChatTemplate(bundle.chat_template, bundle.special_tokens, bundle.content_format)
        return cls(backend, template, chat_specials=bundle.chat_adds_special_tokens, name=bundle.digest[:12])

    def encode(self, text: str, add_special_tokens: bool = True) -> Ids:
        """Token ids of a plain prompt; special tokens written out in the text count as such, as in vLLM."""
        return self._encode(text, add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[common_pb2.ChatMessage],
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The templated text.

        Raises:
            KvorumError: INVALID_ARGUMENT, naming the field of the request that is at fault.
        """
        return self._template.render(
            messages,
            tools=tools,
            template_kwargs=template_kwargs or {},
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def encode_chat(
        self,
        messages: Sequence[common_pb2.ChatMessage],
        *,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> tuple[Ids, str]:
        """(token ids, templated text); raises as `render_chat`."""
        text = self.render_chat(
            messages,
            tools=tools,
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.encode(text, self._chat_specials), text
