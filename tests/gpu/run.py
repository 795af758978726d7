"""Everything that needs a GPU, in calls of under ten minutes: each goes on from what the last one brought home.

    make gpu                                            (or: python tests/gpu/run.py --results my/results)
    make gpu                                            goes on where the first call stopped
    make gpu FROM=gpu.tar.gz                            the same on a machine that has only the archive of the first call
    make gpu ARGS="--model path/to/model --data path/to/books"
    make gpu ARGS=--rehearse                            the same stages on a CPU, small, without packages that a GPU image lacks

A call ends within `--seconds` (570), whatever a stage does: a stage that exceeds its cap, or the time that is left, is ended
with every process it started. What would be missed most comes first: a proof that each kernel is right, scoring and decode steps
of 7B, Figure 10, H2O, the rest. A stage is begun if half its cap is left, else it waits for the next call.

The next call repeats no stage that was ok; those that never ended by themselves come first, then those that failed, exceeded
their cap or were running when their call was killed. `--again` repeats all. Other sources, another device or another torch start
anew. Even if every stage takes its whole cap, five calls run them all.

In the folder of the results: records, `gpu-run.state` (a rehearsal has one of its own), logs in `gpu-logs`, and `gpu.md`, the
page: each figure beside its bound, what was compared with what, what failed. All of it is packed into one archive of under
16 MiB, before each stage and at the end: `gpu.tar.gz` in `$OUT`, a folder that is brought home, or what `--archive` names.
The exit code is 0 if every stage was ok, now or in an earlier call, and 1 if any failed, did not end or was not begun.

Nothing is downloaded. Models have a published shape and random weights, made on the device. A perplexity is measured if
a model and a text are given. Missing packages are taken from `.whl/` if they are there (`make gpu-wheels`). No stage reads
`leaderboard/records`: `make gpu-tree` writes an archive of the checkout without these. A tool that
copies the checkout itself leaves them behind after `git sparse-checkout set --no-cone '/*' '!/leaderboard/records/'`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import archive
import page
import processes
from plan import all_stages
from stages import Stage, State, run_all

ROOT = Path(__file__).parents[2]
NEEDED = ("pydantic", "click", "rich", "yaml", "pytest")  # a machine with torch and transformers may lack these
SOURCES = ("kvbench", "policies", "harness", "lab", "suites", "tests")
SOURCE_SUFFIXES = (".py", ".c", ".cpp", ".h", ".cu", ".yaml", ".json")
# What a GPU image lacks beside NEEDED. A rehearsal does without it, too.
ABSENT = ("arch", "axe_playwright_python", "datasets", "gguf", "jsonschema", "lm_eval", "playwright", "ray", "vl_convert")
BUNDLED = ("gguf", "pydantic", "pydantic_core", "annotated_types", "typing_inspection")  # by `make gpu-wheels`
STATE, REHEARSAL, PAGE = "gpu-run.state", "gpu-rehearsal.state", "gpu.md"  # a folder of records holds no other .json than these
PACKING_SECONDS = 3.0  # that the page and the archive may take at the end
SHOWN_LINES = {True: 3, False: page.TAIL_LINES}  # of the log of a stage that was ok, or wasn't

# Put on the path as `sitecustomize.py`: hides the installed packages with these names, but not those in a folder.
HIDE = """
import sys
from importlib.machinery import PathFinder

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        if path is None and name in {names!r}:
            return PathFinder.find_spec(name, [{folder!r}])
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = [Without(x) if hasattr(x, "find_spec") else x for x in sys.meta_path]
"""


def environment(folder: str, seconds: float, needed: Sequence[str], rehearse: bool, results: Path) -> dict[str, str]:
    """Return the stages' environment: the checkout, and needed packages that are missing here, installed into a folder."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    wheels = sorted(str(p) for p in (ROOT / ".whl").glob("*.whl"))
    if wheels and (missing or rehearse):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", folder]
        subprocess.run([*pip, *wheels], check=True, timeout=seconds)
        paths.insert(1, folder)
    elif missing:
        sys.exit(f"missing here: {', '.join(missing)}; `make gpu-wheels` fetches them to .whl/, to be brought along")
    if rehearse:
        names = ABSENT + BUNDLED if wheels else ABSENT
        (Path(folder) / "sitecustomize.py").write_text(HIDE.format(names=names, folder=folder))
        paths.insert(1, folder)
    # Tiny models are faster with one thread; and every worker of pytest would start sixteen to compile.
    threads = {"OMP_NUM_THREADS": "1"} if rehearse else {}
    threads |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "BENCH_TEST_DEVICE": "cpu" if rehearse else "cuda"}
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "BENCH_RESULTS": str(results.resolve()),
    }
    return os.environ | own | threads


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


