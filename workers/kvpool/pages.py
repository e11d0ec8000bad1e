"""One rank's KV cache, seen as rows: a block's pages of all layers, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches

Bytes = npt.NDArray[np.uint8]
Blocks = npt.NDArray[np.int32]


class BlockPages:
    """Copies between an engine's blocks and rows of bytes.

    With NumPy, which releases the interpreter's lock for the copies as torch does and is as fast (5 to 6 GB/s
    for pages of 24 KiB on a core of the reference machine), but never starts OpenMP threads: a second thread
    that calls torch would get a pool of its own, which spins on the cores that compute.
    """

    def __init__(self, layers: Sequence[Bytes]) -> None:
        """`layers`: [blocks, bytes of a page] each, as views of the memory that the engine computes in."""
        self._layers = tuple(layers)
        ends = np.cumsum([layer.shape[1] for layer in self._layers]).tolist()
        self._spans = tuple(zip([0, *ends[:-1]], ends, strict=True))
        self.row_bytes: int = ends[-1]
        self.blocks = min(layer.shape[0] for layer in self._layers)

    @classmethod
    def of(cls, caches: CanonicalKVCaches) -> BlockPages:
        """Raises NotImplementedError when the cache is not in this host's memory."""
        tensors = [entry.tensor for entry in caches.tensors]
        if devices := {tensor.device.type for tensor in tensors} - {"cpu"}:
            raise NotImplementedError(
                f"no KV pool on {', '.join(sorted(devices)).upper()} yet: copies run on CPU only"
            )
        return cls([tensor.numpy().view(np.uint8) for tensor in tensors])

    def gather(self, blocks: Blocks, rows: Bytes) -> None:
        """Copy these blocks to `rows`, [len(blocks), row_bytes]. Raises IndexError for a block not there."""
        for layer, (start, end) in zip(self._layers, self._spans, strict=True):
            rows[:, start:end] = layer[blocks]

    def scatter(self, blocks: Blocks, rows: Bytes) -> None:
        """Copy `rows` to these blocks. Raises IndexError."""
        for layer, (start, end) in zip(self._layers, self._spans, strict=True):
            layer[blocks] = rows[:, start:end]
