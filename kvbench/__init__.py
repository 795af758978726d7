"""KV Bench: what an LLM loses, and gains, when part of its KV cache is thrown away."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "AttentionSum",
    "Audit",
    "Cache",
    "CacheView",
    "Composed",
    "Evicted",
    "HeadSizes",
    "KeyNorm",
    "Merged",
    "Merging",
    "Nearest",
    "Policy",
    "PositionMode",
    "Queries",
    "RecentAttention",
    "Record",
    "Records",
    "Scope",
    "Seen",
    "Selecting",
    "Statistic",
    "TokenId",
    "UserError",
    "ValueNorm",
    "Written",
    "audit",
    "compare",
    "figures",
    "load",
    "load_records",
    "losses",
    "run",
]

if not (Path(__file__).parent / "policies").is_dir():  # an archive, or a checkout on Windows, without its symbolic links
    __path__.append(str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from kvbench.harness.audit.audit import Audit, audit
    from kvbench.harness.core.errors import UserError
    from kvbench.harness.models.load import load
    from kvbench.harness.records import Record
    from kvbench.harness.report.export import Records, load_records
    from kvbench.harness.report.losses import compare, figures, losses
    from kvbench.harness.run.generate import Cache
    from kvbench.harness.run.python import run
    from kvbench.policies import (
        Attention,
        AttentionSum,
        CacheView,
        Composed,
        Evicted,
        HeadSizes,
        KeyNorm,
        Merged,
        Merging,
        Nearest,
        Policy,
        PositionMode,
        Queries,
        RecentAttention,
        Scope,
        Seen,
        Selecting,
        Statistic,
        TokenId,
        ValueNorm,
        Written,
    )
else:
    _MODULES = {
        "Audit": "kvbench.harness.audit.audit",
        "audit": "kvbench.harness.audit.audit",
        "UserError": "kvbench.harness.core.errors",
        "Record": "kvbench.harness.records",
        "Records": "kvbench.harness.report.export",
        "load_records": "kvbench.harness.report.export",
        "compare": "kvbench.harness.report.losses",
        "figures": "kvbench.harness.report.losses",
        "load": "kvbench.harness.models.load",
        "losses": "kvbench.harness.report.losses",
        "Cache": "kvbench.harness.run.generate",
        "run": "kvbench.harness.run.python",
    }

    def __getattr__(name: str) -> object:
        """The names above, imported on first use: most need torch, and `bench --help` should not wait for it."""
        if name not in __all__:
            raise AttributeError(f"module 'kvbench' has no attribute '{name}'")
        import importlib

        return getattr(importlib.import_module(_MODULES.get(name, "kvbench.policies")), name)

    def __dir__() -> list[str]:
        return sorted([*globals(), *__all__])
