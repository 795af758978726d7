"""Proof that every kernel computes what plain PyTorch computes, at real head dims: a line per kernel, in about a minute.

    python tests/gpu/proof.py [--out proof.jsonl] [--rehearse]

In float32 and bfloat16; its rehearsal is in float32, with Triton's interpreter and a stand-in for CUDA graphs. A kernel and plain
code are both compared with plain code in float64, and the kernel's largest error may be twice the plain one, or a rounding of the
largest number. A check that fails does not end the others.

Axis letters: B streams, H KV heads, G query heads of a KV head, T tokens, L keys, E sinks, D head dim.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from conftest import DEVICE  # before Triton is imported: it chooses the interpreter
from test_triton_shapes import BY_KERNELS, Case, read, rotation_of
from torch import Tensor

from kvbench.harness.engine import banded
from kvbench.harness.engine.attention import Terms
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import FASTEST, PLAIN_WALK, RAN, TOKEN_BY_TOKEN, Method
from kvbench.harness.engine.model import adopt
from kvbench.harness.engine.rotary import rotate
from kvbench.harness.engine.trial import MethodCheck
from kvbench.harness.kernels import choose, cuda, flex, rope
from kvbench.harness.kernels.captured import PROCESS, CapturedSteps
from kvbench.harness.models.families import tiny_model
from kvbench.policies import Policy
from kvbench.policies.h2o import H2O
from kvbench.policies.sink_window import SinkWindow

DIM, SINKS = 128, 4
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8}  # of the largest number
EXACT = {torch.float32: 1e-4}  # rounding of logits, that of the engine's own check
Errors = tuple[float, float]  # the kernel's, and the one that is allowed


def errors(ours: Tensor, plain: Tensor, exact: Tensor, rounding: float) -> Errors:
    """Largest error of a kernel, and the one that is allowed."""
    found, of_plain = (float((x.double() - exact).abs().max()) for x in (ours, plain))
    return found, max(2 * of_plain, rounding * float(exact.abs().max()))


def layer(dtype: torch.dtype, policy: Policy, group: int, heads: int, capacity: int, tokens: int, graphs: bool = False) -> Errors:
    """`attend`, `join` and `release` on a full cache of one layer: its output, and what is kept where.

    Raises:
        ValueError: another token was evicted, or with `graphs` nothing was replayed.
    """
    case = Case(group, (DIM, DIM), dtype, "cache", (capacity, capacity + 100), (1, 1, heads), 1, 1, policy, False)
    before = RAN["walk in graphs"]
    ours, plain = (read(case, dtype, method, tokens) for method in (replace(BY_KERNELS, walk_graphs=graphs), TOKEN_BY_TOKEN))
    exact = read(case, torch.float64, TOKEN_BY_TOKEN, tokens)
    for name in ("free", "rank", "position"):
        if not torch.equal(getattr(ours.slots.tensors, name), getattr(plain.slots.tensors, name)):
            raise ValueError(f"another {name} than that of plain code")
    if graphs and RAN["walk in graphs"] == before:
        raise ValueError(f"nothing was replayed: {PROCESS.failed}")
    return errors(ours.out, plain.out, exact.out, ROUNDING[dtype])


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers, as a dtype rounds them, in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype).double()


def rotated(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Plain and exact rotation of half-split vectors [..., T, D] float64, and what a kernel takes: vectors, halves, factors."""
    turn = rotation_of(Case(1, (DIM, DIM), dtype, "cache", (1, 1), (1, 1, 1), 1, 1, H2O(), False))
    assert turn is not None
    factors = turn.factors(torch.arange(5, 5 + x.shape[-2], device=DEVICE), dtype, 10_000)
    paired = turn.pair(x).contiguous()
    plain, exact = rotate(paired.to(dtype), factors), rotate(paired, factors.to(torch.complex128))
    return plain, exact, *rope.pairing(turn, x.to(dtype)), factors


def rotation(dtype: torch.dtype, tokens: int) -> Errors:
    """`rotate`: 4 heads, side by side in memory as a model makes them."""
    x = drawn(1, tokens, 4, DIM, dtype=dtype).transpose(1, 2)
    plain, exact, given, halves, factors = rotated(x, dtype)
    out = torch.empty(1, 4, tokens, DIM, device=DEVICE, dtype=dtype)
    rope.rotate_into(out, given, factors, halves)
    return errors(out, plain, exact, ROUNDING[dtype])


def band(dtype: torch.dtype, tokens: int, merged: bool) -> Errors:
    """FlexAttention over a window of 300 tokens, or `merge`, which adds sinks to it."""
    group, heads, before, window, first, terms = 4, 2, 205, 300, SINKS + 103, Terms(DIM**-0.5)
    query = drawn(1, heads, group, tokens, DIM, dtype=dtype)
    keys, values = (drawn(1, heads, before + tokens, DIM, dtype=dtype, seed=seed) for seed in (1, 2))
    seen = banded._band(tokens, before, window, DEVICE)
    plain = banded._with_all_scores(query.to(dtype), keys.to(dtype), values.to(dtype), seen, None, None, terms)
    exact = banded._with_all_scores(query, keys, values, seen, None, None, terms)
    if not merged:
        out, _ = flex.flex(query.to(dtype), keys.to(dtype), values.to(dtype), 0, window, terms)
        return errors(out, plain, exact, ROUNDING[dtype])
    scores = (query @ keys[:, :, None].mT * terms.scaling).masked_fill(~seen, -torch.inf)
    start, log_sum = first + before - window, scores.logsumexp(-1).float()
    of_plain, of_exact, given, halves, factors = rotated(query, dtype)
    sinks = banded.Sinks(of_exact, *(drawn(1, heads, SINKS, DIM, dtype=dtype, seed=seed) for seed in (3, 4)))
    narrow = banded.Sinks(of_plain, sinks.keys.to(dtype), sinks.values.to(dtype))
    outside = banded.outside_windows(sinks, tokens, start)
    expected = banded.merged(plain, log_sum, narrow, outside, terms)
    exact = banded._joined(plain.double(), log_sum.double(), sinks, outside, terms)
    out = rope.merge(plain.clone(), log_sum, given, factors, halves, narrow.keys, narrow.values, start, terms.scaling)
    return errors(out, expected, exact, ROUNDING[dtype])


