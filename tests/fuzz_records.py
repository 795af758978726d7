"""Hostile records: every command that reads records reports them and goes on.

Records of all tasks are mutated, a few at a time among valid ones: fields of another type, NaN, missing,
nested, huge, with markup; hashes recomputed, so that they don't reveal the mutation; files truncated, not UTF-8, not JSON,
folders, pipes, circular links. A failure is a crash (exit code 70).
"""

import contextlib
import copy
import glob
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from factories import RECORDS, working_copy
from helpers import bench_in

from kvbench.harness.core.errors import Exit
from kvbench.harness.records import RecordStore, digest

ROOT = Path(__file__).parents[1]
BASELINE = ROOT / "leaderboard/baselines/quickstart"
SOUND = {  # valid records of each task
    BASELINE: {"perplexity": 3, "streameval": 2, "latency": 2, "memory": 1},
    RECORDS: {"lm_eval": 2},
}
NESTED: Any = [[]]
for _ in range(120):
    NESTED = [NESTED]


NUMBERS: list[Any] = [True, 0, -1, 2**53 + 1, -(2**63), 10**400, 0.5, 1e300, float("nan"), float("-inf")]
TEXTS = ["", "NaN", "\x00", "\x1b[2J", "\u202egnp.exe", "\ud800", "=1+1", "</script><script>1</script>", "| a |\n# b", "{model}"]
PATHS = ["../../../etc/passwd", "~nobody/x", "%s%n", "a" * 2000, "ok", "failed"]
VALUES = [None, *NUMBERS, *TEXTS, *PATHS, [], [None], [[]], [float("nan")], ["x"], {}, {"": {}}, {"x": [1, {"y": None}]}, NESTED]


def sound(scratch: Path) -> list[tuple[Path, str]]:
    """Files of valid records in a working folder, and the task of each."""
    found = []
    for number, (source, wanted) in enumerate(SOUND.items()):
        folder = working_copy(source, scratch / f"{number}")
        left = Counter(wanted)
        for path, record in sorted(RecordStore(folder).files(), key=lambda x: hashlib.sha256(x[0].name.encode()).digest()):
            task = record.cell.task.name
            if left[task]:
                left[task] -= 1
                found.append((path, task))
    return found


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all parts of a JSON value; in long lists, only to the ends."""
    if at:
        yield at
    keys = list(value) if isinstance(value, dict) else [*{0, len(value) - 1}] if isinstance(value, list) and value else []
    for key in keys:
        yield from places(value[key], (*at, key))


def mutated(record: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A record with one or several parts changed."""
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        group = draw.choice(["cell", "metrics", "metrics", "data", "facts", ""])
        ways = [way for way in places(record) if not group or way[0] == group]
        if not ways:
            continue
        *way, last = draw.choice(ways)
        holder = record
        for key in way:
            holder = holder[key]
        _spoil(holder, last, draw)
    if isinstance(record.get("cell"), dict) and draw.random() < 0.9:
        with contextlib.suppress(ValueError, RecursionError):
            record["cell_id"] = digest(record["cell"])
    return record


def _value(draw: random.Random) -> Any:
    """A new hostile value, which shares nothing with earlier ones."""
    return copy.deepcopy(draw.choice(VALUES))


def _spoil(holder: Any, key: Any, draw: random.Random) -> None:
    """Replace, drop, lengthen, scale or add a part."""
    old, how = holder[key], draw.random()
    if how < 0.55:
        holder[key] = _value(draw)
    elif how < 0.7:
        del holder[key]
    elif how < 0.85 and isinstance(old, (int, float)) and not isinstance(old, bool):
        holder[key] = old * draw.choice([-1, 0, 1e6, 1e-9, 10**18])
    elif isinstance(old, list):
        holder[key] = copy.deepcopy(draw.choice([old[:-1], old * 2, old[::-1], [*old, _value(draw)]]))
    elif isinstance(old, dict):
        old[draw.choice(["x", "", "=1", "\u202e", "name", "flags", "questions", "nll", "rounds_ms"])] = _value(draw)
    else:
        holder[key] = _value(draw)


