"""`make peers`: compares our policies with other people's code, and writes docs/data/peers.json for docs/comparison.md.

    PYTHONPATH=tests:. python -m peers.compare --kvpress-python PYTHON

PYTHON is that of the environment in `requirements.txt`. Exits with 1 if a row that must be the same is not, or
differs by more than is known, and says which.

Axis letters: L layers, H heads, N tokens of the prompt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peers import masked, page
from peers.cases import CONTINUATION, MODELS, PROMPTS, Cell, Prompt, cells_of, write_json
from peers.ours import Prompted, build, engine_nlls, kept
from peers.rows import ROWS, Row
from transformers import AutoModelForCausalLM

from kvbench.harness.data import pg19
from kvbench.harness.engine.model import Model, adopt
from kvbench.harness.models.families import tiny_model
from kvbench.harness.models.load import load_tokenizer

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
NLL_TOLERANCE = 1e-3  # nats a token
TIE = 1e-5  # scores this close, of the larger one, may be ranked either way by two orders of the same float32 sums

Arrays = dict[str, np.ndarray]


def random_model() -> Any:
    """A tiny Qwen2 with 2 KV heads of 3 query heads each."""
    return tiny_model(
        "qwen2",
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )


def model_folders(folder: Path) -> dict[str, Path]:
    """Where both environments load each model from; without the models kept beside the repository, fewer."""
    path = folder / "random-qwen2"
    random_model().save_pretrained(path)
    beside = SHARED / "models/stories260K"
    return ({"stories260K": beside} if beside.is_dir() else {}) | {"random-qwen2": path}


def token_ids(model: str, prompt: Prompt, path: Path) -> np.ndarray:
    """Prompt and continuation. [N + CONTINUATION] int64."""
    count = prompt.length + CONTINUATION
    if prompt.book:
        text = next(iter(islice(pg19.books("validation", SHARED / "data/pg19")[1], prompt.seed, None))).text
        ids = load_tokenizer(path)(text[20_000:30_000], add_special_tokens=False).input_ids
        return np.array(ids[:count])
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(prompt.seed)).numpy()


@dataclass
class Found:
    """How one cell of one row came out."""

    cell: Cell
    kept: int  # tokens that theirs keeps, over layers and heads
    differ: int  # of them, those that ours does not keep, or as many more as ours keeps
    ties: int  # likewise, where scores tie
    theirs_nll: float  # mean over the continuation
    ours_nll: float
    apart: float  # largest difference of a token's NLL
    by_engine: bool  # ours_nll is of the engine's cache, not of a mask
    by_them: bool  # theirs_nll is of their own code, not of a mask

    def as_json(self) -> dict[str, Any]:
        """Facts, rounded so that another machine's rounding does not show."""
        rounded = {k: round(getattr(self, k), 5) for k in ("theirs_nll", "ours_nll")}
        counts = {k: getattr(self, k) for k in ("kept", "differ", "ties", "by_engine", "by_them")}
        at = {"prompt": self.cell.prompt.name, "capacity": self.cell.capacity if self.cell.row.takes_capacity else None}
        return at | counts | rounded | {"agrees": self.agrees}

    @property
    def agrees(self) -> bool | None:
        """Whether every token's NLL is the same; None where other positions are kept, so that it can't be."""
        return None if self.differ or self.ties else self.apart <= NLL_TOLERANCE


def difference(theirs: np.ndarray, ours: np.ndarray, scores: np.ndarray | None, pool: str) -> tuple[int, int]:
    """(tokens that differ, tokens that differ where scores tie). Masks and scores [L, H, N]."""
    if pool == "layer":
        theirs, ours = (x.reshape(len(x), 1, -1) for x in (theirs, ours))
        scores = None if scores is None else scores.reshape(len(scores), 1, -1)
    differ = ties = 0
    for at in np.ndindex(theirs.shape[:2]):
        gone, more = theirs[at] & ~ours[at], ours[at] & ~theirs[at]
        count = int(max(gone.sum(), more.sum()))
        if count and scores is not None and gone.sum() == more.sum() and tied(scores[at][gone | more]):
            ties += count
        else:
            differ += count
    return differ, ties


def tied(scores: np.ndarray) -> bool:
    """Whether all of these scores are equal but for rounding."""
    highest, lowest = float(scores.max()), float(scores.min())
    return highest == lowest or (np.isfinite(highest) and highest - lowest <= TIE * max(abs(highest), abs(lowest)))


