"""Files beside a reference model: its card and its training curve, both written from the training log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.harness.core.intervals import MIN_BLOCKS, clustered_share
from kvbench.lab.pretrain.config import PretrainConfig
from kvbench.lab.pretrain.samples import NAMES

_FINAL_LOSS_STEPS = 200
_ATTENTION = {
    "softmax": "plain softmax",
    "zero_sink": "softmax off by one (a sink logit fixed at 0, `zero_sink` in the config)",
    "sink_logits": "softmax with a learned sink logit per head",
    "sigmoid": "sigmoid attention, not normalised",
    "gated": "softmax, with a gate on what attention returns",
    "clipped": "clipped softmax",
    "qk_norm": "softmax, with an RMSNorm of queries and keys",
    "relu": "the positive parts of logits over the number of keys, not normalised",
    "sigmoid_shares": "sigmoid attention, normalised",
    "elu": "ELU of logits plus 1, not normalised",
    "elu_shares": "ELU of logits plus 1, normalised",
    "pseudo": "softmax in which hidden keys take a weight that falls with their position (pseudo-attention)",
    "key_bias": "softmax with a learned key bias per head, without a value",
    "protected": "softmax, with an RMSNorm of queries and keys instead of norms before attention and MLP",
    "lckv": "softmax over the K and V that a later layer made of earlier tokens (`kv_layers` in the config)",
}
_WORDS = "a token for each word"
_BYTES = "byte-level BPE trained on the same text, numbers below 1,000 are one token, of longer ones the last two digits"
_FAMILIES, _POSITIONS = {"llama": "Llama", "gpt2": "GPT-2"}, {"llama": "RoPE", "gpt2": "learned positions"}
_SIGMA = " of sigma-reparametrised linear layers"
_OPTIMIZERS = {"adamw": "AdamW", "ortho_adam": "OrthoAdam", "sgd": "SGD, momentum 0.9"}


def card(
    config: PretrainConfig,
    log: Path,
    parameters: int,
    answers: dict[str, list[tuple[int, int]]],
    unbroken: dict[int, tuple[int, int]],
    about: dict[str, Any],
) -> str:
    """The text of the model's README.

    `log` has one line of JSON per step. `answers` has, by kind, (right answers, questions) of each sample after training;
    `unbroken`, by tokens of a trace, (traces right up to there, traces as long); `about`, the device,
    threads and versions of the training run.
    """
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    last = rows[-_FINAL_LOSS_STEPS:]
    loss = sum(r["loss"] for r in last) / len(last)
    probes = [r for r in rows if "attention_to_first" in r]
    chosen = [*probes[:: max(1, len(probes) // 8)], *probes[-1:]]
    curve = "\n".join(
        f"| {r['tokens']:,} | {r['attention_to_first']['largest']:.3f} | {r['attention_to_first']['mean']:.3f} |" for r in chosen
    )
    numbers = {1: "one learnable sink token stands", 2: "two learnable sink tokens stand"}
    opening = numbers.get(config.sinks, f"{config.sinks} learnable sink tokens stand") if config.sinks else "nothing stands"
    attention = _ATTENTION["zero_sink" if config.zero_sink else config.attention]
    shape, training = config.shape, config.training
    start = "" if config.start is None else f"; goes on from {config.start}"
    decay = f"decay to a tenth over the last {training.decay:.0%} of the steps"
    schedule = {"cosine": "cosine to a twentieth", "linear": "linear to nothing"}.get(training.schedule, decay)
    return f"""# {config.name}

A {_FAMILIES[shape.family]} with {parameters:,} parameters for measuring KV-cache policies, made by `bench pretrain {config.name}`:
{opening} before a text; {attention}. Use it only to compare caches on text like its training text: it has no other knowledge.

