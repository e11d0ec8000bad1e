"""The first two pages of a segment: what it is, for those who open it. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from workers.kvpool.admission import Policy
from workers.kvpool.errors import ArenaMismatchError
from workers.kvpool.layout import PAGE, Condition, Geometry, Word

MAGIC: Final = int.from_bytes(b"KVORUMKV", "little")
FORMAT: Final = 1
"""Of the segment; raised when the meaning of any of its bytes changes."""

HEADER_BYTES: Final = 2 * PAGE

Namespace = Mapping[str, str | int]
"""All that must be equal for two engines' blocks to be interchangeable (model revision, dtype, …)."""


def file_name(namespace: Namespace) -> str:
    """Of the namespace's arena, in the cluster's folder: 32 hex digits and `.arena`."""
    return f"{hashlib.blake2b(_canonical(namespace), digest_size=16).hexdigest()}.arena"


@dataclass(frozen=True)
class Header:
    """Equal headers: the same arena may be shared."""

    geometry: Geometry
    namespace: Namespace
    policy: Policy

    def encode(self, multiplier: int) -> bytes:
        """`HEADER_BYTES` bytes for an arena without slots in use. `multiplier`: odd, 64 bits, random.

        Raises ValueError when the namespace takes more than a page as JSON.
        """
        namespace = _canonical(self.namespace)
        if len(namespace) > PAGE:
            raise ValueError(f"the namespace takes {len(namespace)} bytes as JSON, more than {PAGE}")
        words = np.zeros(PAGE // 8, np.uint64)
        shape = self.geometry
        words[Word.MAGIC], words[Word.FORMAT], words[Word.MULTIPLIER] = MAGIC, FORMAT, multiplier
        words[Word.SLOTS], words[Word.RANKS] = shape.slots, shape.ranks
        words[Word.RANK_BYTES], words[Word.CHANGES] = shape.rank_bytes, shape.changes
        words[Word.POLICY], words[Word.NAMESPACE_BYTES] = self.policy, len(namespace)
        words[Word.CONDITION] = Condition.NEW
        return words.tobytes() + namespace.ljust(PAGE, b"\0")

    @classmethod
    def decode(cls, data: bytes, name: str) -> Header:
        """Raises ArenaMismatchError, naming `name`, when these are not the first bytes of a segment of
        `FORMAT`."""
        words = [0, 0]
        if len(data) >= HEADER_BYTES:
            words = np.frombuffer(data, np.uint64, PAGE // 8).tolist()
        if words[Word.MAGIC] != MAGIC:
            raise ArenaMismatchError(f"{name} is not an arena: remove it, or name another folder")
        if words[Word.FORMAT] != FORMAT:
            raise ArenaMismatchError(
                f"{name} has format {words[Word.FORMAT]} and this version of Kvorum reads {FORMAT}: stop the "
                "replicas of the other version on this host and remove the file"
            )
        try:
            shape = Geometry(*(words[w] for w in (Word.SLOTS, Word.RANKS, Word.RANK_BYTES, Word.CHANGES)))
            text = data[PAGE : PAGE + words[Word.NAMESPACE_BYTES]]
            return cls(shape, json.loads(text), Policy(words[Word.POLICY]))
        except ValueError as error:
            raise ArenaMismatchError(f"{name} has a damaged header ({error}): remove it") from None

    def require(self, wanted: Header, name: str) -> None:
        """Raises ArenaMismatchError, with each difference, unless the two are equal."""
        differences = ", ".join(self._differences(wanted))
        if differences:
            raise ArenaMismatchError(
                f"{name} is another arena: {differences}; give the replicas of this host the same settings, "
                "or stop those that use it and remove the file"
            )

    def _differences(self, wanted: Header) -> Iterator[str]:
        for field in ("slots", "ranks", "rank_bytes", "changes"):
            here, there = getattr(self.geometry, field), getattr(wanted.geometry, field)
            if here != there:
                yield f"{field} {here}, not {there}"
        for key in sorted({*self.namespace, *wanted.namespace}):
            mine, theirs = self.namespace.get(key), wanted.namespace.get(key)
            if mine != theirs:
                yield f"{key} {mine!r}, not {theirs!r}"
        if self.policy != wanted.policy:
            yield f"admission {self.policy.name}, not {wanted.policy.name}"


def _canonical(namespace: Namespace) -> bytes:
    return json.dumps(dict(namespace), sort_keys=True).encode()
