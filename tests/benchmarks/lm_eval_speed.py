"""Requests per second of `kvbench` and of lm-eval's own `hf`: the same tasks, weights and batch, alternating in one process.

python tests/benchmarks/lm_eval_speed.py --model builtin:sink_2 --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kvbench.harness.data.stream import newline
from kvbench.harness.lm_eval import catalogue
from kvbench.harness.lm_eval.arguments import Arguments
from kvbench.harness.lm_eval.kvbench import KVBench
from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import device_of, load_tokenizer

TASKS = ["kvbench_registers", "kvbench_cloze", "kvbench_cloze_said", "kvbench_prose"]


def requests(name: str, limit: int) -> list[Instance]:
    """All requests of a task."""
    (task,) = catalogue.task(name, None, 0, [], {})["tasks"].values()
    with catalogue.quiet():
        task.build_all_requests(limit=limit, rank=0, world_size=1)
    return list(task.instances)


def seconds(model: HFLM, asked: list[Instance]) -> float:
    """Seconds until all requests are answered."""
    kind = {"multiple_choice": "loglikelihood"}.get(asked[0].request_type, asked[0].request_type)
    with catalogue.quiet():
        started = time.perf_counter()
        getattr(model, kind)(asked)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


def main() -> None:
    """Print a line per task: requests per second of each, and the median ratio over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin:sink_2")
    parser.add_argument("--policy", default="policy=dense", help="as in --model_args")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(asked.threads)
    directory, device = model_directory(asked.model, None, False), device_of(asked.device)
    tokenizer = load_tokenizer(directory)
    if tokenizer.eos_token_id is None:  # `hf` can't generate without an end-of-text token
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
    prefix = newline(tokenizer) if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    hf = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=asked.dtype).eval().to(device)
    with catalogue.quiet():
        theirs = HFLM(pretrained=hf, tokenizer=tokenizer, batch_size=asked.batch, prefix_token_id=prefix)
    given = {"pretrained": asked.model, "dtype": asked.dtype, "device": str(device), "batch_size": asked.batch}
    given |= dict(pair.split("=", 1) for pair in asked.policy.split(","))
    ours = KVBench(Arguments.from_model_args(given).loaded()[0], tokenizer, prefix_token_id=prefix)
    print(f"{asked.model}, {asked.policy}, {asked.dtype}, {device}, {asked.threads} threads, batch {asked.batch}")
    for name in TASKS:
        instances = requests(name, asked.limit)
        times: list[tuple[float, float]] = []
        for number in range(asked.rounds + 1):  # the first is a warm-up
            pair = [(theirs, 0), (ours, 1)]
            found = {which: seconds(model, instances) for model, which in (pair if number % 2 else pair[::-1])}
            times.append((found[0], found[1]))
        a, b = (statistics.median(t[i] for t in times[1:]) for i in (0, 1))
        ratios = sorted(x / y for x, y in times[1:])
        print(
            f"{name}: hf {len(instances) / a:.1f}, kvbench {len(instances) / b:.1f} requests/s, "
            f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
