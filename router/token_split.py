"""Where a text can be cut so that its parts, tokenised alone, give the tokens of the whole.

`tokenizers` first cuts a text at the added tokens that are not subject to normalisation; normalizer,
pre-tokenizer and model then see each stretch between them alone (`AddedVocabulary::extract_and_normalize`).
So a text may be cut *before* any such token. Each part but the first starts with one, which keeps the
stretch behind it from being taken for the start of a text (Metaspace's "first").

A token is a cutting place when all of this holds:
- it strips no neighbouring blanks and asks for no word boundary, so that its match depends on itself alone;
- it starts with ASCII punctuation: to a token before it that strips blanks to its right, or wants no word
  character there, it looks like the end of the text.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from typing import Any

import tokenizers

_PUNCTUATION = frozenset(string.punctuation) - {"_"}
_PRE_TOKENIZERS = frozenset(
    {
        "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace",
        "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
    }
)  # fmt: skip
"""Those known to look at one stretch at a time."""
_MODELS = frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"})


class UnsplittableError(ValueError):
    """Parts of a text are not known to give the tokens of the whole; says why."""


@dataclass(frozen=True)
class Splitter:
    """How one tokenizer's texts are cut, and the ids that its post-processor puts around a text."""

    tokens: re.Pattern[str]
    """Matches what the tokenizer takes out of a raw text: the leftmost, longest added token."""
    cutting: frozenset[str]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Splitter:
        """Raises UnsplittableError: this tokenizer has no token to cut at, or does what is not known here."""
        # Asked part by part: as one JSON text, a vocabulary holds the GIL for a quarter of a second.
        return cls.from_parts(
            type(backend.model).__name__,
            backend.get_added_tokens_decoder().values(),
            dropout=getattr(backend.model, "dropout", None),
            pre_tokenizer=_state(backend.pre_tokenizer),
            post_processor=_state(backend.post_processor),
        )

    @classmethod
    def from_parts(
        cls,
        model: str,
        added: Collection[tokenizers.AddedToken],
        *,
        dropout: float | None = None,
        pre_tokenizer: dict[str, Any] | None = None,
        post_processor: dict[str, Any] | None = None,
    ) -> Splitter:
        """As `of`, from the model's type and what tokenizer.json holds of the rest."""
        if model not in _MODELS:
            raise UnsplittableError(f"its model {model} may look beyond one stretch of text")
        if dropout:
            raise UnsplittableError("its BPE drops merges at random")
        for kind in _kinds(pre_tokenizer):
            if kind not in _PRE_TOKENIZERS:
                raise UnsplittableError(f"its pre-tokenizer {kind} may look beyond one stretch of text")
        raw = [token for token in added if not token.normalized and token.content]
        cutting = frozenset(token.content for token in raw if _cuts(token))
        if not cutting:
            raise UnsplittableError("it has no added token that ends a stretch of text whatever surrounds it")
        try:
            tokens = re.compile(_longest_of({token.content for token in raw}))
        except (RecursionError, re.error) as error:
            raise UnsplittableError(f"its added tokens nest too deep for one pattern ({error})") from error
        return cls(tokens, cutting, *_affixes(post_processor))

    def split(self, text: str) -> list[str]:
        """The parts of `text`, none empty; joined they are the text."""
        cuts = [match.start() for match in self.tokens.finditer(text) if match.group() in self.cutting]
        if not cuts or cuts[0] > 0:
            cuts.insert(0, 0)
        return [text[start:end] for start, end in pairwise([*cuts, len(text)])] if text else []


def _state(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer as in its JSON."""
    found: dict[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return found


def _kinds(pre_tokenizer: dict[str, Any] | None) -> Iterator[str]:
    """The types of a pre-tokenizer's steps, sequences flattened."""
    if pre_tokenizer is None:
        return
    if pre_tokenizer["type"] != "Sequence":
        yield pre_tokenizer["type"]
        return
    for step in pre_tokenizer["pretokenizers"]:
        yield from _kinds(step)


def _cuts(token: tokenizers.AddedToken) -> bool:
    plain = not (token.lstrip or token.rstrip or token.single_word)
    return plain and token.content[0] in _PUNCTUATION


def _longest_of(words: Collection[str]) -> str:
    """A pattern for the longest of `words`: a trie, so that thousands of them cost no more than one."""
    groups: dict[str, list[str]] = {}
    for word in sorted(words):
        if word:
            groups.setdefault(word[0], []).append(word)
    branches = []
    for group in groups.values():
        shared = commonprefix(group)  # noqa: RUF071 (no paths: character by character is meant)
        rest = {word[len(shared) :] for word in group}
        branches.append(re.escape(shared) + (_longest_of(rest) if rest != {""} else ""))
    return f"(?:{'|'.join(branches)})" + ("?" if "" in words else "")


def _affixes(spec: dict[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and behind a single text when special tokens are asked for."""
    if spec is None or spec["type"] == "ByteLevel":  # which moves offsets only
        return (), ()
    if spec["type"] in {"BertProcessing", "RobertaProcessing"}:
        return (spec["cls"][1],), (spec["sep"][1],)
    if spec["type"] == "TemplateProcessing":
        return _template_affixes(spec)
    if spec["type"] != "Sequence":
        raise UnsplittableError(f"what its post-processor {spec['type']} adds is not known")
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    for member in spec["processors"]:
        outer = _affixes(member)
        before, behind = outer[0] + before, behind + outer[1]
    return before, behind


def _template_affixes(spec: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sides: list[list[int]] = [[]]
    for piece in spec["single"]:
        if "Sequence" in piece:
            sides.append([])
        else:
            sides[-1] += spec["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    if len(sides) != 2:
        raise UnsplittableError(f"its template has the text {len(sides) - 1} times")
    return tuple(sides[0]), tuple(sides[1])
