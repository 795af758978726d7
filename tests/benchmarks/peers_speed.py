"""Tokens per second of other harnesses and of ours on the same work: one model, one text, one process, in turn. Medians.

    make peers-speed      # in kvpress' environment; docs/comparison.md sums it up

The model has random weights and a built-in model's tokenizer, so that no answer ends before its time.
"""

import argparse
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import kvpress
import torch
import transformers
from frozen import h2o_nll, made, sink_window_nll
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import DynamicCache, pipeline

import kvbench
from kvbench.harness.data.prose import Prose
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.fastcheck import fast_method
from kvbench.harness.engine.loop import decoder
from kvbench.harness.engine.model import Model, adopt
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import load_tokenizer
from kvbench.harness.report.markdown import table
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.sink_window import SinkWindow

PIECE, PIECES, CONTEXT, ANSWER, KEPT = 512, 8, 768, 128, 256  # tokens; pieces of text
Work = dict[str, tuple[int, Callable[[], Any]]]  # tokens, and what handles them; ours last


def reading(model: Model, hf: Any, tokenizer: Any, text: list[str]) -> Work:
    """NLLs of short texts under the model's own attention, and under H2O."""
    requests = [Instance("loglikelihood", {}, ("", piece), i) for i, piece in enumerate(text)]
    ids = [tokenizer(piece, add_special_tokens=False)["input_ids"][:PIECE] for piece in text]
    tokens = torch.tensor(ids)
    theirs = HFLM(pretrained=hf, tokenizer=tokenizer, batch_size=PIECES, max_length=PIECE)

    def read(config: CacheConfig) -> Callable[[], Any]:
        method = fast_method(model, config, PIECES).method
        return lambda: torch.log_softmax(decoder(model, config, PIECES, method)(tokens).float(), -1)

    def frozen() -> None:
        h2o_nll(made_eager, tokens[:1], KEPT // 2, KEPT // 2, [])

    made_eager = made("5m", torch.float32, "eager")
    return {
        "lm-eval `hf`": (tokens.numel(), lambda: theirs.loglikelihood(requests, disable_tqdm=True)),
        "ours, dense": (tokens.numel(), read(CacheConfig(Dense()))),
        "H2O, a loop as usually written": (PIECE, frozen),
        "ours, H2O": (tokens.numel(), read(CacheConfig(H2O(), KEPT))),
    }


def streaming(model: Model, hf: Any, tokens: torch.Tensor) -> Work:
    """NLLs of an endless text under StreamingLLM."""
    config = CacheConfig(SinkWindow(sinks=4), KEPT)
    method = fast_method(model, config).method
    return {
        "StreamingLLM's loop": (1024, lambda: sink_window_nll(hf, tokens[:, :1024], 4, KEPT - 4, [])),
        "ours, sink_window": (tokens.shape[1], lambda: decoder(model, config, 1, method)(tokens)),
    }


def answering(hf: Any, tokenizer: Any, text: str) -> Work:
    """An answer to a long prompt: nothing cut, cut by SnapKV, or evicting at every step."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][:, :CONTEXT]
    tokenizer.chat_template, context = None, tokenizer.decode(ids[0])
    theirs = pipeline("kv-press-text-generation", model=hf, tokenizer=tokenizer)
    press = kvpress.SnapKVPress(compression_ratio=1 - KEPT / CONTEXT, window_size=16)

    def generate(cache: Callable[[], Any]) -> Callable[[], Any]:
        settings: dict[str, Any] = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False}
        return lambda: hf.generate(ids, past_key_values=cache(), **settings)

    count = CONTEXT + ANSWER
    cut = {"window": 16, "variant": "kvpress", "evict": "prompt", "positions": "stream", "fast": True}
    return {
        "`generate`, `DynamicCache`": (count, generate(lambda: DynamicCache(config=hf.config))),
        "`generate`, ours, dense": (count, generate(lambda: kvbench.Cache(hf, "dense", fast=True))),
        "kvpress' pipeline, SnapKV": (count, lambda: theirs(context, question="", press=press, max_new_tokens=ANSWER)),
        "`generate`, ours, SnapKV": (count, generate(lambda: kvbench.Cache(hf, "snapkv", KEPT, **cut))),
        "`generate`, ours, H2O": (count, generate(lambda: kvbench.Cache(hf, "h2o", KEPT, fast=True))),
    }


def timed(work: Work, rounds: int) -> list[list[str]]:
    """A row for each: tokens per second, and the ratio to what stands first, over the rounds."""
    speeds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds + 1):  # the first warms up
        for name, (tokens, handle) in work.items():
            started = time.perf_counter()
            handle()
            speeds[name].append(tokens / (time.perf_counter() - started))
    first = next(iter(speeds.values()))[1:]
    rows = []
    for name, values in speeds.items():
        ratios = sorted(a / b for a, b in zip(values[1:], first, strict=True))
        median = f"{statistics.median(ratios):.2g} [{ratios[0]:.2g}, {ratios[-1]:.2g}]"
        rows.append([name, f"{statistics.median(values[1:]):,.0f}", median])
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    tokenizer = load_tokenizer(model_directory("builtin:sink_2", None, allow_pickle=False))
    hf, model = made("5m", torch.float32, "sdpa"), adopt(made("5m", torch.float32, "eager"))
    hf.generation_config.eos_token_id = -1
    texts = [Prose(seed).text(6 * PIECE) for seed in range(PIECES)]
    pieces = [tokenizer.decode(tokenizer(t, add_special_tokens=False)["input_ids"][: PIECE - 1]) for t in texts]
    long = torch.randint(4096, (1, 8192), generator=torch.Generator().manual_seed(0))
    sections = {
        f"Reading {PIECES} texts of {PIECE} tokens": reading(model, hf, tokenizer, pieces),
        f"Reading an endless text, {KEPT} tokens kept": streaming(model, hf, long),
        f"A prompt of {CONTEXT} tokens and an answer of {ANSWER}, {KEPT} tokens kept": answering(hf, tokenizer, "".join(texts)),
    }
    lines = [
        _HEAD.format(
            rounds=asked.rounds,
            torch=torch.__version__,
            transformers=transformers.__version__,
            lm_eval=version("lm_eval"),
            kvpress=version("kvpress"),
            machine=platform.machine(),
        )
    ]
    for title, work in sections.items():
        lines += [f"## {title}\n", *table(["", "tokens/s", "of the first"], timed(work, asked.rounds), "lrr"), ""]
    print("\n".join(lines))


_HEAD = """\
Medians of {rounds} rounds, interleaved, one thread; in brackets the smallest and the largest ratio. Llama of 5.9 million random
weights in float32 on a CPU ({machine}); PyTorch {torch}, transformers {transformers}, lm-eval {lm_eval}, kvpress {kvpress}.
"""

if __name__ == "__main__":
    main()
