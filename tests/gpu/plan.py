"""The stages of `make gpu`: what would be missed most comes first."""

import importlib.util
import re
from typing import NamedTuple

KERNEL_CHECKS = ("traced_policies", "cuda_blocks", "fast_paths", "captured", "fused_step", "fastcheck", "guarded_shortcuts")
KERNEL_CHECKS += ("coded_triton",)
CHECKS = ("exactness", "models", "answering", "once", "reading", "sabotage")
SINK_WINDOW, H2O, RECOMPUTE = ["--policy", "{name: sink_window, sinks: 4}"], ["--policy", "h2o"], ["--policy", "recompute_window"]
FIGURE_10 = "[256, 512, 1024, 2048, 4096]"  # capacities
SHORT = ["tokens=4352", "rounds=6", "sittings=2", "most_sittings=3"]
SMALL = ["id=random:stories-260k", "tokens=300", "capacity=[64]"]  # for a rehearsal
SMALL_LATENCY = [*SMALL, "most_sittings=2", "steps=2"]
REHEARSED_CAP_S = 120.0


class Stage(NamedTuple):
    """A command with a time limit.

    Attributes:
        name: name that is shown, and key of the outcome.
        cap: seconds that the command may take.
        command: arguments of Python. They name no folder, so that another call finds the stage unchanged elsewhere.
    """

    name: str
    cap: float
    command: list[str]

    @property
    def log(self) -> str:
        """Name of the file with the command's output."""
        return re.sub(r"\W+", "-", self.name.lower()) + ".log"


class Commands:
    """The commands of the stages, or of their rehearsal on the CPU."""

    def __init__(self, small: bool) -> None:
        self._small = small

    def bench(self, suite: str, settings: list[str], *rest: str) -> list[str]:
        """A suite, with settings that make it short."""
        device = ["--device", "cpu", "--threads", "1"] if self._small else ["--device", "cuda"]
        return ["-m", "kvbench", "run", suite, *device, *(x for setting in settings for x in ("--set", setting)), *rest]

    def latency(self, model: str, capacity: str, *policies: str) -> list[str]:
        """Decode steps of a published shape."""
        settings = [f"id=random:{model}", *SHORT, f"capacity={capacity}"]
        return self.bench("latency", settings + SMALL_LATENCY if self._small else settings, *policies)

    def memory(self) -> list[str]:
        """The memory suite; every cell starts a process, so a rehearsal has one policy."""
        settings = ["tokens=2048", "capacity=[1024]"]
        return self.bench("memory", settings + SMALL, *H2O) if self._small else self.bench("memory", settings)

    def checks(self, names: tuple[str, ...], rehearsed: str) -> list[str]:
        """Test files; in a rehearsal, only the tests with a word in their name."""
        workers = ["-n", "8"] if importlib.util.find_spec("xdist") and not self._small else []
        files = [f"tests/test_{name}.py" for name in names]
        chosen = ["-k", rehearsed] if self._small else []
        return ["-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", *files, *workers, *chosen]

    def scoring(self, row: str) -> list[str]:
        """The speed of reading text."""
        return ["tests/gpu/speed.py", "--row", row, *(["--rehearse"] if self._small else [])]


def all_stages(small: bool, model: str | None = None, data: str | None = None) -> list[Stage]:
    """Return every stage with its cap in seconds and its command.

    Caps include compilation on one thread without cached kernels: about 120 seconds for the step of a model of 32 layers.

    Args:
        small: whether stages are small, for a rehearsal on the CPU.
        model: model of the perplexity stage.
        data: data of the perplexity stage, which is left out unless model and data are given.
    """
    run = Commands(small)
    stages = [
        Stage("equalities, kernels", 150, run.checks(KERNEL_CHECKS, "exact_in_float64")),
        Stage("scoring, 7B, sink+window", 120, run.scoring("sink_window")),
        Stage("decode step, 7B, sink+window", 220, run.latency("llama-2-7b", "[4096]", *SINK_WINDOW)),
        Stage("latency, Figure 10, 7B", 220, run.latency("llama-2-7b", FIGURE_10, *RECOMPUTE, *SINK_WINDOW)),
        Stage("latency, Figure 10, 13B", 260, run.latency("llama-2-13b", FIGURE_10, *RECOMPUTE, *SINK_WINDOW)),
        Stage("scoring, 8B, H2O", 120, run.scoring("h2o")),
        Stage("decode step, 7B, H2O", 220, run.latency("llama-2-7b", "[4096]", *H2O)),
        Stage("latency, GQA, all policies", 240, run.latency("llama-3-8b", "[1024]")),
        Stage("memory", 120, run.memory()),
        Stage("equalities, the rest", 120, run.checks(CHECKS, "fork")),
        Stage("equalities, shapes of the kernels", 180, run.checks(("triton_shapes",), "cover")),
    ]
    if model and data:
        text = ["--model", model, "--data", data]
        stages.insert(-2, Stage("perplexity", 70, run.bench("pg19", ["tokens=4096", "capacity=[256]"], *text)))
    return [stage._replace(cap=REHEARSED_CAP_S) for stage in stages] if small else stages
