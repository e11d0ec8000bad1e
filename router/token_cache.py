"""Tokens of text parts seen before: a chat that grows by a turn is not tokenised again from its start."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from router.token_split import Splitter, UnsplittableError

Ids = NDArray[np.int32]

DEFAULT_MAX_BYTES: Final = 32 * 1024 * 1024
"""About 5 million tokens with their texts."""
_ENTRY_BYTES: Final = 200
"""Of a place in the ordered dict, beside the text and the array."""
_LARGEST: Final = 8
"""A part that takes more than one in so many of the cache's bytes is not kept: it would evict all else."""
_MOST_PARTS: Final = 4096
"""A text that falls into more is tokenised whole: so many short ones cost more apart."""

_NOTHING = np.array([], np.int32)


class PartCache:
    """The tokens of text parts, the least recently used forgotten first. Safe to share between threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, tuple[Ids, int]] = OrderedDict()
        self._lock = Lock()
        self.nbytes = 0
        """What the entries take; never above the limit."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, parts: Iterable[str]) -> dict[str, Ids]:
        """Those of `parts` that are known. The arrays are read-only."""
        found = {}
        with self._lock:
            for part in parts:
                entry = self._entries.get(part)
                if entry is not None:
                    self._entries.move_to_end(part)
                    found[part] = entry[0]
        return found

    def put(self, tokenised: dict[str, Ids]) -> None:
        """Keep what fits; the arrays become read-only and must not be views of larger ones."""
        with self._lock:
            for part, ids in tokenised.items():
                # Kept, not asked again later: a text grows when someone wants its UTF-8.
                size = sys.getsizeof(part) + sys.getsizeof(ids) + _ENTRY_BYTES
                if part in self._entries or size * _LARGEST > self._max_bytes:
                    continue
                ids.setflags(write=False)
                self._entries[part] = (ids, size)
                self.nbytes += size
            while self.nbytes > self._max_bytes:
                _, (_, size) = self._entries.popitem(last=False)
                self.nbytes -= size


class CachedEncoder:
    """Text to token ids, equal to `backend`'s own; only the parts of a text that are new are tokenised.

    Safe to share between threads; two of them may tokenise the same new part.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, splitter: Splitter, *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        self._backend = backend
        self._splitter = splitter
        self.cache = PartCache(max_bytes)
        self._prefix = np.array(splitter.prefix, np.int32)
        self._suffix = np.array(splitter.suffix, np.int32)

    @classmethod
    def proven(cls, backend: tokenizers.Tokenizer, *, max_bytes: int = DEFAULT_MAX_BYTES) -> CachedEncoder:
        """An encoder for a tokenizer without truncation and padding, tried on samples.

        Raises:
            UnsplittableError: by its definition or by the samples, parts of a text do not give the tokens
                of the whole.
        """
        encoder = cls(backend, Splitter.of(backend), max_bytes=max_bytes)
        for i, text in enumerate(_samples(sorted(encoder._splitter.cutting))):
            add = i % 2 == 0
            if encoder.encode(text, add).tolist() != encode_plain(backend, text, add).tolist():
                raise UnsplittableError(f"the parts of {text!r} give other tokens than the whole")
        encoder.cache = PartCache(max_bytes)
        return encoder

    def encode(self, text: str, add_special_tokens: bool) -> Ids:
        """Token ids of `text`, in an array of the caller's own."""
        parts = self._splitter.split(text)
        if len(parts) > _MOST_PARTS:
            return encode_plain(self._backend, text, add_special_tokens)
        known = self.cache.get(parts)
        new = list(dict.fromkeys(part for part in parts if part not in known))
        if new:
            tokenised = dict(zip(new, _encode_batch(self._backend, new, False), strict=True))
            self.cache.put(tokenised)
            known |= tokenised
        arrays = [known[part] for part in parts]
        if add_special_tokens:
            arrays = [self._prefix, *arrays, self._suffix]
        return np.concatenate(arrays or [_NOTHING])


def encode_plain(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> Ids:
    """Token ids of `text`, all of it tokenised now."""
    return _encode_batch(backend, [text], add_special_tokens)[0]


def _encode_batch(backend: tokenizers.Tokenizer, texts: Sequence[str], add_special_tokens: bool) -> list[Ids]:
    # Not `encode`: that holds the GIL throughout, and it computes offsets that nobody reads.
    encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    return [np.array(encoding.ids, np.int32) for encoding in encodings]


def _samples(cutting: Sequence[str]) -> list[str]:
    """Texts with tokens of `cutting` in the places where a cut could show."""
    around = ["word", " word ", "\n", "\n\n", " ", "", "e\u0301", "\u0301", "▁", "12", "日本", "🙂", "Ä-B'c"]
    some = list(dict.fromkeys([cutting[0], cutting[-1], *cutting[:: max(1, len(cutting) // 6)]]))
    texts = ["", "word"]
    for token in some:
        for shift in range(3):  # each neighbour on the left meets three on the right
            texts += [
                f"{left}{token}{around[(i + 5 * shift) % len(around)]}" for i, left in enumerate(around)
            ]
        texts += [token + token[:-1] + token, token[1:] + token, token * 3]
    texts.append(" said\n".join(some * 3))
    return texts
