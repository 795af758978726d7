"""Durations as text."""

from __future__ import annotations


def about(seconds: float) -> str:
    """Return an approximate duration as text, in seconds, minutes or hours."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