class Peers:
    """All comparisons on one model."""

    def __init__(self, name: str, folder: Path, path: Path, prompts: Arrays) -> None:
        self.name, self.folder, self.prompts = name, folder, prompts
        self.theirs: Arrays = {}  # of kvpress
        self.model: Model = adopt(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())
        self.prompted: dict[str, Prompted] = {}
        for p in PROMPTS[name]:
            ids = torch.tensor(prompts[f"{name}|{p.name}"][None, : p.length])
            self.prompted[p.name] = Prompted(self.model, ids)

    def found(self, row: Row) -> list[Found]:
        """Every cell of a row."""
        policy = build(row.ours, self.model, self.folder)
        return [self._compare(cell, policy) for cell in cells_of(row, self.name)]

    def their_kept(self, cell: Cell) -> tuple[np.ndarray, np.ndarray | None]:
        """Mask and scores. [L, H, N]."""
        shape = (len(self.model.layers), self.model.layers[0].heads, cell.prompt.length)
        return self.theirs.get(f"{cell.key}|kept", np.ones(shape, bool)), self.theirs.get(f"{cell.key}|scores")

    def _compare(self, cell: Cell, policy: Any) -> Found:
        prompted, length = self.prompted[cell.prompt.name], cell.prompt.length
        tokens = torch.tensor(self.prompts[f"{self.name}|{cell.prompt.name}"][None])
        turned = cell.row.positions == "cache"
        mask, scores = self.their_kept(cell)
        capacity = int(mask.sum()) // mask[..., 0].size if cell.row.capacity == "theirs" else cell.capacity
        our_mask = kept(prompted, policy, capacity)
        ours = engine_nlls(prompted, policy, capacity, cell.row.positions, tokens[0, length:])
        by_engine = ours is not None
        if ours is None:
            ours = masked.nlls(self.model, tokens, our_mask, turned)
        theirs = self.theirs.get(f"{cell.key}|nlls")
        by_them = theirs is not None
        if theirs is None:
            theirs = masked.nlls(self.model, tokens, torch.tensor(mask), turned).numpy()
        differ, ties = difference(mask, our_mask.numpy(), scores, cell.row.pool)
        apart = float(np.abs(ours.numpy() - theirs).max())
        return Found(cell, int(mask.sum()), differ, ties, float(theirs.mean()), float(ours.mean()), apart, by_engine, by_them)


def wrong(found: Found) -> str | None:
    """What breaks the row: too many positions differ, or NLLs do where none does."""
    cell = found.cell
    at = f"{cell.row.key}: {cell.model}, {cell.prompt.name}, capacity {cell.capacity}"
    if found.differ > cell.row.may_differ * found.kept:
        return f"{at}: {found.differ} of {found.kept} kept positions differ"
    if found.agrees is False:
        return f"{at}: the same positions, but a token's NLL is {found.apart:.4f} nats apart"
    return None


def start_kvpress(python: str, folder: Path) -> subprocess.Popen[bytes]:
    """Runs `kvpress_side` in its own environment."""
    env = {"PYTHONPATH": str(ROOT / "tests"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.Popen([python, "-m", "peers.kvpress_side", str(folder)], env=env)


def arrays_of(process: subprocess.Popen[bytes], folder: Path) -> Arrays:
    """Everything that it writes.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return dict(np.load(folder / "theirs.npz"))


def facts(row: Row, peers: list[Peers]) -> tuple[dict[str, Any], list[str]]:
    """One row of the data, and what is wrong with it."""
    try:
        found, missing = [f for peer in peers for f in peer.found(row)], None
    except (LookupError, TypeError, ValueError) as error:
        found, missing = [], f"{type(error).__name__}: {error}"
    by_model = {m: [f.as_json() for f in found if f.cell.model == m] for m in MODELS}
    told = {
        "key": row.key,
        "theirs": row.theirs,
        "ours": row.ours,
        "repository": row.source[0],
        "commit": row.source[1],
        "means": row.means,
        "may_differ": row.may_differ,
        "why": row.why,
        "positions": row.positions,
        "missing": missing,
        "models": by_model,
    }
    return told, [f"{row.key}: {missing}"] if missing else [text for f in found if (text := wrong(f))]


def compare(python: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """All facts, and what is wrong. folder: to work in."""
    folders = model_folders(folder)
    prompts = {f"{m}|{p.name}": token_ids(m, p, path) for m, path in folders.items() for p in PROMPTS[m]}
    np.savez(folder / "prompts.npz", **prompts)
    (folder / "models.json").write_text(json.dumps({m: str(path) for m, path in folders.items()}))
    theirs = arrays_of(start_kvpress(python, folder), folder)
    peers = [Peers(m, folder, path, prompts) for m, path in folders.items()]
    for peer in peers:
        peer.theirs.update(theirs)
    found = [facts(row, peers) for row in ROWS]
    data = {"rows": [row for row, _ in found], "continuation": CONTINUATION}
    return data, [problem for _, problems in found for problem in problems]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvpress-python", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        data, problems = compare(arguments.kvpress_python, Path(folder))
    if all(any(row["models"][m] for row in data["rows"]) for m in MODELS):
        write_json(page.DATA, data)
    else:
        print("stories260K is not beside the repository: only the random model was compared; nothing is written", file=sys.stderr)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(data['rows'])} rows, {len(problems)} problems", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