def step(dtype: torch.dtype, method: Method) -> Errors:
    """Decode steps of a Llama of two layers that are replayed, beside the plain walk's.

    Raises:
        ValueError: they were not replayed.
    """
    sizes = {"hidden_size": 4 * DIM, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": DIM}
    if dtype not in EXACT:
        sizes["initializer_range"] = 0.02  # scores as small as those of real models, or rounding drowns what is compared
    model = adopt(tiny_model("llama", vocab_size=96, **sizes).to(DEVICE, dtype))
    config = CacheConfig(SinkWindow(SINKS), 40)
    if dtype not in EXACT:  # rounding grows from layer to layer, so attention is compared in each
        check = MethodCheck(model, config, 1)
        trial = check.trial(method)
        if trial.refused or not trial.ran.get("captured step"):
            raise ValueError(trial.refused or f"steps are not replayed: {trial.eager_because}")
        return check.max_error, 1.0
    fast, plain = (CachedDecoder(model, config, 1, x) for x in (method, PLAIN_WALK))
    fast.graphs = CapturedSteps(lambda step, tokens: step, 2) if fast.graphs is None else fast.graphs.fresh(after=2)
    tokens = torch.randint(96, (1, 60), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ours, theirs = (torch.cat([x(block) for block in tokens.split([50, *[1] * 10], 1)][1:], 1) for x in (fast, plain))
    if fast.graphs.refused or not fast.graphs.replayed:
        raise ValueError(f"steps are not replayed: {fast.graphs.refused}")
    return float((ours - theirs).abs().max()), EXACT[dtype] * max(1.0, float(theirs.abs().max()))


def checks(small: bool) -> Iterator[tuple[str, torch.dtype, Callable[[], Errors]]]:
    """Every kernel in every dtype; what takes long to compile comes last."""
    dtypes = [torch.float32] if small else [torch.float32, torch.bfloat16]
    capacity, heads, tokens = (40, 1, 128) if small else (4096, 8, 512)
    shape = f"heads of {DIM} dims, {capacity:,} tokens kept"
    for t in dtypes:
        yield f"attend, join, release: sink+window, {shape}", t, lambda t=t: layer(t, SinkWindow(4), 1, heads, capacity, 1)
        yield f"attend with its weights: H2O, GQA, {shape}", t, lambda t=t: layer(t, H2O(), 4, heads, capacity, 1)
        yield f"walk of 8 tokens: H2O, GQA, {shape}", t, lambda t=t: layer(t, H2O(), 4, heads, capacity, 8)
        if t == torch.float32:  # in 16 bits rounding may choose another victim
            yield (
                f"walk of 40 tokens in CUDA graphs: H2O, GQA, {shape}",
                t,
                lambda t=t: layer(t, H2O(), 4, heads, capacity, 40, True),
            )
        yield f"rotate: {tokens} tokens", t, lambda t=t: rotation(t, tokens)
        yield f"merge: {SINKS} sinks, {tokens} tokens", t, lambda t=t: band(t, tokens, True)
        yield "captured step: 2 layers of Llama", t, lambda t=t: step(t, FASTEST)
    for t in dtypes:
        yield f"FlexAttention: window of 300, {tokens} tokens", t, lambda t=t: band(t, tokens, False)
    if not small:  # on a CPU inductor takes minutes
        yield "fused step: 2 layers of Llama", dtypes[-1], lambda: step(dtypes[-1], replace(FASTEST, fused=True))


def outcome(check: Callable[[], Errors]) -> dict[str, Any]:
    """What came of a check: its errors, or why there are none."""
    try:
        error, allowed = check()
    except Exception as failure:  # the next kernel is to be checked all the same
        lines = str(failure).strip().splitlines()
        return {"good": False, "error": None, "allowed": None, "why": f"{type(failure).__name__}: {lines[0] if lines else ''}"}
    return {"good": error <= allowed, "error": float(f"{error:.2g}"), "allowed": float(f"{allowed:.2g}"), "why": ""}


def main() -> int:
    """Check all kernels. -> 1 if any is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="file of the lines, in JSON; proof.jsonl in BENCH_RESULTS if that is set")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU")
    arguments = parser.parse_args()
    if arguments.out is None and "BENCH_RESULTS" in os.environ:
        arguments.out = Path(os.environ["BENCH_RESULTS"]) / "proof.jsonl"
    if arguments.rehearse:
        cuda._GRAPH_DEVICES, cuda.replayable = {"cpu"}, lambda launches, device: launches
        choose._MODULES["cpu"], rope._DEVICES, flex._DEVICES = cuda, {"cpu"}, {"cpu"}
    results = []
    for name, dtype, check in checks(arguments.rehearse):
        began = time.monotonic()
        with torch.inference_mode():
            result = {"check": name, "dtype": str(dtype).removeprefix("torch."), **outcome(check)}
        results.append(result | {"seconds": round(time.monotonic() - began, 1)})
        told = "{good!s:5} {dtype:9} {check}: error {error}, allowed {allowed} {why} ({seconds} s)"
        print(told.format(**results[-1]), flush=True)
        if arguments.out is not None:
            arguments.out.write_text("".join(f"{json.dumps(x)}\n" for x in results))
    return int(not all(result["good"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
