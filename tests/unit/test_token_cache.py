"""Cached tokenising against plain tokenising, on one small tokenizer of each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from router import token_cache
from router.token_cache import CachedEncoder, PartCache, encode_plain
from router.token_split import Splitter, UnsplittableError

CORPUS = [Path(__file__).read_text(), "日本語のテキスト été Ünïcode 🙂 " * 20]
LLAMA3 = (
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, normalized=False, special=True, **flags)


CHATML = [special(token) for token in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")]
ODD = [
    *CHATML,
    special("<|strip|>", lstrip=True, rstrip=True),
    special("<right>", rstrip=True),
    special("[MASK]", lstrip=True),
    special("word", single_word=True),
    special("<w>", single_word=True),
    special("\n\n"),
    special(" >"),
    special("<s><s>"),
    special("<s>a"),
    special("|>b"),
    special("B<s>", lstrip=True),
    special("_under"),
    AddedToken("<n>", normalized=True),
    AddedToken("<Tool>", normalized=True, rstrip=True),
    AddedToken("tool", normalized=True, single_word=True),
    AddedToken("s>t", normalized=True),
]


def trained(
    model: Any,
    trainer: type[Any],
    specials: Sequence[AddedToken],
    *,
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    **settings: Any,
) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    plain = [token.content for token in specials if token.special]
    tokenizer.train_from_iterator(
        CORPUS, trainer(vocab_size=600, special_tokens=plain, show_progress=False, **settings)
    )
    tokenizer.add_special_tokens([token for token in specials if token.special])
    tokenizer.add_tokens([token for token in specials if not token.special])
    return tokenizer


def byte_level(specials: Sequence[AddedToken] = CHATML, *, add_prefix_space: bool = False) -> Tokenizer:
    return trained(
        models.BPE(),
        trainers.BpeTrainer,
        specials,
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )


def with_bos() -> Tokenizer:
    """As Llama 3: a sequence of post-processors, a regular expression before the bytes."""
    tokenizer = trained(
        models.BPE(ignore_merges=True),
        trainers.BpeTrainer,
        CHATML,
        normalizer=normalizers.NFC(),
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bos = processors.TemplateProcessing(
        single="<s> $A </s> </s>",
        special_tokens=[("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2: the normalizer prepends the blank."""
    return trained(
        models.BPE(unk_token="<s>", fuse_unk=True, byte_fallback=True),
        trainers.BpeTrainer,
        [*CHATML, AddedToken("<n>", normalized=True)],
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    )


def metaspace(scheme: str) -> Tokenizer:
    return trained(
        models.BPE(unk_token="<s>"),
        trainers.BpeTrainer,
        CHATML,
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme != "never"),
    )


def unigram() -> Tokenizer:
    return trained(
        models.Unigram(),
        trainers.UnigramTrainer,
        CHATML,
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()]),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"),
        unk_token="<s>",
    )


def wordpiece() -> Tokenizer:
    marks = [*(special(token) for token in ("[UNK]", "[CLS]", "[SEP]")), special("[MASK]", lstrip=True)]
    tokenizer = trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer,
        marks,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return tokenizer


def odd_lowercase() -> Tokenizer:
    """Every flag an added token can have, and a normalizer that makes some of them match."""
    return trained(
        models.WordLevel(unk_token="<s>"),
        trainers.WordLevelTrainer,
        ODD,
        normalizer=normalizers.Lowercase(),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    )


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level, prefix space": lambda: byte_level(add_prefix_space=True),
    "byte-level, odd tokens": lambda: byte_level(ODD),
    "regex, BOS and EOS": with_bos,
    "sentencepiece": sentencepiece,
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, always": lambda: metaspace("always"),
    "metaspace, never": lambda: metaspace("never"),
    "unigram": unigram,
    "wordpiece": wordpiece,
    "words, odd tokens": odd_lowercase,
}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


@cache
def small_encoder(kind: str) -> CachedEncoder:
    """One whose cache is always full: what it holds depends on the texts before."""
    return CachedEncoder.proven(tokenizer_of(kind), max_bytes=16_000)


