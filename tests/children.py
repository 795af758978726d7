"""Substitutes for `child.measure`, and for `run_child` in child processes, which find the functions by name."""

import os
import signal
import tempfile
from pathlib import Path

from kvbench.harness.run.child import run_child

_LEAKED = 2**22  # bytes per block


def in_this_process(order, progress):
    """Measure without starting a process, which takes seconds: where tests are not about processes."""
    from kvbench.harness.run.worker import Worker

    with tempfile.TemporaryDirectory() as scratch:
        references = [item.reference for item in order.groups[0]]
        return Worker(order, progress, own_process=True).measure(0, references, Path(scratch))


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
