"""Charts: Vega-Lite specifications, drawn as SVG for a light and a dark page."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvbench.harness.core.files import atomic_write
from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record

FOLDER = "charts"  # beside the page
VEGA_LITE = "6.4"
_FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # the first comes with the library that draws, and decides the layout
# Okabe and Ito's colours, told apart by those who see fewer; darkened or lightened for the page they stand on.
_INKS = {
    "light": (
        "#24292f",
        "#d0d7de",
        ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a3e9d", "#57606a", "#8c2d04", "#3f8f29"),
    ),
    "dark": (
        "#e6edf3",
        "#30363d",
        ("#56b4e9", "#ff8c42", "#2fd19b", "#e59ac4", "#f0e442", "#9ec9ff", "#c297ff", "#9da7b3", "#d8a27a", "#a3e635"),
    ),
}
COLOURS = len(_INKS["light"][2])


@dataclass(frozen=True)
class Chart:
    """A picture of a page.

    Attributes:
        name: of its file, without suffix.
        alt: what it shows, for those who don't see it.
        spec: Vega-Lite, without theme.
        suite: whose records it shows; empty where it shows none.
        model: likewise.
    """

    name: str
    alt: str
    spec: dict[str, Any]
    suite: str = ""
    model: str = ""

    def markdown(self) -> str:
        """The picture in a page, light or dark as its reader has it."""
        alt = " ".join(visible(self.alt).split()).replace('"', "'").replace("<", "&lt;").replace(">", "&gt;")
        return (
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{FOLDER}/{self.name}-dark.svg">'
            f'<img alt="{alt}" src="{FOLDER}/{self.name}.svg"></picture>\n'
        )

    def svg(self, theme: str) -> str:
        """Drawn. theme: light or dark. The same text for the same specification."""
        return _svg(json.dumps({**self.spec, "config": config(theme)}))


@dataclass(frozen=True)
class Page:
    """Markdown, and the charts that it shows."""

    text: str
    charts: list[Chart]


def of(record: Record, kind: str, unique: str, alt: str, spec: dict[str, Any]) -> Chart:
    """A chart of the records of one suite and model.

    Args:
        record: one of them.
        kind: of chart, for its file's name.
        unique: tells it from others of that kind, suite and model.
        alt: what it shows; `{model}` stands for the model.
        spec: Vega-Lite, without theme.
    """
    suite, model = record.cell.suite, record.cell.model.id
    return Chart(name(f"{suite} {kind} {model}", unique), alt.replace("{model}", model), shown(spec), suite, model)


def shown(value: Any) -> Any:
    """The same JSON, in whose texts nothing is invisible."""
    if isinstance(value, dict):
        return {key: shown(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shown(part) for part in value]
    return visible(value) if isinstance(value, str) else value


def name(what: str, unique: str) -> str:
    """A file name that can be read, and is another one for another thing."""
    slug = re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-")[:48].rstrip("-")
    return f"{slug}-{hashlib.sha256(unique.encode()).hexdigest()[:6]}"


@lru_cache(maxsize=256)
def _svg(spec: str) -> str:
    """The drawing of a specification, kept: pages are tried again without a record that breaks them."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE))


def page(lines: Iterable[str | Chart]) -> Page:
    """A page from its lines and the charts between them."""
    parts = list(lines)
    return Page("\n".join(x.markdown() if isinstance(x, Chart) else x for x in parts), [x for x in parts if isinstance(x, Chart)])


def drawn(charts: Iterable[Chart]) -> dict[str, str]:
    """Their drawings, for a light and a dark page, by file name."""
    themes = (("light", ""), ("dark", "-dark"))
    return {f"{chart.name}{end}.svg": chart.svg(theme) for chart in charts for theme, end in themes}


def named(page: str) -> set[str]:
    """File names of the drawings that a page shows."""
    return set(re.findall(rf'(?:src|srcset)="{FOLDER}/([a-z0-9-]+\.svg)"', page))


def write(drawings: Mapping[str, str], folder: Path) -> None:
    """Put drawings into a folder, each whole or not at all."""
    if drawings:
        folder.mkdir(parents=True, exist_ok=True)
    for file, svg in drawings.items():
        with atomic_write(folder / file) as opened:
            opened.write(svg)


def config(theme: str) -> dict[str, Any]:
    """Colours and type of a theme: light or dark."""
    text, line, colours = _INKS[theme]
    return {
        "background": None, "font": _FONT, "view": {"stroke": None},
        "range": {"category": list(colours)},
        "axis": {
            "labelColor": text, "titleColor": text, "domainColor": line, "tickColor": line, "gridColor": line,
            "titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 12, "gridOpacity": 0.6, "gridWidth": 0.5,
        },
        "legend": {"labelColor": text, "titleColor": text, "labelFontSize": 11, "symbolStrokeWidth": 2.5, "labelLimit": 260},
        "title": {"color": text, "fontSize": 13, "anchor": "start", "fontWeight": "normal"},
        "header": {"labelColor": text, "titleColor": text, "labelFontSize": 12},
        "rule": {"color": text}, "text": {"color": text, "fontSize": 11},
    }  # fmt: skip
