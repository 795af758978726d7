"""Text that a person reads: safe to print, without characters that move the cursor or are invisible; and durations in words."""

from __future__ import annotations

import re

# Joiners, fillers and variation selectors: Python calls them printable (Unicode: Default_Ignorable_Code_Point).
_WITHOUT_GLYPH = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def visible(text: object) -> str:
    """Return the text with spaces for tabs and newlines, without control, bidi and other invisible characters."""
    shown = str(text)
    if shown.isascii() and shown.isprintable():
        return shown
    kept = (c if c.isprintable() else " " if c.isspace() else "" for c in shown)
    return _WITHOUT_GLYPH.sub("", "".join(kept))


def duration(seconds: float) -> str:
    """Return an approximate duration as text, in seconds, minutes or hours."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
