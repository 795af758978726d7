"""Times of eviction: after every step, several tokens at once, whole pages, or once after the prompt. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

By = Literal["union", "per_head"]
Worth = Literal["mean", "max"]


@dataclass(frozen=True)
class Pages:
    """Eviction of whole pages: one page of tokens is evicted as soon as another one is full.

    Attributes:
        size: number of consecutive tokens in a page.
        by: heads that choose the page. `union`: the heads of a layer together, by the largest of a page's values for them.
            `per_head`: each head by itself.
        worth: value of a page: the mean or the maximum of its tokens' importance.
    """

    size: int
    by: By = "union"
    worth: Worth = "mean"


Evict = int | Literal["prompt"] | Pages  # tokens evicted at once; once, after the prompt; whole pages


def at_once(evict: Evict) -> int:
    """Return the number of tokens that are evicted together while later tokens are read."""
    return evict.size if isinstance(evict, Pages) else 1 if evict == "prompt" else evict


def pages_of(evict: Evict) -> Pages | None:
    """Return the page settings; None unless whole pages are evicted."""
    return evict if isinstance(evict, Pages) else None


def evict_as_json(evict: Evict) -> str | dict[str, int | str]:
    """Return the JSON form that suites and records use."""
    if isinstance(evict, Pages):
        return {"pages": evict.size, "by": evict.by, "worth": evict.worth}
    if evict == "prompt":
        return "prompt"
    return "step" if evict == 1 else {"every": evict}


def evict_words(evict: Evict) -> Iterator[str]:
    """Yield the words that a label shows; none for the default, one token after every step."""
    if isinstance(evict, Pages):
        yield f"pages {evict.size} {evict.by} {evict.worth}"
    elif evict == "prompt":
        yield "prompt"
    elif evict != 1:
        yield f"every {evict}"
