"""Everything that needs a GPU, in calls of under ten minutes: each goes on from what the last one brought home.

    make gpu                                            (or: python tests/gpu/run.py --results my/results)
    make gpu                                            goes on where the first call stopped
    make gpu FROM=gpu.tar.gz                            the same on a machine that has only the archive of the first call
    make gpu ARGS="--model path/to/model --data path/to/books"
    make gpu ARGS=--rehearse                            the same stages on a CPU, small, without packages that a GPU image lacks

A call ends within `--seconds` (570): a stage that exceeds its cap, or the time that is left, is ended with the processes of its
session. A stage is begun if half its cap is left, else it waits for the next call. The next call repeats no stage that was ok and
begins with those that never ran. Other sources, another device or another torch start anew.

The folder of the results holds records, `gpu-run.state`, logs in `gpu-logs`, and `gpu.md`, a page with the outcome of every stage
and what it printed last. After every stage all of it is packed into one archive of under 16 MiB: `gpu.tar.gz` in `$OUT`, or what
`--archive` names. The exit code is 0 if every stage was ok, now or in an earlier call.

Nothing is downloaded. Models have a published shape and random weights, made on the device; a perplexity is measured if a model
and a text are given. Missing packages are taken from `.whl/` if they are there (`make gpu-wheels`). No stage reads
`leaderboard/records`: `make gpu-tree` writes an archive of the checkout without these.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from plan import Stage, all_stages

ROOT = Path(__file__).parents[2]
NEEDED = ("pydantic", "click", "rich", "yaml", "pytest")  # a machine with torch and transformers may lack these
SOURCES = ("kvbench", "policies", "harness", "lab", "suites", "tests")
SOURCE_SUFFIXES = (".py", ".c", ".cpp", ".h", ".cu", ".yaml", ".json")
# Packages that a GPU image lacks beside NEEDED. A rehearsal does without them, too.
ABSENT = ("arch", "axe_playwright_python", "datasets", "gguf", "jsonschema", "lm_eval", "playwright", "ray", "vl_convert")
STATE, REHEARSAL, PAGE, LOGS = "gpu-run.state", "gpu-rehearsal.state", "gpu.md", "gpu-logs"
OK, STOPPED = "ok", "stopped"
ENDING_S, PACKING_S = 7.0, 3.0  # that ending a stage, and writing page and archive, may take
LIMIT_BYTES = 16 * 2**20  # of the archive
TAIL_LINES = 20

# Put on the path as `sitecustomize.py`: hides the installed packages with these names.
HIDE = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if path is None and name in {names!r} else self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = [Without(x) if hasattr(x, "find_spec") else x for x in sys.meta_path]
"""


def environment(folder: str, needed: Sequence[str], rehearse: bool, results: Path) -> dict[str, str]:
    """Return the stages' environment: the checkout, and needed packages that are missing here, installed into a folder."""
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    wheels = sorted(str(p) for p in (ROOT / ".whl").glob("*.whl"))
    if missing and not wheels:
        sys.exit(f"missing here: {', '.join(missing)}; `make gpu-wheels` fetches them to .whl/, to be brought along")
    if missing:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", folder, *wheels], check=True
        )
    if rehearse:
        (Path(folder) / "sitecustomize.py").write_text(HIDE.format(names=ABSENT))
    paths = [str(ROOT), folder, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_OFFLINE": "1",
        "BENCH_RESULTS": str(results.resolve()),
        "BENCH_TEST_DEVICE": "cpu" if rehearse else "cuda",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # every worker of pytest would start sixteen
        **({"OMP_NUM_THREADS": "1"} if rehearse else {}),
    }


def device_name(seconds: float) -> str:
    """Return the name of the device. Another process asks for it, so that this one holds no GPU and no driver can stop it."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    try:
        name = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, timeout=seconds).stdout.strip()
    except subprocess.TimeoutExpired:
        sys.exit(f"torch has not told the name of its CUDA device in {seconds:.0f} s")
    return name or sys.exit("make gpu needs a CUDA device, and torch sees none")


def sources_digest() -> str:
    """Return the SHA-256 of all sources that a stage may run."""
    digest = hashlib.sha256()
    for path in sorted(p for folder in SOURCES for p in (ROOT / folder).rglob("*") if p.suffix in SOURCE_SUFFIXES):
        digest.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def execute(command: Sequence[str], seconds: float, variables: Mapping[str, str], log: Path) -> str:
    """Run a command in a session of its own, and end the processes that are left of it. -> "ok", "exit code N" or "stopped"."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=variables, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        code = process.wait(seconds)
        return OK if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # with PYTHONFAULTHANDLER the log says where it was
        return STOPPED
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S / 3)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)


