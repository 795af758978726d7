"""Page of an audit: one HTML file without scripts, with the table and pictures of the kept positions."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from kvbench.harness.audit.trace import Held
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.keep_map import Map, keep_map, specification

if TYPE_CHECKING:
    from kvbench.harness.audit.audit import Audit

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
body { color: #1f2328; background: #fff }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top; padding: .3rem .6rem }
tr { border-top: 1px solid #d1d9e0 } .pass { color: #1a7f37 } .fail { color: #d1242f; font-weight: 600 } svg { max-width: 100% }
p { color: #59636e }
"""


def _kept_map(held: dict[int, Held]) -> Map | None:
    """Return the positions held after every step; None if nothing was held. held: tokens held before every step."""
    rows = [
        (step - 1, layer, head, position)
        for step, layers in held.items()
        for layer, heads in enumerate(layers)
        for head, positions in enumerate(heads)
        for position in positions
    ]
    if not rows:
        return None
    steps, layers, heads, positions = np.array(rows).T
    return keep_map(np.zeros_like(steps), steps, layers, heads, positions)


def html(audit: Audit) -> str:
    """Return the page of an audit."""
    title = escape(f"Audit of {audit.target}")
    parts = [f"<h1>{title}</h1><p>{audit.summary}.</p>"]
    for model in dict.fromkeys(check.case for check in audit.checks):
        lines = (
            f'<tr><td title="{escape(check.question)}">{check.name}</td><td class="{check.verdict}">{check.verdict}</td>'
            f"<td>{escape(check.evidence)}{escape(check.advice)}</td></tr>"
            for check in audit.checks
            if check.case == model
        )
        head = "<tr><th>check</th><th>verdict</th><th>evidence</th></tr>"
        parts.append(f"<h2>{escape(model)}</h2><table>{head}{''.join(lines)}</table>")
        if (kept := _kept_map(audit.held[model])) is not None:
            parts.append("<p>Positions held after each step, by layer. The shade is the share of KV heads.</p>")
            parts.append(Chart("kept", "", specification(kept, "")).svg("light"))
    style = f"<style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>{style}{"".join(parts)}</html>\n'