def spoil_file(path: Path, draw: random.Random) -> None:
    """Replace a file by something that is not, or hardly, a record."""
    text = path.read_bytes()
    path.unlink()
    ways: list[Callable[[], object]] = [
        lambda: path.write_bytes(text[: draw.randrange(len(text))]),
        lambda: path.write_bytes(text.replace(b"a", b"\xff", 3)),
        lambda: path.write_bytes(b"[" * 100_000),
        lambda: path.write_bytes(b'{"version": ' + b"9" * 5000 + b"}"),
        lambda: path.write_bytes(draw.randbytes(1000)),
        lambda: path.mkdir(),
        lambda: os.mkfifo(path),
        lambda: path.symlink_to(path.name),
        lambda: path.symlink_to("/dev/zero"),
        lambda: (path.touch(), os.truncate(path, 2**33)),
    ]
    draw.choice(ways)()


def spoil_trace(path: Path, draw: random.Random) -> None:
    """Replace a record's trace; half the time, with a matching hash in the record."""
    record = json.loads(path.read_text())
    if not record["trace"]:
        return
    trace = path.parent / record["trace"]["file"]
    trace.unlink(missing_ok=True)
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999,), }"
    spoilt = draw.choice([b"", b"\x93NUMPY", header.ljust(127) + b"\n", b"{}\n", b"[[[\n", b"null\n" * 9, draw.randbytes(99)])
    how = draw.random()
    if how < 0.1:
        os.mkfifo(trace)
    elif how < 0.2:
        trace.mkdir()
    else:
        trace.write_bytes(spoilt)
        if how < 0.6:
            record["trace"]["sha256"] = hashlib.sha256(spoilt).hexdigest()
            path.write_text(json.dumps(record))


def outcome(*args: object) -> tuple[str, str]:
    """Run a command in this process. -> "exit N" or "crashed"; and its stderr."""
    done = bench_in(*args, cwd=Path.cwd())
    crashed = done.returncode == Exit.CRASH or "Traceback" in done.stderr
    return "crashed" if crashed else f"exit {done.returncode}", done.stderr


def verbs(folder: Path, scratch: Path, cell: str) -> Iterator[tuple[object, ...]]:
    """Every command that reads records."""
    page = scratch / "page" / "README.md"
    yield "leaderboard", "--results", folder, "--out", page
    yield "compare", BASELINE, folder
    yield "compare", folder, BASELINE, "--markdown"
    yield "check", "--baseline", BASELINE, "--results", folder
    yield "records", "verify", folder
    yield "records", "export", scratch / "all.csv", "--results", folder, "--all"
    yield "records", "export", scratch / "all.parquet", "--results", folder
    yield "run", cell, "--dry-run", "--results", folder


def fuzz(mutations: int, seed: int = 0, at_once: int = 5, told: Callable[[str], None] = lambda _: None) -> Counter[str]:
    """Mutate records, and run every command over them and the valid ones.

    Args:
        mutations: number of mutations.
        seed: seed of the mutations.
        at_once: number of mutated records in a folder.
        told: called with each failure.

    Returns:
        Number of times that each command ended in each way, e.g. "leaderboard: exit 0".
    """
    draw, seen = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as sources:
        files = sound(Path(sources))
        for number in range(0, mutations, at_once):
            with tempfile.TemporaryDirectory() as name:
                scratch = Path(name)
                cell = _folder(scratch / "results", files, draw, min(at_once, mutations - number))
                for verb in verbs(scratch / "results", scratch, cell):
                    end, err = outcome(*verb)
                    seen[f"{' '.join(map(str, verb[: 2 if verb[0] == 'records' else 1]))}: {end}"] += 1
                    if end == "crashed":
                        told(f"mutations {number} to {number + at_once - 1}, {verb}: {end}\n{err}")
            seen["mutations"] += min(at_once, mutations - number)
    return seen


def _folder(folder: Path, files: list[tuple[Path, str]], draw: random.Random, count: int) -> str:
    """Copy valid records and their traces, and mutate some. -> the beginning of a mutated record's cell id."""
    folder.mkdir()
    chosen, cell = draw.sample(range(len(files)), count), "0" * 8
    for number, (source, task) in enumerate(files):
        path = folder / task / source.name
        path.parent.mkdir(exist_ok=True)
        for file in source.parent.glob(f"{glob.escape(source.stem)}.*"):
            shutil.copy(file, path.parent)
        if number not in chosen:
            continue
        how = draw.random()
        if how < 0.15:
            spoil_file(path, draw)
        elif how < 0.25:
            spoil_trace(path, draw)
        else:
            record = mutated(json.loads(path.read_text()), draw)
            path.write_text(json.dumps(record))
            cell = str(record.get("cell_id"))[:8]
    return cell
