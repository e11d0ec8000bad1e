"""What an arena refuses, and why. Each message says what was tried, with which values, and what to do."""

from __future__ import annotations


class ArenaError(Exception):
    """Any refusal by the arena that is not a mistake in the calling code (those are ValueErrors)."""


class ArenaBusy(ArenaError):  # noqa: N818 - an answer (treat it as a miss), not a fault
    """The mutex was not free by the deadline; nothing was changed."""


class ArenaMissingError(ArenaError):
    """There is no arena at this path."""


class ArenaMismatchError(ArenaError):
    """What is at this path is no arena, or one of another version, geometry, policy or namespace."""


class ArenaTooSmallError(ArenaError):
    """The memory given does not hold a single block."""


class ArenaSpaceError(ArenaError):
    """The file system cannot give the arena its memory."""


class ArenaAccessError(ArenaError):
    """The arena's folder or file cannot be reached, or belongs to somebody else."""


class ArenaClosedError(ArenaError):
    """This object was closed, or its process was forked from the one that opened it."""


class OwnersFullError(ArenaError):
    """Every owner entry is held by a living process."""


class NotAttachedError(ArenaError):
    """The call needs an owner entry, and this object has none (any more)."""


class SlotLostError(ArenaError):
    """The slot no longer holds what the caller means by it; its part must not be used."""
