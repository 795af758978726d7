"""One instance of every policy that ships, for tests that hold for all of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from kvbench.harness.core import plugins
from kvbench.policies import Policy

LAYERS, HEADS = 2, 2  # of the tiny llama


def instances(folder: Path) -> dict[str, Policy]:
    """Every policy that evicts, by name, with its defaults; what needs a file gets one, for a tiny llama.

    Args:
        folder: to write the files to.
    """
    table = folder / "heads.json"
    table.write_text(
        json.dumps({"importance": [[0.1 * (3 * layer + head + 1) for head in range(HEADS)] for layer in range(LAYERS)]})
    )
    replay = folder / "map.pt"
    torch.save(torch.arange(200).expand(LAYERS, HEADS, -1).contiguous().int(), replay)
    needed = {"replay": {"file": str(replay)}, "headkv": {"file": str(table)}, "duo_attention": {"file": str(table)}}
    found = {}
    for name in plugins.policy_names():
        kind = plugins.policy_class(name)
        if kind.evicts and kind.caches:
            found[name] = kind(**needed.get(name, {}))
    return found