tokens = st.sampled_from([token.content for token in ODD] + ["[CLS]", "[SEP]", "[UNK]"])
pieces = st.one_of(
    tokens,
    tokens.flatmap(lambda token: st.integers(1, len(token)).map(lambda n: token[:n])),
    tokens.flatmap(lambda token: st.integers(0, len(token)).map(lambda n: token[n:])),
    tokens.map(str.upper),
    st.sampled_from(
        [" ", "  ", "\n", "\t", "\u00a0", "\u0301", "\u200d", "▁", "a", "B", "_", "1", "é", "日", "🙂"]
    ),
    st.sampled_from(["word", "tool", " user\n", "The quick fox", "don't", "12345", "\x1c", "\x00"]),
    st.text(max_size=6),
)
texts = st.lists(pieces, max_size=14).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=texts, add=st.booleans())
def test_cached_tokens_are_the_plain_ones(kind: str, text: str, add: bool) -> None:
    plain = encode_plain(tokenizer_of(kind), text, add).tolist()
    encoder = small_encoder(kind)
    assert encoder.encode(text, add).tolist() == plain
    assert encoder.encode(text, add).tolist() == plain  # now from the cache
    assert encoder.cache.nbytes <= 16_000


@given(text=texts)
def test_the_parts_of_a_text_are_the_text(text: str) -> None:
    parts = Splitter.of(tokenizer_of("byte-level, odd tokens")).split(text)
    assert "".join(parts) == text
    assert all(parts)


def test_parts_begin_with_tokens_that_depend_on_nothing_around_them() -> None:
    splitter = Splitter.of(tokenizer_of("byte-level, odd tokens"))
    assert splitter.split("a <right> \n<s>b</s></s>word<w>[MASK]<s><s>\n\n|>b") == [
        "a <right> \n", "<s>b", "</s>", "</s>word<w>[MASK]", "<s><s>\n\n", "|>b",
    ]  # fmt: skip


def test_the_longest_of_thousands_of_tokens_is_found() -> None:
    backend = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    backend.add_special_tokens([special(f"<unused{i}>") for i in range(7000)])
    backend.add_special_tokens([special("<unused12>" * n) for n in range(2, 30)])
    encoder = CachedEncoder.proven(backend)
    text = "<unused6999>" + "<unused12>" * 31 + "<unused<unused7000><unused1>" + "<" * 50
    assert len(encoder.encode(text, False)) == 6
    assert encoder.encode(text, False).tolist() == encode_plain(backend, text, False).tolist()


