"""Whose code ran a policy, and the paper that it follows. Imports no torch: built-in policies are read, not imported."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_POLICIES = Path(__file__).parents[2] / "policies"
_CITATION = re.compile(r"^Source:\s*(.*?)(?:\n\s*\n|\nDiffers:|\Z)", re.S | re.M)


@dataclass(frozen=True)
class Origin:
    """Where a policy comes from.

    Attributes:
        code: whose code ran: "KV Bench", or the file or module that was named.
        paper: the source that its docstring names; empty if it names none.
        arxiv: number of the paper; empty if it names none.
    """

    code: str
    paper: str
    arxiv: str


@lru_cache
def origin(policy: str) -> Origin:
    """Where the policy of this name comes from."""
    module, colon, _ = policy.partition(":")
    if colon:
        return Origin("transformers" if module == "hf" else Path(module).name, "", "")
    path = _POLICIES / f"{policy}.py"
    if not re.fullmatch(r"[a-z0-9_]+", policy) or not path.is_file():
        return Origin("a plug-in", "", "")
    found = _CITATION.search(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    paper = " ".join(found[1].split()) if found else ""
    number = re.search(r"arXiv:(\d{4}\.\d{4,5})", paper)
    return Origin("KV Bench", paper, number[1] if number else "")
