"""Functions that child processes run in place of `run_child`. They are found by name in the child, so they are in a module."""

from __future__ import annotations

import os
import signal

from kvbench.harness.run.child import run_child

_LEAKED = 2**22  # bytes per block


def leaking(connection, scratch):
    """Measure, and keep some bytes of every block that is read (tests/injected.py)."""
    import torch

    from kvbench.harness.engine.loop import CachedDecoder

    plain, kept = CachedDecoder.__call__, []

    def call(self, tokens, valid=None, keep=None):
        kept.append(torch.ones(_LEAKED // 4))
        return plain(self, tokens, valid, keep)

    CachedDecoder.__call__ = call
    run_child(connection, scratch)


def killed(connection, scratch):
    """End as a process does that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def silent(connection, scratch):
    """End without an answer."""
    os._exit(3)
