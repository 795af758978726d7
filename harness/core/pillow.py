"""Pillow, which decodes images. It is an extra, because only vision transformers need it."""

from __future__ import annotations

import importlib.util

from kvbench.harness.core.errors import UserError


def require_pillow(who: str) -> None:
    """Check that Pillow is installed.

    Raises:
        UserError: it is not.
    """
    if importlib.util.find_spec("PIL") is None:
        raise UserError(f"{who} needs the package 'pillow': pip install 'kv-bench[vision]'")
