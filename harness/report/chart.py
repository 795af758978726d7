"""Charts: Vega-Lite specifications, drawn as SVG for a light and a dark page."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import atomic_write
from kvbench.harness.core.shown import visible
from kvbench.harness.records import Record

# Colour on a light and on a dark page. The hues are Okabe and Ito's, darkened or lightened for contrast.
_COLOURS = {
    "reference": ("#24292f", "#e6edf3"),
    "control": ("#6b6459", "#b3aa9c"),
    "pattern": ("#0072b2", "#56b4e9"),
    "attention": ("#b84500", "#ff9d5c"),
    "key": ("#00795a", "#2fd19b"),
    "budget": ("#9c3f7d", "#e59ac4"),
    "prompt": ("#b3123f", "#ff8097"),
    "other": ("#5b4bc4", "#b3a6ff"),
    "query": ("#7a5c00", "#e8d44a"),
    "merge": ("#4f7a00", "#b5e550"),
    "select": ("#6b4226", "#d2a679"),
}
_MEMBERS = {
    "reference": ("dense", "recompute_window", "recompute_sink_window"),
    "control": ("random", "replay"),
    "pattern": ("sink_window", "window", "lambda", "longformer", "bigbird_static", "sparse_fixed", "lacache", "reset"),
    "attention": ("h2o", "scissorhands", "roco"),  # summed over the stream
    "query": ("snapkv", "tova", "chunkkv", "rkv", "finch"),  # attention of the newest queries
    "key": ("keydiff", "knorm", "lagkv", "cur", "leverage", "expected_attention", "triattention", "criticalkv"),
    "budget": ("adakv", "pyramidkv", "cake", "headkv", "duo_attention"),
    "prompt": ("simlayerkv", "fastgen"),
    "merge": ("cam", "d2o", "merging"),
    "select": ("quest", "bigbird", "sparse_strided", "longformer_dilated"),
}
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right", "triangle-left")
_DASHES: tuple[tuple[int, ...], ...] = (
    (1, 0),
    (6, 3),
    (2, 2),
    (8, 3, 2, 3),
    (12, 3),
    (4, 2, 1, 2),
    (10, 2, 2, 2, 2, 2),
    (3, 5),
)
_STRIDE = 3  # shift from one family or variant to the next; coprime to the number of shapes and of dashes
_PLACES = {policy: (family, place) for family, members in _MEMBERS.items() for place, policy in enumerate(members)}
_FAMILIES = list(_COLOURS)
VARIANTS = 4  # variants of a policy with different marks; further variants reuse the marks


class Mark(NamedTuple):
    """Appearance of a policy: colours on a light and on a dark page, Vega's name of a shape, and lengths of dashes and gaps."""

    light: str
    dark: str
    shape: str
    dash: tuple[int, ...]


def mark(policy: str, variant: int = 0) -> Mark:
    """Return the mark of a policy, which is equal on every page. variant: number of its set of parameters."""
    unknown = ("other", hashlib.sha256(policy.encode()).digest()[0])  # a user's policy
    family, place = _PLACES.get(policy, unknown)
    position = place + _STRIDE * (variant % VARIANTS)
    shape = SHAPES[(_STRIDE * _FAMILIES.index(family) + position) % len(SHAPES)]
    return Mark(*_COLOURS[family], shape, _DASHES[position % len(_DASHES)])


PICTURES = (".png", ".svg", ".pdf")
FOLDER = "charts"  # folder beside the page
VEGA_LITE = "6.4"
_FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # the first is bundled with vl-convert, which uses it for the layout
# Text, lines, and colours of data other than policies: Okabe and Ito's palette, darkened or lightened for the background.
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


