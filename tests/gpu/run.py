"""Everything that needs a GPU, in one run under ten minutes: the equalities on CUDA, latency, memory, a short perplexity.

    make gpu                                            (or: python tests/gpu/run.py --results my/results)
    make gpu ARGS="--model path/to/model --data path/to/books"

Nothing is downloaded. Models have a published shape and random weights, made on the device. A perplexity is measured if
a model and a text are given. Missing packages are taken from `.whl/` if they are there (`make gpu-wheels`).
A stage that exceeds the remaining time is stopped; its results so far are kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDED = ("pydantic", "click", "rich", "yaml", "pytest")  # a machine with torch and transformers may lack these
CHECKS = [
    "tests/test_exactness.py", "tests/test_fast_paths.py", "tests/test_kernels_for_cuda.py", "tests/test_models.py",
    "tests/test_answering.py", "tests/test_once.py", "tests/test_reading.py", "tests/test_sabotage.py",
]  # fmt: skip
FIGURE_10 = 'id=["random:llama-2-7b", "random:llama-2-13b"]'
OURS = ["--policy", "{name: sink_window, sinks: 4}", "--policy", "h2o"]
SHORT = ["tokens=4352", "rounds=6", "sittings=2", "most_sittings=3"]
SMALL = ["id=random:stories-260k", "tokens=300", "capacity=[64, 128]"]  # for a rehearsal


def stages(arguments: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Name and command of every stage, the most important first."""
    small = arguments.rehearse
    device = "cpu" if small else "cuda"

    def bench(suite: str, settings: list[str], *rest: str) -> list[str]:
        asked = [x for setting in (settings + SMALL if small else settings) for x in ("--set", setting)]
        run = [sys.executable, "-m", "kvbench", "run", suite, "--device", device, "--results", arguments.results]
        return [*run, *(["--threads", "1"] if small else []), *asked, *rest]

    checks = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", *CHECKS]
    checks += ["-n", "8"] if importlib.util.find_spec("xdist") else []
    checks += ["-k", "fork"] if small else []
    result = [
        ("equalities on CUDA", checks),
        ("decode step, 7B, roofline", bench("latency", ["id=random:llama-2-7b", *SHORT, "capacity=[4096]"], *OURS)),
        ("scoring beside its bounds", [sys.executable, "tests/gpu/speed.py", *(["--rehearse"] if small else [])]),
        (
            "latency, Figure 10",
            bench("latency", [FIGURE_10, *SHORT], "--policy", "recompute_window", "--policy", "{name: sink_window, sinks: 4}"),
        ),
        ("latency, GQA, dense and H2O", bench("latency", ["id=random:llama-3-8b", *SHORT, "capacity=[1024]"])),
        ("memory", bench("memory", ["tokens=2048", "capacity=[1024]"])),
    ]
    if arguments.model and arguments.data:
        text = ["--model", arguments.model, "--data", arguments.data]
        short = [x for setting in ("tokens=4096", "capacity=[256]") for x in ("--set", setting)]
        run = [sys.executable, "-m", "kvbench", "run", "pg19", "--device", device, "--results", arguments.results]
        result.insert(1, ("perplexity", [*run, *text, *short]))
    return result


def environment(folder: str) -> dict[str, str]:
    """The stages' environment: the checkout, and bundled packages that are missing here."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    wheels = sorted(str(p) for p in (ROOT / ".whl").glob("*.whl"))
    if missing and wheels:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", folder]
        subprocess.run([*pip, *wheels], check=True)
        paths.insert(1, folder)
    elif missing:
        sys.exit(f"missing here: {', '.join(missing)}; `make gpu-wheels` fetches them to .whl/, to be brought along")
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def main() -> int:
    """Run the stages. -> 1 if any failed or did not end in time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=os.environ.get("BENCH_RESULTS") or "results", help="folder of the records")
    parser.add_argument("--seconds", type=float, default=570, help="for everything together")
    parser.add_argument("--model", help="of the perplexity: a directory")
    parser.add_argument("--data", help="of the perplexity: a directory of books")
    parser.add_argument("--rehearse", action="store_true", help="the same stages on the CPU, small, to see that they run")
    arguments = parser.parse_args()
    import torch

    if not arguments.rehearse and not torch.cuda.is_available():
        sys.exit("make gpu needs a CUDA device, and torch sees none")
    end, failed, told = time.monotonic() + arguments.seconds, 0, []
    with tempfile.TemporaryDirectory() as folder:
        env = environment(folder) | {"BENCH_TEST_DEVICE": "cpu" if arguments.rehearse else "cuda"}
        for name, command in stages(arguments):
            started, left = time.monotonic(), end - time.monotonic()
            print(f"== {name} ({left:.0f} s left)", flush=True)
            try:
                code = subprocess.run(command, cwd=ROOT, env=env, timeout=max(left, 1)).returncode
                state = "ok" if code == 0 else f"exit code {code}"
            except subprocess.TimeoutExpired:
                state = "out of time"
            failed += state != "ok"
            told.append({"stage": name, "state": state, "seconds": round(time.monotonic() - started, 1)})
    device = "rehearsal on the CPU" if arguments.rehearse else torch.cuda.get_device_name()
    print(json.dumps({"device": device, "torch": torch.__version__, "stages": told}, indent=1))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
