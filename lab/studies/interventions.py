"""Published remedies for attention sinks, tried on Bigram-Backcopy: a table of docs/experiments.md.

    python -m kvbench.lab.studies.interventions --train DIR   # trains what DIR lacks, a minute each; measures it
    python -m kvbench.lab.studies.interventions               # writes the table from docs/data/interventions.jsonl

B texts, T tokens.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from kvbench.harness.engine.own_attention import own_attention
from kvbench.harness.engine.watch import watch
from kvbench.harness.report.markdown import table
from kvbench.lab.attention.measure import load_watched
from kvbench.lab.attention.notes import Notes
from kvbench.lab.pretrain import tokenizer
from kvbench.lab.pretrain.config import load
from kvbench.lab.pretrain.samples import TrainingSamples
from kvbench.lab.pretrain.train import pretrain
from kvbench.lab.studies import DOCS

FILE, PAGE = DOCS / "data" / "interventions.jsonl", DOCS / "experiments.md"
SHORTER, SEEDS = ["training.tokens=4096000", "training.keep=[]"], (0, 1, 2)
TEXTS, SEED_OF_TEXTS, EPSILON = 128, 1_000_003, 0.3
GU, GUO, KAUL, HE = "Gu et al. 2024", "Guo et al. 2024", "Kaul et al. 2024", "He et al. 2024"
# Changes to the recipe; what papers say of sinks on the first token, if anything ("stays", "goes"), and who.
RECIPES: dict[str, tuple[list[str], str | None, str]] = {
    "softmax": ([], "stays", GUO),
    "relu": (["attention=relu"], "goes", GUO),
    "sgd": (["training.optimizer=sgd", "training.learning_rate=0.1"], "stays", f"{GUO}: peaks of hidden states go"),
    "sigmoid": (["attention=sigmoid"], "goes", GU),
    "sigmoid_shares": (["attention=sigmoid_shares"], None, f"{GU}: none without the division"),
    "elu": (["attention=elu"], "goes", GU),
    "elu_shares": (["attention=elu_shares"], None, f"{GU}: none without the division"),
    "zero_sink": (["zero_sink=true"], "goes", f"{KAUL}, {GU}"),
    "key_bias": (["attention=key_bias"], "goes", f"{GU}: to the bias"),
    "pseudo": (["attention=pseudo"], "goes", "Yin et al. 2024"),
    "clipped": (["attention=clipped"], "goes", "Bondarenko et al. 2023, of delimiters"),
    "protected": (["attention=protected"], None, f"{HE}: outliers go"),
    "qk_norm": (["attention=qk_norm"], None, f"{HE}: fewer outliers"),
    "sigma_reparam": (["sigma_reparam=true"], None, "Zhai et al. 2023: entropy stays"),
    "ortho_adam": (["training.optimizer=ortho_adam"], "stays", f"{KAUL}: outliers go"),
}


def trained(folder: Path, name: str, seed: int) -> Path:
    """The folder of a model, which is trained if it isn't there."""
    out = folder / f"{name}-{seed}"
    if not (out / "model" / "README.md").exists():
        config = load("backcopy", [f"name={name}-{seed}", f"seed={seed}", *SHORTER, *RECIPES[name][0]])
        pretrain(config, out, None, torch.device("cpu"), lambda _: None)
    return out / "model"


@torch.inference_mode()
def measured(folder: Path) -> dict[str, float]:
    """Figures of a model over held-out texts, by the attention task's notes; loss in nats a word."""
    model = load_watched(folder, "float32", torch.device("cpu")).hf
    config, words = load("backcopy"), tokenizer.wrapped(tokenizer.of_words(load("backcopy").words), 0)
    samples = TrainingSamples(config, ["backcopy"] * TEXTS, np.zeros(0, np.uint16), words, SEED_OF_TEXTS)
    ids, copies = (torch.cat([samples[at][key] for at in range(TEXTS)]) for key in ("input_ids", "answers"))
    notes = Notes(ids.shape[1], 2)
    watch(model, notes, input_ids=ids)
    seen = notes.arrays()
    with own_attention(model):
        logits = model(input_ids=ids, use_cache=False).logits[:, 1:-1]  # the sink's next word is any
    right = logits.argmax(-1) == ids[:, 2:]
    of_value = seen["value_norm"].mean(0)[0]
    figures = {
        "first": seen["first"].mean(),
        "no_token": seen["rest"].mean() if "rest" in seen else 0.0,
        "value": of_value[0] / of_value[1],
        "peak": (seen["hidden_largest"] / seen["hidden_median"]).mean(),
        "copied": right[copies[:, 2:]].float().mean(),
        "loss": cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten()),
    }
    return {figure: round(float(x), 5) for figure, x in figures.items()}


def mean_and_range(rows: list[dict[str, Any]], figure: str, digits: int) -> str:
    """The mean over seeds, and the least and the most in brackets."""
    values = [row[figure] for row in rows]
    mean, low, high = (f"{x:.{digits}f}" for x in (sum(values) / len(values), min(values), max(values)))
    return mean if low == high else f"{mean} [{low}, {high}]"


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table: a row for each recipe whose paper names the sink, means and ranges over its seeds."""
    cells = []
    for name, (_, said, who) in RECIPES.items():
        mine = [row for row in rows if row["name"] == name]
        if not mine or said is None:
            continue
        sinks = {row["first"] > EPSILON for row in mine}
        here = "seeds differ" if len(sinks) > 1 else "stays" if True in sinks else "goes"
        here = here if here == said else f"**{here}**"
        digits = {"first": 2, "loss": 3}
        figures = [mean_and_range(mine, figure, count) for figure, count in digits.items()]
        cells.append([f"`{name}`", *figures, f"{said} ({who})", here])
    head = ["recipe", "attention to the first token", "loss, nats", "the sink, published", "here"]
    return table(head, cells, "lrrll")


def main(arguments: list[str]) -> None:
    """Train and measure if asked to; write the table."""
    if arguments[:1] == ["--train"]:
        made = [(name, seed, trained(Path(arguments[1]), name, seed)) for seed in SEEDS for name in RECIPES]
        rows = [{"name": name, "seed": seed, **measured(folder)} for name, seed, folder in made]
        FILE.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    text, written = PAGE.read_text(encoding="utf-8"), "\n".join(lines(rows)).strip()
    mark = re.compile(r"(<!--interventions-->\n\n).*?(<!---->)", re.S)
    PAGE.write_text(mark.sub(lambda found: f"{found[1]}{written}\n\n{found[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
