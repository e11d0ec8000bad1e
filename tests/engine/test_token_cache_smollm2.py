"""Cached tokenising against plain tokenising and vLLM's tokenizer, on the default model's tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from protos import admin_pb2
from router.token_cache import CachedEncoder, encode_plain
from workers.checkpoint import PreparedModel, prepare

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def prepared() -> PreparedModel:
    return prepare("smollm2")


@pytest.fixture(scope="module")
def backend(prepared: PreparedModel) -> tokenizers.Tokenizer:
    bundle = admin_pb2.TokenizerBundle.FromString(prepared.bundle.read_bytes())
    return tokenizers.Tokenizer.from_str(bundle.tokenizer_json.decode())


@pytest.fixture(scope="module")
def encoder(backend: tokenizers.Tokenizer) -> CachedEncoder:
    return CachedEncoder.proven(backend, max_bytes=100_000)


@pytest.fixture(scope="module")
def reference(prepared: PreparedModel) -> Any:
    return transformers.AutoTokenizer.from_pretrained(prepared.path)


specials = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<empty_output>"]
)
pieces = st.one_of(
    specials,
    specials.flatmap(lambda token: st.integers(0, len(token)).map(lambda n: token[:n])),
    specials.flatmap(lambda token: st.integers(0, len(token)).map(lambda n: token[n:])),
    st.sampled_from(["user\n", "assistant\n", "Hello, world!", "don't", "12345", "  ", "\n\n", "\t"]),
    st.text(max_size=12),
)


@settings(max_examples=500, deadline=None)
@given(text=st.lists(pieces, max_size=20).map("".join), add=st.booleans())
def test_cached_tokens_are_the_plain_ones_and_vllms(
    backend: tokenizers.Tokenizer, encoder: CachedEncoder, reference: Any, text: str, add: bool
) -> None:
    plain = encode_plain(backend, text, add).tolist()
    assert encoder.encode(text, add).tolist() == plain
    assert encoder.encode(text, add).tolist() == plain  # now from the cache
    assert reference.encode(text, add_special_tokens=add) == plain


def test_a_growing_chat_is_cut_at_its_special_tokens(backend: tokenizers.Tokenizer) -> None:
    encoder = CachedEncoder.proven(backend)
    for turns in range(1, 5):
        encoder.encode("".join(f"<|im_start|>user\n{i}<|im_end|>\n" for i in range(turns)), False)
    assert len(encoder.cache) == 5  # four turns, and what ends each
