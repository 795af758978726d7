"""Every policy in one process and in two that share the model; run by test_tensor_parallel.py. Prints JSON."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import every_policy
import torch

from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.decoder import CacheConfig, Evict
from kvbench.harness.engine.loop import CachedDecoder, decoder
from kvbench.harness.engine.method import EAGER, FASTEST
from kvbench.harness.engine.model import Model
from kvbench.harness.models.families import tiny_model
from kvbench.harness.models.load import load_model
from kvbench.policies import CacheView, Policy
from kvbench.policies.adakv import AdaKV
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.headkv import HeadKV
from kvbench.policies.recompute_sink_window import RecomputeSinkWindow
from kvbench.policies.recompute_window import RecomputeWindow
from kvbench.policies.tova import Tova

CAPACITY, PROMPT, LENGTH, STREAMS = 16, 36, 48, 2
FAMILIES = ("gemma2", "mixtral", "phi3", "qwen3", "qwen3_shared_kv")
RAGGED = ("adakv", "h2o", "random", "tova")
CPU = torch.device("cpu")
TOKENS = torch.randint(96, (STREAMS, LENGTH), generator=torch.Generator().manual_seed(0))


def nll(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return -logits[:, :-1].double().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def read(model: Model, config: CacheConfig, how: str):
    """What a decoder computes, keeps and says of itself."""
    method, size = (FASTEST, 23) if how == "fastest" else (EAGER, 15)
    reader, tokens, start = decoder(model, config, STREAMS, method), TOKENS, 0
    parts = []
    if config.evict == "prompt":
        parts, start = [reader.read_prompt(tokens[:, :PROMPT], 16)[:, None]], PROMPT
    valid = torch.rand(STREAMS, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.7 if how == "ragged" else None
    for at in range(start, LENGTH, size):
        part = slice(at, at + size)
        parts.append(reader(tokens[:, part], None if valid is None else valid[:, part]))
    parts.append(reader.fork([1, 0])(tokens[:, :3]))
    logits = torch.cat(parts, 1)
    scored = torch.cat([tokens[:, max(0, start - 1) :], tokens[:, :3]], 1)
    counted = None if valid is None else torch.cat([valid[:, :-1], valid[:, -1:], torch.ones(STREAMS, 2, dtype=torch.bool)], 1)
    losses = nll(logits, scored)
    kept = reader.kept() if isinstance(reader, CachedDecoder) else []
    figures = [reader.kv_bytes, reader.held_bytes, *reader.slots, round(reader.held(list(range(PROMPT))), 9)]
    return losses if counted is None else losses[counted], kept, figures


def compared(models: list[Model], policy: Policy, evict: Evict, how: str) -> dict[str, object]:
    takes_capacity = policy.evicts and not policy.outcome
    config = CacheConfig(policy, CAPACITY if takes_capacity else None, evict=evict)
    (one, kept_by_one, of_one), (two, kept_by_two, of_two) = (read(model, config, how) for model in models)
    return {
        "difference": float((one - two).abs().max()), "kept": kept_by_one == kept_by_two,
        "figures": [of_one, of_two],
    }  # fmt: skip


@dataclass(frozen=True)
class Broken(H2O):
    """Fails in the middle of a block, in every process."""

    def importance(self, view: CacheView) -> torch.Tensor:
        raise ArithmeticError("a bug")


def broken(model: Model) -> str:
    try:
        decoder(model, CacheConfig(Broken(), CAPACITY), STREAMS)(TOKENS)
    except ArithmeticError as error:
        return str(error)
    return ""


def refusal(of: Model, config: CacheConfig) -> str:
    try:
        decoder(of, config)
    except ValueError as error:
        return str(error)
    return ""


def of_family(folder: Path) -> str:
    """Whether two processes can share a model of the family that the folder is named after."""
    tiny_model(folder.name, vocab_size=96).save_pretrained(folder)
    try:
        load_model(folder, "float32", CPU, devices=2, parallel="tensor")
    except UserError as error:
        return str(error)
    return "checked"


def main(directory: Path) -> None:
    one = load_model(directory, "float64", CPU)  # where no rounding decides who is evicted
    two = load_model(directory, "float64", CPU, devices=2, parallel="tensor")
    models, results = [one, two], dict[str, object]()
    every_policy.HEADS = one.layers[0].heads
    with tempfile.TemporaryDirectory() as folder:
        policies = every_policy.instances(Path(folder))
        for name, policy in policies.items():
            ways: list[tuple[Evict, str]] = [("prompt", "eager")]
            if not policy.outcome:
                ways += [(1, "fastest"), (5, "eager")]
            ways += [(1, "eager"), (1, "ragged")] if name in RAGGED else []
            for evict, how in ways:
                results[f"{name} {evict} {how}"] = compared(models, policy, evict, how)
        for policy in (Dense(), RecomputeWindow(), RecomputeSinkWindow(sinks=2), AdaKV(score=Tova())):
            for how in ("eager", "ragged"):
                results[f"{type(policy).__name__} 1 {how}"] = compared(models, policy, 1, how)
        table = str(Path(folder) / "heads.json")
        results["refused"] = refusal(two, CacheConfig(HeadKV(file=table, score=Tova(), beta=2.0), CAPACITY))
        results["broken"] = [broken(model) for model in models]
        results["after"] = compared(models, policies["h2o"], 1, "eager")
        results["families"] = {family: of_family(Path(folder) / family) for family in FAMILIES}
    results["kv_bytes"] = [model.kv_bytes(CAPACITY, STREAMS) for model in models]
    results["facts"] = [model.facts()["kv_shapes"] for model in models]
    results["heads"] = [model.layers[0].heads for model in models]
    results["self checks"] = [model.check for model in models]
    print(json.dumps(results))
