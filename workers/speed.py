"""How fast an engine's recent steps were. Pure."""

from __future__ import annotations

from collections import deque

import numpy as np

_STEPS = 64


class StepSpeed:
    """Prefill and decode speed over the last steps of each kind; one stalled step moves neither.

    `decode_step_ms` is the median of steps without prompt tokens. `prefill_ms_per_token` is the median,
    weighted by prompt tokens, of each prefill step's time per prompt token, less one decode step where it
    also decoded. Weighted, because the fixed cost of a step dominates the short ones.
    """

    def __init__(self) -> None:
        self._decode: deque[float] = deque(maxlen=_STEPS)
        self._prefill: deque[tuple[float, int]] = deque(maxlen=_STEPS)

    def step(self, elapsed_ms: float, prompt_tokens: int, decoding: int) -> None:
        """One engine step that computed so many prompt tokens and one token of `decoding` requests."""
        if elapsed_ms <= 0:
            return
        if not prompt_tokens:
            if decoding:
                self._decode.append(elapsed_ms)
            return
        own_ms = elapsed_ms - self.decode_step_ms if decoding else elapsed_ms
        self._prefill.append((max(0.0, own_ms) / prompt_tokens, prompt_tokens))

    @property
    def decode_step_ms(self) -> float:
        """0 before the first decode step."""
        return float(np.median(self._decode)) if self._decode else 0.0

    @property
    def prefill_ms_per_token(self) -> float:
        """0 before the first prefill step."""
        if not self._prefill:
            return 0.0
        rates, tokens = (np.array(column) for column in zip(*sorted(self._prefill), strict=True))
        return float(rates[np.searchsorted(tokens.cumsum(), tokens.sum() / 2)])
