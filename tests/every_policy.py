"""Instances of every policy that evicts, for tests that apply to all policies."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvbench.harness.core import plugins
from kvbench.policies import Policy

LAYERS, HEADS = 2, 2  # of the tiny llama
LONGEST = 400  # tokens of a stream that `replay` can replay, and the largest capacity it knows


def instances(folder: Path, names: list[str] | None = None) -> dict[str, Policy]:
    """Return policies by name, with their defaults except for windows that would not fit into the small caches of tests.

    Args:
        folder: folder for the files that some policies need.
        names: names of the policies; None: all policies that evict from a cache.
    """
    table, replay = folder / "heads.json", folder / "map.pt"
    table.write_text(json.dumps({"importance": [[0.1 * (3 * x + y + 1) for y in range(HEADS)] for x in range(LAYERS)]}))
    at = torch.arange(LAYERS * HEADS * LONGEST).view(LAYERS, HEADS, LONGEST)
    torch.save({"evicted": (at * 7919 % 1009).int(), "capacities": list(range(1, LONGEST + 1))}, replay)
    parameters: dict[str, dict[str, Any]] = {
        "replay": {"file": str(replay)},
        "headkv": {"file": str(table), "beta": 2.0},
        "duo_attention": {"file": str(table), "sinks": 2, "recent": 6},
        "simlayerkv": {"recent": 8, "threshold": 0.5},
        "fastgen": {"threshold": 0.6},
        "lagkv": {"lag": 4},
        "scissorhands": {"history": 24},
        "triattention": {"horizon": 64},
    }
    return {name: plugins.policy_class(name)(**parameters.get(name, {})) for name in names or evicting()}


@cache
def evicting() -> list[str]:
    """Names of the shipped policies that evict from a cache."""
    kinds = {name: plugins.policy_class(name) for name in plugins.policy_names()}
    return [name for name, kind in kinds.items() if kind.evicts and kind.caches and plugins.is_ours(kind)]
