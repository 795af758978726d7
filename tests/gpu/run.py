"""Everything that needs a GPU, in calls of under ten minutes: the equalities on CUDA, latency, memory, a short perplexity.

    make gpu                                            (or: python tests/gpu/run.py --results my/results)
    make gpu                                            goes on where the first call stopped
    make gpu ARGS="--model path/to/model --data path/to/books"

A call ends within `--seconds` (570), whatever a stage does: a stage that exceeds its cap, or the time that is left, is ended
with every process it started. What it has recorded until then is kept. The short stages come first.

Each stage's outcome is written at once to `gpu-run.state` in the folder of the results. The next call repeats no stage that
was ok; those that never ended by themselves come first, then those that failed or exceeded their cap. `--again` repeats all.
Other sources, another device or another torch start anew. Three calls give every stage its whole cap.

At the end: a JSON of all outcomes, then a line for each stage with its state, its seconds and its cap. The exit code is 0
if every stage was ok, now or in an earlier call, and 1 if any failed, did not end or was not begun.

Nothing is downloaded. Models have a published shape and random weights, made on the device. A perplexity is measured if
a model and a text are given. Missing packages are taken from `.whl/` if they are there (`make gpu-wheels`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import processes
from stages import Stage, State, run_all

ROOT = Path(__file__).parents[2]
NEEDED = ("pydantic", "click", "rich", "yaml", "pytest")  # a machine with torch and transformers may lack these
SOURCES = ("kvbench", "policies", "harness", "suites", "tests")
SOURCE_SUFFIXES = (".py", ".c", ".cpp", ".h", ".cu", ".yaml", ".json")
KERNEL_CHECKS = [
    "tests/test_kernels_for_cuda.py", "tests/test_fast_paths.py", "tests/test_captured.py", "tests/test_fastcheck.py",
]  # fmt: skip
CHECKS = [
    "tests/test_exactness.py", "tests/test_models.py", "tests/test_answering.py", "tests/test_once.py", "tests/test_reading.py",
    "tests/test_sabotage.py",
]  # fmt: skip
SHAPES = ["tests/test_triton_shapes.py"]
SINK_WINDOW, H2O, RECOMPUTE = ["--policy", "{name: sink_window, sinks: 4}"], ["--policy", "h2o"], ["--policy", "recompute_window"]
FIGURE_10 = "[256, 512, 1024, 2048, 4096]"  # capacities
ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # a worker of pytest would else start sixteen
SHORT = ["tokens=4352", "rounds=6", "sittings=2", "most_sittings=3"]
SMALL = ["id=random:stories-260k", "tokens=300", "capacity=[64]"]  # for a rehearsal
SMALL_LATENCY = [*SMALL, "most_sittings=2", "steps=2"]
STATE = "gpu-run.state"  # in JSON; a folder of records holds no other .json than records


class Commands:
    """The commands of the stages, or of their rehearsal."""

    def __init__(self, results: str, small: bool) -> None:
        self._results, self._small = results, small

    def bench(self, suite: str, settings: list[str], *rest: str) -> list[str]:
        """A suite, with settings that make it short."""
        asked = [x for setting in settings for x in ("--set", setting)]
        device = ["--device", "cpu", "--threads", "1"] if self._small else ["--device", "cuda"]
        return [sys.executable, "-m", "kvbench", "run", suite, *device, "--results", self._results, *asked, *rest]

    def latency(self, model: str, capacity: str, *policies: str) -> list[str]:
        """Decode steps of a published shape."""
        settings = [f"id=random:{model}", *SHORT, f"capacity={capacity}"]
        return self.bench("latency", settings + SMALL_LATENCY if self._small else settings, *policies)

    def memory(self) -> list[str]:
        """The memory suite; every cell of its rehearsal starts a process, so there is one policy."""
        settings = ["tokens=2048", "capacity=[1024]"]
        return self.bench("memory", settings + SMALL, *H2O) if self._small else self.bench("memory", settings)

    def checks(self, files: list[str], rehearsed: str) -> list[str]:
        """Test files; of a rehearsal the tests with a word in their name."""
        workers = ["-n", "8"] if importlib.util.find_spec("xdist") and not self._small else []
        chosen = ["-k", rehearsed] if self._small else []
        return [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", *files, *workers, *chosen]

    def speed(self, row: str) -> list[str]:
        """A row of speed.py."""
        out = str(Path(self._results) / "speed.jsonl")
        return [sys.executable, "tests/gpu/speed.py", "--row", row, "--out", out, *(["--rehearse"] if self._small else [])]


def all_stages(arguments: argparse.Namespace) -> list[Stage]:
    """Every stage with its cap in seconds and its command, the shortest cap first.

    Compiling a model's step takes some 40 seconds of the first latency stage of a shape; later ones find it in a cache.
    """
    run = Commands(arguments.results, arguments.rehearse)
    result = [
        Stage("equalities, kernels", 80, run.checks(KERNEL_CHECKS, "exact_in_float64"), ONE_COMPILER),
        Stage("scoring, 7B, sink+window", 80, run.speed("sink_window")),
        Stage("memory", 100, run.memory()),
        Stage("equalities, the rest", 110, run.checks(CHECKS, "fork"), ONE_COMPILER),
        Stage("decode step, 7B, sink+window", 120, run.latency("llama-2-7b", "[4096]", *SINK_WINDOW)),
        Stage("latency, GQA, all policies", 120, run.latency("llama-3-8b", "[1024]")),
        Stage("scoring, 8B, H2O", 120, run.speed("h2o")),
        Stage("decode step, 7B, H2O", 140, run.latency("llama-2-7b", "[4096]", *H2O)),
        Stage("latency, Figure 10, 7B", 140, run.latency("llama-2-7b", FIGURE_10, *RECOMPUTE, *SINK_WINDOW)),
        Stage("latency, Figure 10, 13B", 180, run.latency("llama-2-13b", FIGURE_10, *RECOMPUTE, *SINK_WINDOW)),
        Stage("equalities, shapes of the kernels", 180, run.checks(SHAPES, "cover"), ONE_COMPILER),
    ]
    if arguments.model and arguments.data:
        text = ["--model", arguments.model, "--data", arguments.data]
        result.insert(0, Stage("perplexity", 70, run.bench("pg19", ["tokens=4096", "capacity=[256]"], *text)))
    return result


def environment(folder: str, seconds: float) -> dict[str, str]:
    """The stages' environment: the checkout, and bundled packages that are missing here, installed into a folder."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    wheels = sorted(str(p) for p in (ROOT / ".whl").glob("*.whl"))
    if missing and wheels:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", folder]
        subprocess.run([*pip, *wheels], check=True, timeout=seconds)
        paths.insert(1, folder)
    elif missing:
        sys.exit(f"missing here: {', '.join(missing)}; `make gpu-wheels` fetches them to .whl/, to be brought along")
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