class SpyBackend:
    """Records what is tokenised."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
        self.texts += texts
        return self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def chat(*turns: str) -> str:
    return "".join(f"<|im_start|>user\n{turn}<|im_end|>\n" for turn in turns)


def spied(max_bytes: int = 1_000_000) -> tuple[SpyBackend, CachedEncoder]:
    spy: Any = SpyBackend(byte_level())
    encoder = CachedEncoder.proven(spy, max_bytes=max_bytes)
    spy.texts.clear()
    return spy, encoder


def test_a_chat_that_grows_by_a_turn_has_only_that_turn_tokenised() -> None:
    spy, encoder = spied()
    encoder.encode(chat("one", "two", "two"), False)
    assert spy.texts == ["<|im_start|>user\none", "<|im_end|>\n", "<|im_start|>user\ntwo"]
    spy.texts.clear()
    encoder.encode(chat("one", "two", "two", "three"), False)
    assert spy.texts == ["<|im_start|>user\nthree"]


def test_what_was_used_least_recently_is_tokenised_again() -> None:
    spy, encoder = spied(max_bytes=20_000)
    encoder.encode("<s>kept", False)
    encoder.encode("<s>dropped", False)
    for i in range(100):
        encoder.encode(f"<s>{i}", False)
        encoder.encode("<s>kept", False)
    encoder.encode("<s>kept<s>dropped", False)
    assert spy.texts.count("<s>kept") == 1
    assert spy.texts.count("<s>dropped") == 2
    assert encoder.cache.nbytes <= 20_000


def test_a_part_that_would_evict_all_else_is_not_kept() -> None:
    spy, encoder = spied(max_bytes=20_000)
    encoder.encode("<s>small", False)
    for _ in range(2):
        encoder.encode("<s>" + "large " * 1000, False)
    spy.texts.clear()
    encoder.encode("<s>small", False)
    assert spy.texts == []
    assert len(encoder.cache) == 1


def test_a_text_of_too_many_parts_is_tokenised_whole() -> None:
    spy, encoder = spied()
    text = "".join(f"<s>{i}" for i in range(5000))
    assert encoder.encode(text, False).tolist() == encode_plain(byte_level(), text, False).tolist()
    assert spy.texts == [text]
    assert len(encoder.cache) == 0


def test_the_callers_array_is_its_own() -> None:
    _, encoder = spied()
    first = encoder.encode("<s>text", False)
    assert first.dtype == np.int32
    expected = first.tolist()
    first[:] = -1
    assert encoder.encode("<s>text", False).tolist() == expected
    (kept,) = encoder.cache.get(["<s>text"]).values()
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1


def test_memory_counted_is_that_of_the_entries_that_are_left() -> None:
    parts = PartCache(10_000)
    for i in range(200):
        parts.put({f"é{i}" * 9: np.arange(i, dtype=np.int32)})
        assert 0 < parts.nbytes <= 10_000
    held = parts.get([f"é{i}" * 9 for i in range(200)])
    parts.put(dict(held))  # again: counted once
    assert 0 < len(held) == len(parts) < 200
    fresh = PartCache(10_000)
    fresh.put(held)
    assert parts.nbytes == fresh.nbytes


def test_threads_that_share_an_encoder_get_plain_tokens() -> None:
    backend = byte_level()
    encoder = CachedEncoder.proven(backend, max_bytes=10_000)
    chats = [chat(*(f"turn {i * j}" for j in range(1, 9))) for i in range(40)]
    expected = [encode_plain(backend, text, False).tolist() for text in chats]

    def wrong_ones(start: int) -> list[int]:
        order = [(start + i * 7) % len(chats) for i in range(200)]
        return [at for at in order if encoder.encode(chats[at], False).tolist() != expected[at]]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(wrong_ones, range(4))) == [[]] * 4
    assert encoder.cache.nbytes <= 10_000


OTHER = {"type": "Other"}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"dropout": 0.1}, "at random"),
        ({"model": "Other"}, "model Other"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [OTHER]}}, "pre-tokenizer Other"),
        ({"post_processor": {"type": "Sequence", "processors": [OTHER]}}, "post-processor Other"),
        ({"added": []}, "no added token"),
        ({"added": ODD[4:10]}, "no added token"),
        ({"added": [special("<" * n) for n in range(1, 500)]}, "nest too deep"),
    ],
)
def test_a_tokenizer_not_known_to_split_is_refused_with_the_reason(parts: dict[str, Any], words: str) -> None:
    known = {"model": "BPE", "added": CHATML, "pre_tokenizer": None}
    assert Splitter.from_parts(**known).split("a<s>b") == ["a", "<s>b"]
    with pytest.raises(UnsplittableError, match=words):
        Splitter.from_parts(**known | parts)


def test_refusals_come_from_the_tokenizer_itself() -> None:
    twice = byte_level()
    twice.post_processor = processors.TemplateProcessing(single="$A <s> $A", special_tokens=[("<s>", 0)])
    with pytest.raises(UnsplittableError, match="the text 2 times"):
        Splitter.of(twice)
    random = Tokenizer(models.BPE(dropout=0.1))
    random.add_special_tokens(CHATML)
    with pytest.raises(UnsplittableError, match="at random"):
        Splitter.of(random)


def test_a_tokenizer_whose_parts_give_other_tokens_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = byte_level([*CHATML, special("<cut>", lstrip=True)])
    honest = Splitter.of(backend)
    lying = Splitter(honest.tokens, honest.cutting | {"<cut>"}, honest.prefix, honest.suffix)
    monkeypatch.setattr(token_cache.Splitter, "of", lambda _spec: lying)
    with pytest.raises(UnsplittableError, match="<cut>"):
        CachedEncoder.proven(backend)
    monkeypatch.setattr(
        token_cache.Splitter, "of", lambda _spec: Splitter(honest.tokens, honest.cutting, (1,), ())
    )
    with pytest.raises(UnsplittableError, match="other tokens"):
        CachedEncoder.proven(backend)
