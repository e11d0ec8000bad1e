"""The checksum of one rank's part of a block. Pure."""

from __future__ import annotations

from blake3 import blake3


def checksum(*pieces: bytes | bytearray | memoryview) -> int:
    """Of all pieces together: 64 bits of BLAKE3, never 0: that means "not written yet" in a slot's record.

    On one core of the reference machine, parts of 256 KiB and more: 3.4 GB/s, where zlib's CRC-32 does 1.7.
    """
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return int.from_bytes(hasher.digest(8), "little") or 1
