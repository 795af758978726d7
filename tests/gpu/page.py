"""One page about a run, computed from its records and logs: figures beside their bounds, what was compared, what failed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stages import NOT_BEGUN, Outcome, Stage, State

LOGS, SPEED, PROOF = "gpu-logs", "speed.jsonl", "proof.jsonl"
TAIL_LINES = 20
_COUNT = re.compile(r"\b(\d+) (passed|failed|skipped|errors?|xfailed)\b")


def text(stages: Sequence[Stage], state: State, key: dict[str, str], results: Path, left_out: Sequence[Path] = ()) -> str:
    """The page, in Markdown.

    Args:
        stages: all of them.
        state: what they came to.
        key: of the state; device, torch and digest of the sources.
        results: folder of the records, with logs and files of lines in JSON.
        left_out: files for which the archive has no room.
    """
    outcomes = {x.name: state.outcome(x) or Outcome(x.name, NOT_BEGUN, 0.0, x.cap) for x in stages}
    failed = [x for x in stages if not outcomes[x.name].good and outcomes[x.name].state != NOT_BEGUN]
    records = sorted(_records(results), key=lambda x: (x["cell"]["task"]["name"], x["cell"]["model"]["id"], x["cell"]["policy"]))
    unfinished = [x for x in records if x["status"] != "ok"]
    ok, missing = (sum(x.state == y for x in outcomes.values()) for y in ("ok", NOT_BEGUN))
    parts = [
        f"# {key['device']}, torch {key['torch']}",
        f"{ok} of {len(stages)} stages ok, {len(failed)} failed or cut off, {missing} not begun. Sources: {key['sources'][:12]}.",
        "## Figures beside their bounds",
        _table(["figure", "measured", "bound", "times its bound", "read by", "device"], _figures(records, results)),
        "## What was compared with what",
        _table(["check", "dtype", "largest error", "allowed", "outcome"], map(_proven, _lines(results / PROOF))),
        _table(["read by", "against the plain walk, in units of rounding"], _differences(records, results)),
        _table(["tests", "outcome"], _tested(stages, results)),
        "## What failed" if failed or unfinished else "",
        *(_failure(outcomes[x.name], results / LOGS / x.log) for x in failed),
        *(f"{_cell(x)}: {x['status']}: {(x.get('error') or {}).get('message', '')}" for x in unfinished),
        "## All stages",
        "```\n" + "\n".join(x.line() for x in outcomes.values()) + "\n```",
        *([f"No room in the archive: {', '.join(str(x.relative_to(results)) for x in left_out)}"] if left_out else []),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        return "\n".join(log.read_text(errors="replace").rstrip().splitlines()[-lines:])
    except OSError:
        return ""


def _records(results: Path) -> Iterable[dict[str, Any]]:
    for path in results.rglob("*.json"):
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):  # cut off while it was written
            continue
        if isinstance(record, dict) and "cell" in record:
            yield record


def _lines(path: Path) -> list[dict[str, Any]]:
    """A file with a line of JSON for each result; only the last line if a name comes again."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return list({(x.get("row"), x.get("check"), x.get("dtype")): x for x in lines}.values())


def _figures(records: Iterable[dict[str, Any]], results: Path) -> Iterable[list[str]]:
    for row in _lines(results / SPEED):
        rate, times = row["tokens_per_second"], row["times_bound"]
        share = f"{row['share_of_multiply_rate']:.0%} of the rate of matrix products ({row['multiply_rate'] / 1e12:.3g} TFLOP/s)"
        figures = [f"{rate:,.0f} tokens/s", f"{rate * times:,.0f} tokens/s; {share}", f"{times:.3g}"]
        yield [f"{row['row']}, {row['shape']}, {row['streams']} streams", *figures, row["method"], row["device"]]
    for record in records:
        metrics, facts = record.get("metrics") or {}, record.get("facts") or {}
        way = "; steps ".join(filter(None, [facts.get("method"), facts.get("step")]))
        for figures in _measured(metrics):
            yield [_cell(record), *figures, way, facts.get("device", "")]


def _measured(metrics: dict[str, Any]) -> Iterable[list[str]]:
    """Figures of a record: measured, bound, and their quotient."""
    if "step_ms" in metrics:
        measured = f"{metrics['step_ms']:.3g} ms a step ± {metrics['error']:.1%}{' (unsettled)' if metrics.get('flags') else ''}"
        roof = metrics.get("roofline")
        yield [measured, *([f"{roof['ms']:.3g} ms (roofline)", f"{metrics['over_roofline']:.3g}"] if roof else ["–", "–"])]
    if "peak_bytes" in metrics:
        found, told = metrics["allocated_bytes"], metrics["kv_bytes"] + metrics["state_bytes"]
        quotient = f"{found / told:.3g}" if told else "–"
        yield [f"{found / 2**20:,.1f} MiB held", f"{told / 2**20:,.1f} MiB of K, V and statistics reported", quotient]
        yield [f"{metrics['growth_bytes'] / 2**20:,.1f} MiB of growth once full", "0", "–"]
    if "perplexity" in metrics:
        yield [f"perplexity {metrics['perplexity']:.5g}", "–", "–"]


def _differences(records: Iterable[dict[str, Any]], results: Path) -> Iterable[list[str]]:
    for row in _lines(results / SPEED):
        yield [f"{row['row']}: {row['method']}", f"{row['differs_from_walk']} {row['refused']}"]
    for record in records:
        facts = record.get("facts") or {}
        if facts.get("differs_from_walk") is not None:
            yield [f"{_cell(record)}: {facts.get('method')}; steps {facts.get('step')}", f"{facts['differs_from_walk']}"]


def _proven(row: dict[str, Any]) -> list[str]:
    return [row["check"], row["dtype"], str(row["error"]), str(row["allowed"]), "ok" if row["good"] else f"WRONG {row['why']}"]


def _tested(stages: Sequence[Stage], results: Path) -> Iterable[list[str]]:
    """Stages that are tests: their files, how many passed, and the names of those that did not."""
    for stage in stages:
        log = tail(results / LOGS / stage.log, 400)
        if "pytest" not in stage.command or not log:
            continue
        files = " ".join(x for x in stage.command if x.startswith("tests/"))
        counts = ", ".join(" ".join(x) for x in _COUNT.findall(log.splitlines()[-1])) or "no summary: it did not end"
        yield [files, "; ".join([counts, *(x for x in log.splitlines() if x.startswith(("FAILED ", "ERROR ")))])]


def _failure(outcome: Outcome, log: Path) -> str:
    told = f"### {outcome.stage}: {outcome.state} after {outcome.seconds:.0f} s of {outcome.cap:.0f} s"
    return f"{told}\n\n```\n{tail(log)}\n```"


def _cell(record: dict[str, Any]) -> str:
    cell = record["cell"]
    kept = "all" if cell["capacity"] is None else f"{cell['capacity']:,}"
    return f"{cell['task']['name']}, {cell['model']['id']}, {cell['policy']}, {kept} tokens kept"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; empty without rows."""
    rows = [[x.replace("|", "/").replace("\n", " ") for x in row] for row in rows]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""