def device_name(rehearse: bool, seconds: float) -> str:
    """Name of the device. Another process asks for it, so that this one holds no GPU and no driver can stop it."""
    if rehearse:
        return "rehearsal on the CPU"
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    try:
        asked = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        sys.exit(f"torch has not told the name of its CUDA device in {seconds:.0f} s")
    name = asked.stdout.strip()
    return name or sys.exit("make gpu needs a CUDA device, and torch sees none")


def sources_digest() -> str:
    """SHA-256 of all sources that a stage may run."""
    digest = hashlib.sha256()
    paths = {path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in SOURCE_SUFFIXES}
    for path in sorted(paths):
        digest.update(f"{path.relative_to(ROOT)}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def main() -> int:
    """Run the stages. -> 1 if any failed, did not end in time or was not begun."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=os.environ.get("BENCH_RESULTS") or "results", help="folder of the records")
    parser.add_argument("--seconds", type=float, default=570, help="for everything together")
    parser.add_argument("--model", help="of the perplexity: a directory")
    parser.add_argument("--data", help="of the perplexity: a directory of books")
    parser.add_argument("--again", action="store_true", help="repeat stages that were ok in an earlier call")
    parser.add_argument("--state", help="folder of gpu-run.state; that of the records if not given, none for a rehearsal")
    parser.add_argument("--rehearse", action="store_true", help="the same stages on the CPU, small, to see that they run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a stage is ended, too
    end = begun + arguments.seconds
    device = device_name(arguments.rehearse, arguments.seconds / 2)
    torch = importlib.metadata.version("torch")
    folder = arguments.state or (None if arguments.rehearse else arguments.results)
    key = {"device": device, "torch": torch, "sources": sources_digest()}
    state = State(None if folder is None else Path(folder) / STATE, key)
    with tempfile.TemporaryDirectory() as packages:
        variables = environment(packages, end - time.monotonic())
        variables |= {"BENCH_TEST_DEVICE": "cpu" if arguments.rehearse else "cuda"}
        variables |= {"OMP_NUM_THREADS": "1"} if arguments.rehearse else {}  # tiny models; more threads wait for each other

        def execute(stage: Stage, seconds: float) -> int | None:
            return processes.run(stage.command, seconds, variables | stage.variables, ROOT)

        outcomes = run_all(all_stages(arguments), end, processes.ENDING_SECONDS, state, execute, arguments.again)
    told = [{"stage": x.stage, "state": x.state, "seconds": x.seconds, "cap": x.cap} for x in outcomes]
    print(json.dumps({"device": device, "torch": torch, "stages": told}, indent=1))
    print("\n".join(outcome.line() for outcome in outcomes))
    return int(not all(outcome.good for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