class Run:
    """The outcomes of all stages, in this call and in earlier ones with the same sources, device and torch."""

    def __init__(self, results: Path, name: str, key: Mapping[str, str], archive: Path | None) -> None:
        self.results, self.path, self.key, self.archive = results, results / name, dict(key), archive
        kept = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.outcomes: dict[str, str] = kept["outcomes"] if kept.get("key") == self.key else {}

    def save(self, stages: Sequence[Stage]) -> None:
        """Write the state, the page, and the archive: the smallest files first, as many as fit."""
        self.path.write_text(json.dumps({"key": self.key, "outcomes": self.outcomes}, indent=1))
        (self.results / PAGE).write_text(self.page(stages))
        if self.archive is None:
            return
        files = sorted((p for p in self.results.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        partial, size = self.archive.with_name(f"{self.archive.name}.partial"), 0
        with tarfile.open(partial, "w:gz") as tar:
            for file in files:
                size += file.stat().st_size
                if size < LIMIT_BYTES:
                    tar.add(file, file.relative_to(self.results).as_posix())
        os.replace(partial, self.archive)

    def page(self, stages: Sequence[Stage]) -> str:
        """Return the outcome and the last lines of every stage, in Markdown."""
        states = [self.outcomes.get(stage.name, "not begun") for stage in stages]
        parts = [f"# {self.key['device']}, torch {self.key['torch']}", f"{states.count(OK)} of {len(stages)} stages ok"]
        parts += [
            f"## {stage.name}: {state}\n\n```\n{self.tail(stage)}\n```" for stage, state in zip(stages, states, strict=True)
        ]
        return "\n\n".join(parts) + "\n"

    def tail(self, stage: Stage) -> str:
        """Return the last lines that a stage printed."""
        log = self.results / LOGS / stage.log
        return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:]) if log.exists() else ""

    def all(self, stages: Sequence[Stage], end: float, variables: Mapping[str, str]) -> None:
        """Run the stages that were not ok, those that never ran first, until the time on the clock is over."""
        for stage in sorted(stages, key=lambda stage: stage.name in self.outcomes):
            left = end - time.monotonic() - ENDING_S - PACKING_S
            if self.outcomes.get(stage.name) == OK or left < stage.cap / 2:
                continue
            print(f"== {stage.name} (at most {min(stage.cap, left):.0f} s; {left:.0f} s left for all)", flush=True)
            self.outcomes[stage.name] = STOPPED  # in case that this call is killed
            self.save(stages)
            began = time.monotonic()
            self.outcomes[stage.name] = execute(stage.command, min(stage.cap, left), variables, self.results / LOGS / stage.log)
            print(f"{self.tail(stage)}\n{self.outcomes[stage.name]} after {time.monotonic() - began:.0f} s", flush=True)
            self.save(stages)


def parsed() -> argparse.Namespace:
    """Return the arguments of this call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = os.environ.get("OUT")
    parser.add_argument(
        "--results", type=Path, default=os.environ.get("BENCH_RESULTS") or "results", help="folder of the records"
    )
    parser.add_argument("--seconds", type=float, default=570, help="for everything together")
    parser.add_argument(
        "--archive", type=Path, default=f"{home}/gpu.tar.gz" if home else None, help="file that all is packed into"
    )
    parser.add_argument("--from", dest="before", type=Path, help="archive of an earlier call, to go on from")
    parser.add_argument("--model", help="of the perplexity: a directory, or a GGUF file")
    parser.add_argument("--data", help="of the perplexity: a directory of books")
    parser.add_argument("--again", action="store_true", help="repeat stages that were ok in an earlier call")
    parser.add_argument("--rehearse", action="store_true", help="the same stages on the CPU, small, to see that they run")
    return parser.parse_args()


def main() -> int:
    """Run the stages. -> 1 if any failed, did not end in time or was not begun."""
    began, arguments = time.monotonic(), parsed()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a stage is ended, too
    arguments.results.mkdir(parents=True, exist_ok=True)
    if arguments.before is not None:
        shutil.unpack_archive(arguments.before, arguments.results, filter="data")
    device = "rehearsal on the CPU" if arguments.rehearse else device_name(arguments.seconds / 2)
    key = {"device": device, "torch": importlib.metadata.version("torch"), "sources": sources_digest()}
    run = Run(arguments.results, REHEARSAL if arguments.rehearse else STATE, key, arguments.archive)
    if arguments.again:
        run.outcomes.clear()
    stages = all_stages(arguments.rehearse, arguments.model, arguments.data)
    needed = (*NEEDED, "gguf") if str(arguments.model).endswith(".gguf") else NEEDED
    with tempfile.TemporaryDirectory() as packages:
        run.all(stages, began + arguments.seconds, environment(packages, needed, arguments.rehearse, arguments.results))
    run.save(stages)
    print(run.page(stages))
    return int(any(run.outcomes.get(stage.name) != OK for stage in stages))


if __name__ == "__main__":
    sys.exit(main())
