"""One colour, shape and dash for each policy, on every chart and page.

Families share a colour. Shape and dash differ within a family, and no two policies share both, so that marks are told apart
without colour. All colours have a contrast of at least 4.5 against their page.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

# Colour on a light and on a dark page. The hues are Okabe and Ito's, darkened or lightened for contrast.
_COLOURS = {
    "reference": ("#24292f", "#e6edf3"),
    "control": ("#6b6459", "#b3aa9c"),
    "pattern": ("#0072b2", "#56b4e9"),
    "attention": ("#b84500", "#ff9d5c"),
    "key": ("#00795a", "#2fd19b"),
    "budget": ("#9c3f7d", "#e59ac4"),
    "prompt": ("#7a5c00", "#e8d44a"),
    "other": ("#5b4bc4", "#b3a6ff"),
}
_MEMBERS = {
    "reference": ("dense", "recompute_window", "recompute_sink_window"),
    "control": ("random", "replay"),
    "pattern": ("sink_window", "window", "lambda", "longformer", "bigbird_static", "sparse_fixed", "lacache"),
    "attention": ("h2o", "tova", "scissorhands", "roco", "snapkv", "chunkkv", "rkv", "finch"),
    "key": ("keydiff", "knorm", "lagkv", "cur", "leverage", "expected_attention", "triattention", "criticalkv"),
    "budget": ("adakv", "pyramidkv", "cake", "headkv", "duo_attention"),
    "prompt": ("simlayerkv", "fastgen"),
}
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right", "triangle-left")
_DASHES: tuple[tuple[int, ...], ...] = (
    (1, 0), (6, 3), (2, 2), (8, 3, 2, 3), (12, 3), (4, 2, 1, 2), (10, 2, 2, 2, 2, 2), (3, 5),
)  # fmt: skip
_STRIDE = 3  # from one family or variant to the next; prime to the number of shapes and of dashes
_PLACES = {policy: (family, place) for family, members in _MEMBERS.items() for place, policy in enumerate(members)}
_FAMILIES = list(_COLOURS)
VARIANTS = 4  # of one policy that differ; more begin again


@dataclass(frozen=True)
class Mark:
    """How a policy is drawn.

    Attributes:
        family: that shares its colour.
        light: colour on a light page.
        dark: colour on a dark page.
        shape: of its points, by Vega's names.
        dash: lengths of its line's dashes and gaps.
    """

    family: str
    light: str
    dark: str
    shape: str
    dash: tuple[int, ...]


def mark(policy: str, variant: int = 0) -> Mark:
    """The mark of a policy, by its name; the same on every page.

    Args:
        policy: its name.
        variant: number of this one among several with the same policy and other parameters.
    """
    unknown = ("other", hashlib.sha256(policy.encode()).digest()[0])  # a user's policy
    family, place = _PLACES.get(policy, unknown)
    light, dark = _COLOURS[family]
    at = place + _STRIDE * (variant % VARIANTS)
    shape = _SHAPES[(_STRIDE * _FAMILIES.index(family) + at) % len(_SHAPES)]
    return Mark(family, light, dark, shape, _DASHES[at % len(_DASHES)])