| | |
|---|---|
| shape | {shape.layers} layers, width {shape.hidden}, {shape.heads} query and {shape.kv_heads} KV heads, MLP {shape.intermediate}, tied embeddings, {_POSITIONS[shape.family]} |
| vocabulary | {shape.vocabulary:,}, {_WORDS if config.words else _BYTES} |
| samples | {_samples(config)}; seed {config.seed} |
| training | {rows[-1]["tokens"]:,} tokens, one pass, in samples of {training.sample}, {training.batch} {"sample" if training.batch == 1 else "samples"} per step{start} |
| optimiser | {_OPTIMIZERS[training.optimizer]}{_SIGMA if config.sigma_reparam else ""}, learning rate {training.learning_rate:g}, weight decay {training.weight_decay:g}, warm-up {training.warmup:.0%}, {schedule} |
| loss | {loss:.4f} nats per counted token, mean of the last {len(last)} steps |
| trained on | {", ".join(f"{k} {v}" for k, v in about.items())} |
| weights | float16 |

{_answers(answers)}{_unbroken(unbroken)}Attention to the first token during training, on held-out samples, over queries from the 64th on (the head with the most, and the
mean of all heads):

| tokens | largest | mean |
|---:|---:|---:|
{curve}
"""  # noqa: E501


def _answers(answers: dict[str, list[tuple[int, int]]]) -> str:
    """A table of the answers; empty if nothing was asked."""
    if not answers:
        return ""
    rows = "\n".join(f"| {kind} | {_share(samples)} | {len(samples)} |" for kind, samples in answers.items())
    return f"""Questions about held-out samples, every token of an answer right (dense, float32; for repeats, stretches).
Intervals (95 %) have samples as their units, as the questions of one resemble each other:

| kind | right | samples |
|---|---:|---:|
{rows}

"""


def _unbroken(traces: dict[int, tuple[int, int]]) -> str:
    """A table of whole traces; empty if the model has learnt none."""
    if not traces:
        return ""
    rows = "\n".join(f"| {at:,} | {100 * right / count:.1f} % | {count} |" for at, (right, count) in traces.items())
    return f"""Traces of held-out programs without one wrong token, up to so many tokens of the trace (dense, greedy, float32):

| tokens | right | traces |
|---:|---:|---:|
{rows}

"""


def _share(samples: list[tuple[int, int]]) -> str:
    """Share of right answers, with its interval."""
    right, asked = (np.array(x, np.float64) for x in zip(*samples, strict=True))
    ends = clustered_share(right, asked) if len(samples) >= MIN_BLOCKS else None
    interval = "" if ends is None else f" [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"
    return f"{100 * right.sum() / asked.sum():.1f} %{interval} of {asked.sum():,.0f}"


def _samples(config: PretrainConfig) -> str:
    """Describe what the model was trained on."""
    mix, repeats = config.text, config.repeats
    sources = _shares({"PG-19 train books": mix.pg19, "generated prose": mix.prose})
    kinds = _shares({name: getattr(config.kinds, name) for name in NAMES})
    words = kinds if config.words else f"{kinds} (running text: {sources})"
    if repeats.share:
        words += (
            f"; {repeats.share:.0%} of all, and {repeats.later:.0%} after {repeats.until:.0%} of the steps, are repeats instead"
        )
    return words


def _shares(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {share / sum(parts.values()):.0%}" for name, share in parts.items() if share)


CURVE_NAME = "training.jsonl"  # of the training curve, in a model's directory
_MAX_POINTS = 150


def curve(log: Path) -> str:
    """The log, thinned for a chart, as lines of JSON: tokens so far, mean loss, and the latest attention to the first token."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    stride = max(1, len(rows) // _MAX_POINTS)
    lines = []
    for start in range(0, len(rows), stride):
        steps = rows[start : start + stride]
        probes = [row["attention_to_first"] for row in steps if "attention_to_first" in row]
        line = {"tokens": steps[-1]["tokens"], "loss": round(sum(row["loss"] for row in steps) / len(steps), 5)}
        lines.append(line | ({"attention_to_first": {k: round(v, 5) for k, v in probes[-1].items()}} if probes else {}))
    return "".join(f"{json.dumps(line)}\n" for line in lines)