@dataclass(frozen=True)
class Chart:
    """A chart of a page.

    Attributes:
        name: file name, without suffix.
        alt: description for readers who can't see the chart.
        spec: Vega-Lite, without theme.
    """

    name: str
    alt: str
    spec: dict[str, Any]

    @classmethod
    def from_record(cls, record: Record, kind: str, unique: str, alt: str, spec: dict[str, Any]) -> Self:
        """Create a chart of the records of one suite and model, given any of the records.

        Args:
            kind: kind of chart; part of the file name.
            unique: text that distinguishes charts of one kind, suite and model.
            alt: description of the chart; `{model}` is replaced by the model's id.
            spec: Vega-Lite, without theme.
        """
        suite, model = record.cell.suite, record.cell.model.id
        return cls(file_name(f"{suite} {kind} {model}", unique), alt.replace("{model}", model), make_visible(spec))

    def markdown(self) -> str:
        """Return a `<picture>` with a light and a dark drawing."""
        alt = " ".join(visible(self.alt).split()).replace('"', "'").replace("<", "&lt;").replace(">", "&gt;")
        return (
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{FOLDER}/{self.name}-dark.svg">'
            f'<img alt="{alt}" src="{FOLDER}/{self.name}.svg"></picture>\n'
        )

    def svg(self, theme: str) -> str:
        """Draw the chart as SVG. Equal specifications give equal text. theme: light or dark."""
        return _svg(json.dumps({**themed(self.spec, theme), "config": config(theme)}))


@dataclass(frozen=True)
class Page:
    """Markdown, and the charts in it."""

    text: str
    charts: list[Chart]


