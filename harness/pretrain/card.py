"""The card of a reference model: what it is, what it saw, how far it came. Written from its configuration and log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvbench.harness.pretrain.config import PretrainConfig

_LAST = 200  # steps whose mean loss is told


def card(config: PretrainConfig, log: Path, parameters: int, about: dict[str, Any]) -> str:
    """A model's README.

    Args:
        config: of the model.
        log: of its training, a line of JSON a step.
        parameters: how many it has.
        about: where it was trained: device, threads, versions.
    """
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    last = rows[-_LAST:]
    loss = sum(r["loss"] for r in last) / len(last)
    probes = [r for r in rows if "attention_to_first" in r]
    chosen = [*probes[:: max(1, len(probes) // 8)], *probes[-1:]]
    curve = "\n".join(
        f"| {r['tokens']:,} | {r['attention_to_first']['largest']:.3f} | {r['attention_to_first']['mean']:.3f} |" for r in chosen
    )
    numbers = {1: "one learnable sink token stands", 2: "two learnable sink tokens stand"}
    stands = numbers.get(config.sinks, f"{config.sinks} learnable sink tokens stand") if config.sinks else "nothing stands"
    softmax = "softmax off by one (a sink logit fixed at 0, `zero_sink` in the config)" if config.zero_sink else "plain softmax"
    shape, training, mix = config.shape, config.training, config.text
    return f"""# {config.name}

A Llama of {parameters:,} parameters, for measuring what KV-cache policies do, made by `bench pretrain {config.name}`:
{stands} before a text; {softmax}. It is good for comparing caches on text like that it was trained on. It is good for nothing else: it knows nothing.

| | |
|---|---|
| shape | {shape.layers} layers, width {shape.hidden}, {shape.heads} query and {shape.kv_heads} KV heads, MLP {shape.intermediate}, tied embeddings, RoPE |
| vocabulary | {shape.vocabulary:,}, byte-level BPE learnt from the same text, numbers in pairs of digits |
| text | by characters: PG-19 train books {mix.pg19:.0%}, record-and-query text {mix.records:.0%}, generated prose {mix.prose:.0%}; seed {config.seed} |
| seen | {rows[-1]["tokens"]:,} tokens in samples of {training.sample}, {training.batch} a step, once each |
| optimiser | AdamW, learning rate {training.learning_rate:g}, weight decay {training.weight_decay:g}, warm-up {training.warmup:.0%}, decay to a tenth over the last {training.decay:.0%} of the steps |
| loss | {loss:.4f} nats a token, mean of the last {len(last)} steps |
| trained on | {", ".join(f"{k} {v}" for k, v in about.items())} |
| weights | float16 |

Attention to the first token while it was trained (the most attentive head, and the mean of all; held-out samples, queries from the
64th on):

| tokens | largest | mean |
|---:|---:|---:|
{curve}
"""  # noqa: E501
