"""For all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis's deadline of 200 ms a case asserts a timing, which a busy machine breaks.
settings.register_profile("kvorum", deadline=None)
settings.load_profile("kvorum")
