"""The process of a memory cell with a leak: every block that it reads leaves some bytes behind (tests/injected.py)."""

from __future__ import annotations

import torch

from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.run.child import child

_LEAKED = 2**22  # bytes per block
_plain, _kept = CachedDecoder.__call__, []


def _leaking(self, tokens, valid=None, keep=None):
    _kept.append(torch.ones(_LEAKED // 4))
    return _plain(self, tokens, valid, keep)


if __name__ == "__main__":
    CachedDecoder.__call__ = _leaking
    child()
