"""Text that is safe to print: without characters that move the cursor, reverse the line or are invisible."""

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
