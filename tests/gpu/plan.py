"""The stages of `make gpu`: what would be missed most comes first."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from stages import Stage

KERNEL_CHECKS = [
    "tests/test_kernels_for_cuda.py",
    "tests/test_fast_paths.py",
    "tests/test_captured.py",
    "tests/test_fastcheck.py",
    "tests/test_guarded_shortcuts.py",
    "tests/test_walk_graphs.py",
    "tests/test_coded_triton.py",
]
CHECKS = [
    "tests/test_exactness.py",
    "tests/test_models.py",
    "tests/test_answering.py",
    "tests/test_once.py",
    "tests/test_reading.py",
    "tests/test_sabotage.py",
]
SHAPES = ["tests/test_triton_shapes.py"]
SINK_WINDOW, H2O, RECOMPUTE = ["--policy", "{name: sink_window, sinks: 4}"], ["--policy", "h2o"], ["--policy", "recompute_window"]
FIGURE_10 = "[256, 512, 1024, 2048, 4096]"  # capacities
SHORT = ["tokens=4352", "rounds=6", "sittings=2", "most_sittings=3"]
SMALL = ["id=random:stories-260k", "tokens=300", "capacity=[64]"]  # for a rehearsal
SMALL_LATENCY = [*SMALL, "most_sittings=2", "steps=2"]
LEAST_SHARE = 0.5  # of its cap: with less a stage is left to the next call
REHEARSED_CAP, REHEARSED_LEAST = 120.0, 5.0  # seconds


class Commands:
    """The commands of the stages, or of their rehearsal."""

    def __init__(self, small: bool) -> None:
        self._small = small

    def bench(self, suite: str, settings: list[str], *rest: str) -> list[str]:
        """A suite, with settings that make it short."""
        asked = [x for setting in settings for x in ("--set", setting)]
        device = ["--device", "cpu", "--threads", "1"] if self._small else ["--device", "cuda"]
        return ["-m", "kvbench", "run", suite, *device, *asked, *rest]

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
        return ["-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", *files, *workers, *chosen]

    def own(self, program: str, *rest: str) -> list[str]:
        """A program of this folder."""
        return [f"tests/gpu/{program}", *rest, *(["--rehearse"] if self._small else [])]


def all_stages(small: bool, model: str | None = None, data: str | None = None) -> list[Stage]:
    """Every stage with its cap in seconds and its command.

    Caps have room for compiling, on one thread and with nothing cached: some 120 seconds for the step of a model of 32 layers.

    Args:
        small: for a rehearsal on the CPU.
        model: of the perplexity.
        data: of the perplexity; there is none without both.
    """
    run = Commands(small)
    result = [
        Stage("proof of the kernels", 100, run.own("proof.py")),
        Stage("scoring, 7B, sink+window", 120, run.own("speed.py", "--row", "sink_window")),
        Stage("decode step, 7B, sink+window", 220, run.latency("llama-2-7b", "[4096]", *SINK_WINDOW)),
        Stage("latency, Figure 10, 7B", 220, run.latency("llama-2-7b", FIGURE_10, *RECOMPUTE, *SINK_WINDOW)),
        Stage("latency, Figure 10, 13B", 260, run.latency("llama-2-13b", FIGURE_10, *RECOMPUTE, *SINK_WINDOW)),
        Stage("scoring, 8B, H2O", 120, run.own("speed.py", "--row", "h2o")),
        Stage("decode step, 7B, H2O", 220, run.latency("llama-2-7b", "[4096]", *H2O)),
        Stage("latency, GQA, all policies", 240, run.latency("llama-3-8b", "[1024]")),
        Stage("memory", 120, run.memory()),
        Stage("equalities, kernels", 150, run.checks(KERNEL_CHECKS, "exact_in_float64")),
        Stage("equalities, the rest", 120, run.checks(CHECKS, "fork")),
        Stage("equalities, shapes of the kernels", 180, run.checks(SHAPES, "cover")),
    ]
    if model and data:
        text = ["--model", model, "--data", data]
        result.insert(-3, Stage("perplexity", 70, run.bench("pg19", ["tokens=4096", "capacity=[256]"], *text)))
    if small:
        return [replace(x, cap=REHEARSED_CAP, least=REHEARSED_LEAST) for x in result]
    return [replace(x, least=LEAST_SHARE * x.cap) for x in result]