def parsed() -> argparse.Namespace:
    """The arguments of this call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.environ.get("BENCH_RESULTS") or "results"
    parser.add_argument("--results", type=Path, default=folder, help="folder of the records")
    parser.add_argument("--seconds", type=float, default=570, help="for everything together")
    parser.add_argument("--archive", type=Path, help="file that state, records, logs and page are packed into")
    parser.add_argument("--from", dest="before", type=Path, help="archive of an earlier call, to go on from")
    parser.add_argument("--model", help="of the perplexity: a directory, or a GGUF file")
    parser.add_argument("--data", help="of the perplexity: a directory of books")
    parser.add_argument("--again", action="store_true", help="repeat stages that were ok in an earlier call")
    parser.add_argument("--rehearse", action="store_true", help="the same stages on the CPU, small, to see that they run")
    arguments = parser.parse_args()
    if arguments.archive is None and os.environ.get("OUT"):
        arguments.archive = Path(os.environ["OUT"]) / "gpu.tar.gz"
    return arguments


def main() -> int:
    """Run the stages. -> 1 if any failed, did not end in time or was not begun."""
    end = time.monotonic()
    arguments = parsed()
    end += arguments.seconds
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a stage is ended, too
    results, name = arguments.results, REHEARSAL if arguments.rehearse else STATE
    results.mkdir(parents=True, exist_ok=True)
    if arguments.before is not None:
        archive.unpack(arguments.before, results)
    needed = (*NEEDED, "gguf") if str(arguments.model).endswith(".gguf") else NEEDED
    device = device_name(arguments.rehearse, arguments.seconds / 2)
    key = {"device": device, "torch": importlib.metadata.version("torch"), "sources": sources_digest()}
    state, stages = State(results / name, key), all_stages(arguments.rehearse, arguments.model, arguments.data)

    def save() -> None:
        """Write the page and the archive. Neither a strange record nor a full disk may end the run."""
        try:
            packed, left_out = archive.choose(results, (name, PAGE))
            try:
                told = page.text(stages, state, key, results, left_out)
            except Exception as error:
                told = f"No page: {type(error).__name__}: {error}\n"
            (results / PAGE).write_text(told)
            if arguments.archive is not None:
                archive.pack(results, list(dict.fromkeys([*packed, results / PAGE])), arguments.archive)
        except OSError as error:
            print(f"not packed: {error}", flush=True)

    with tempfile.TemporaryDirectory() as packages:
        variables = environment(packages, end - time.monotonic(), needed, arguments.rehearse, results)

        def execute(stage: Stage, seconds: float) -> int | None:
            log = results / page.LOGS / stage.log
            code = processes.run([sys.executable, *stage.command], seconds, variables, ROOT, log)
            print(page.tail(log, SHOWN_LINES[code == 0]), flush=True)
            return code

        try:
            spare = processes.ENDING_SECONDS + PACKING_SECONDS
            outcomes = run_all(stages, end, spare, state, execute, arguments.again, save=save)
        finally:
            save()
    print((results / PAGE).read_text())
    return int(not all(outcome.good for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