def by_policy(kind: str, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the channel that distinguishes policies. `themed` fills in the marks, which are equal on every page.

    kind: color, strokeDash or shape. pairs: (name in the chart, policy) of each policy.
    """
    names = [[name, policy] for name, policy in dict.fromkeys(pairs)]
    return channel("policy", "policy", "nominal", sort=None, scale={"marks": kind, "names": names})


def channel(field: str, title: str | None, kind: str = "quantitative", **more: Any) -> dict[str, Any]:
    """Return a channel of an encoding. kind: quantitative, nominal or ordinal. more: scale, axis, legend or sort."""
    return {"field": field, "type": kind, "title": title, **more}


def curves(
    values: list[dict[str, Any]], x: dict[str, Any], y: dict[str, Any], colour: dict[str, Any], **line: Any
) -> dict[str, Any]:
    """Return a panel with a line per colour, without its size. line: properties of the lines."""
    mark = {"type": "line", "point": True, "strokeWidth": 2} | line
    return {"data": {"values": values}, "mark": mark, "encoding": {"x": x, "y": y, "color": colour}}


def heat_map(values: list[dict[str, Any]], width: Any, height: Any, **encoding: dict[str, Any]) -> dict[str, Any]:
    """Return a panel of shaded rectangles. width and height: in pixels, or {"step": pixels of a rectangle}."""
    return {"data": {"values": values}, "mark": "rect", "width": width, "height": height, "encoding": encoding}


def log_axis(field: str, title: str, *, base: int = 10, padding: int = 0, **axis: Any) -> dict[str, Any]:
    """Return a channel on a logarithmic axis.

    padding: pixels between the data and the frame. axis: ticks and labels of the axis; six ticks if empty.
    """
    scale = {"type": "log", "base": base, "nice": False, "padding": padding}
    return channel(field, title, scale=scale, axis=axis or {"format": ",~g", "tickCount": 6})


def themed(spec: dict[str, Any], theme: str) -> dict[str, Any]:
    """Fill in the marks of policies for a light or dark page. All panels of the specification share one scale."""
    text, names = json.dumps(spec), dict[str, str]()

    def collect(part: dict[str, Any]) -> None:
        names.update(part["names"] if part.keys() == {"marks", "names"} else ())

    json.loads(text, object_hook=collect)
    policies = list(names.values())
    marks = [mark(policy, policies[:place].count(policy)) for place, policy in enumerate(policies)]
    ranges = {
        "color": [getattr(m, theme) for m in marks],
        "strokeDash": [list(m.dash) for m in marks],
        "shape": [m.shape for m in marks],
    }

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        return {"domain": list(names), "range": ranges[part["marks"]]} if part.keys() == {"marks", "names"} else part

    themed_spec: dict[str, Any] = json.loads(text, object_hook=filled)
    return themed_spec


def make_visible(value: Any) -> Any:
    """Return a copy of the JSON with invisible characters removed from its strings."""
    if isinstance(value, dict):
        return {key: make_visible(part) for key, part in value.items()}
    if isinstance(value, list):
        return [make_visible(part) for part in value]
    return visible(value) if isinstance(value, str) else value


def file_name(description: str, unique: str) -> str:
    """Return a readable, unique file name."""
    slug = re.sub(r"[^a-z0-9]+", "-", description.lower()).strip("-")[:48].rstrip("-")
    return f"{slug}-{hashlib.sha256(unique.encode()).hexdigest()[:6]}"


@lru_cache(maxsize=256)
def _svg(spec: str) -> str:
    """Draw a specification. Drawings are cached, because pages are rendered again when a broken record is left out."""
    import vl_convert

    drawn = str(vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE))
    numbers = dict.fromkeys(re.findall(r'id="gradient_(\d+)"', drawn))  # Vega's counter continues from drawing to drawing
    new = {number: str(place) for place, number in enumerate(numbers)}
    return re.sub(r"\bgradient_(\d+)\b", lambda match: f"gradient_{new[match[1]]}", drawn)


def page(lines: Iterable[str | Chart]) -> Page:
    """Join lines and charts to a page."""
    parts = list(lines)
    return Page("\n".join(x.markdown() if isinstance(x, Chart) else x for x in parts), [x for x in parts if isinstance(x, Chart)])


def draw(charts: Iterable[Chart]) -> dict[str, str]:
    """Return light and dark SVGs of the charts, by file name."""
    themes = (("light", ""), ("dark", "-dark"))
    return {f"{chart.name}{end}.svg": chart.svg(theme) for chart in charts for theme, end in themes}


def drawing_files(page: str) -> set[str]:
    """Return the file names of the drawings in a page."""
    return set(re.findall(rf'(?:src|srcset)="{FOLDER}/([a-z0-9-]+\.svg)"', page))


def write(drawings: Mapping[str, str], folder: Path) -> None:
    """Write drawings to a folder, each atomically."""
    if drawings:
        folder.mkdir(parents=True, exist_ok=True)
    for file, svg in drawings.items():
        with atomic_write(folder / file) as output:
            output.write(svg)


def picture(spec: dict[str, Any], path: Path) -> None:
    """Draw a specification to a .png, .svg or .pdf file, on white.

    Raises:
        UserError: the suffix is unknown.
    """
    if path.suffix not in PICTURES:
        raise UserError(f"{path}: a picture is written as {', '.join(PICTURES[:-1])} or {PICTURES[-1]}: change the suffix")
    import vl_convert

    whole = {**themed(spec, "light"), "config": config("light") | {"background": "white"}}
    if path.suffix == ".svg":
        drawn = vl_convert.vegalite_to_svg(whole, vl_version=VEGA_LITE).encode()
    elif path.suffix == ".pdf":
        drawn = vl_convert.vegalite_to_pdf(whole, vl_version=VEGA_LITE)
    else:
        drawn = vl_convert.vegalite_to_png(whole, vl_version=VEGA_LITE, scale=2)
    with atomic_write(path, "wb") as file:
        file.write(drawn)


def config(theme: str) -> dict[str, Any]:
    """Return the Vega-Lite configuration of a theme, light or dark."""
    text, line, colours = _INKS[theme]
    return {
        "background": None,
        "font": _FONT,
        "view": {"stroke": None},
        "range": {"category": list(colours)},
        "axis": {
            "labelColor": text,
            "titleColor": text,
            "domainColor": line,
            "tickColor": line,
            "gridColor": line,
            "titleFontWeight": "normal",
            "labelFontSize": 11,
            "titleFontSize": 12,
            "gridOpacity": 0.6,
            "gridWidth": 0.5,
        },
        "legend": {"labelColor": text, "titleColor": text, "labelFontSize": 11, "symbolStrokeWidth": 2.5, "labelLimit": 260},
        "title": {"color": text, "fontSize": 13, "anchor": "start", "fontWeight": "normal"},
        "header": {"labelColor": text, "titleColor": text, "labelFontSize": 12},
        "rule": {"color": text},
        "text": {"color": text, "fontSize": 11},
    }
