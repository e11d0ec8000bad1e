"""How fast an engine's recent loads from the pool were. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

_LOADS: Final = 64


class LoadSpeed:
    """Over the last steps in which loads ended. One that stalled does not move it: it is the median, weighted
    by bytes, of each step's time per byte."""

    def __init__(self) -> None:
        self._loads: deque[tuple[float, int]] = deque(maxlen=_LOADS)

    def loaded(self, size: int, seconds: float) -> None:
        """So many bytes came in this time, both summed over ranks, which load side by side."""
        if size > 0 and seconds > 0:
            self._loads.append((seconds / size, size))

    def ms(self, size: int) -> float:
        """To load `size` bytes on each rank; 0 before the first load."""
        if not self._loads:
            return 0.0
        rates, sizes = (np.array(column) for column in zip(*sorted(self._loads), strict=True))
        return float(rates[np.searchsorted(sizes.cumsum(), sizes.sum() / 2)]) * size * 1e3
