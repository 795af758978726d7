"""Text of the feed: names of models, texts, tasks and questions, the origin of policies, and the answer at a budget.

Every figure in an answer comes from the rows of the feed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvbench.harness.core.shown import visible
from kvbench.harness.records import Record
from kvbench.harness.report.chart import file_name
from kvbench.harness.report.feed.question import Question
from kvbench.harness.report.markdown import digits, model_name
from kvbench.harness.report.shares import too_few

_POLICIES = Path(__file__).parents[3] / "policies"
_MAX_NAMES = 3  # names in a sentence
_CITATION = re.compile(r"^Source:\s*(.*?)(?:\n\s*\n|\nDiffers:|\Z)", re.S | re.M)


@dataclass(frozen=True)
class Origin:
    """Origin of a policy: its paper and its code.

    Attributes:
        code: owner of the code: "KV Bench", or the file or module that was named.
        paper: source in the policy's docstring; empty without one.
        arxiv: arXiv number of the paper; empty without one.
    """

    code: str
    paper: str
    arxiv: str


@lru_cache
def origin(policy: str) -> Origin:
    """Return the origin of the policy of this name."""
    module, colon, _ = policy.partition(":")
    if colon:
        return Origin("transformers" if module == "hf" else Path(module).name, "", "")
    path = _POLICIES / f"{policy}.py"
    if not re.fullmatch(r"[a-z0-9_]+", policy) or not path.is_file():
        return Origin("a plug-in", "", "")
    citation = _CITATION.search(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    paper = " ".join(citation[1].split()) if citation else ""
    number = re.search(r"arXiv:(\d{4}\.\d{4,5})", paper)
    return Origin("KV Bench", paper, number[1] if number else "")


_BUILTIN = Path(__file__).parents[2] / "models" / "builtin"
_TEXTS = {"pg19": "books (PG-19)", "wikitext": "WikiText-2", "prose": "generated prose", "backcopy": "Bigram-Backcopy"}
_TASKS = {"streameval": "StreamEval", "arc_stream": "ARC as a stream", "turns": "conversations"}


def about(question: Question) -> str:
    """Describe the model: its size, its training length, and the positions of kept tokens."""
    cell, facts = question.first.cell, question.first.facts
    readme = _BUILTIN / cell.model.id.removeprefix("builtin:") / "README.md"
    ours = cell.model.id.startswith("builtin:") and readme.is_file()
    counted = re.search(r"[\d,]+ parameters", readme.read_text(encoding="utf-8")) if ours else None
    layers = sum(shape.layers for shape in facts.kv_shapes or ())
    parts = [facts.model_type or "", f"{layers} layers" if layers else "", counted[0] if counted else ""]
    long = f" on texts of up to {facts.training_length:,} tokens" if facts.training_length else ""
    never = cell.model.id.startswith("random:")
    parts += ["random weights" if never else f"trained in this project{long}" if ours else long and f"trained{long}"]
    modes = dict.fromkeys(row.cell.positions for row in question.caches)
    parts += [f"kept tokens at {' or '.join(modes)} positions"] if modes else []
    return visible(f"{model_name(question.first)}: {', '.join(part for part in parts if part)}.")


def subject(question: Question) -> str:
    """Return a short description of the text or task."""
    description = text(question.first) if question.measure == "perplexity" else task_and_question(question.first, question.evicts)
    description = f"{description}, {question.positions} positions" if question.positions else description
    return f"{description}, K and V as {question.stored}" if question.stored else description


def scope(question: Question) -> str:
    """Describe what an answer holds for: model, text or task, and time of eviction."""
    return f"{model_name(question.first)}, {subject(question)}, evicting {evicting(question.evicts)}"


def text(record: Record) -> str:
    """Return the name and length of a record's text."""
    options = record.cell.options
    name = _TEXTS.get(str(options.get("data")), str(options.get("data", record.cell.task.name)))
    name = record.data.source if re.fullmatch(r"local .*\.txt", record.data.source) else name
    parts = [name, f"{record.data.tokens:,} tokens" if record.data.tokens else ""]
    parts += [f"book {options['book']}"] if options.get("book") is not None else []
    parts += [f"{options['newlines']} newlines first"] if options.get("newlines") is not None else []
    parts += [f"{options['streams']} streams"] if options.get("streams") not in (None, 1) else []
    parts += [f"prompts of {options['prompt']:,} tokens"] if options.get("prompt") else []
    return visible(", ".join(part for part in parts if part))


def task(record: Record) -> str:
    """Return the name of a record's task, and its manner of asking."""
    options = record.cell.options
    name = str(options.get("tasks") or _TASKS.get(record.cell.task.name, record.cell.task.name))
    extra = [f"{options['lines']} lines"] if "lines" in options else []
    extra += [f"{options['registers']} registers"] if "registers" in options else []
    extra += [f"{options['steps']} to {2 * options['steps']} steps"] if "steps" in options else []
    extra += [f"asked in {options['mode']}"] if "mode" in options else []
    extra += [f"{options['samples']} answers each"] if options.get("samples", 1) > 1 else []
    extra += ["right traces read"] if options.get("teacher") else []
    extra += [f"question {options['question']}"] if options.get("question") else []
    extra += [f"prompt {options['prompt']}"] if options.get("prompt") not in (None, "stream") else []
    return visible(", ".join([name.removeprefix("kvbench_"), *extra]))


def task_and_question(record: Record, evicts: str) -> str:
    """Return the name of a record's task, and whether the policy saw the question, as it does by default if a prompt is cut."""
    seen = "question" in record.cell.task.never_pooled_over and evicts == "prompt" and not record.cell.options.get("question")
    return task(record) + (", question seen" if seen else "")


def evicting(evicts: str) -> str:
    """Return a phrase for the time of eviction."""
    return {"step": "at every step", "prompt": "once after the prompt"}.get(evicts, evicts)


def identity(question: Question) -> dict[str, Any]:
    """Return the fields of the feed that identify a question."""
    cell = question.first.cell
    return {
        "id": identifier(question),
        "suite": visible(cell.suite),
        "suite_version": cell.suite_version,
        "model": visible(cell.model.id),
        "dtype": visible(cell.model.dtype),
        "subject": subject(question),
        "evict": evicting(question.evicts),
        "measure": question.measure,
    }


def identifier(question: Question) -> str:
    """Return a readable, unique name for links, which does not change when a cell is measured again."""
    cell = question.first.cell
    text = question.first.data.ids_sha256 if question.measure == "perplexity" else ""
    unique = [cell.suite, cell.suite_version, cell.as_json()["model"], cell.options, text, question.evicts, question.machine]
    unique += [x for x in (question.positions, question.stored) if x]
    return file_name(f"{cell.suite} {cell.model.id} {subject(question)} {question.evicts}", repr(unique))


def enumerated(parts: Sequence[str], conjunction: str = "and") -> str:
    """Join at least one part: "a", "a and b", "a, b and c"."""
    return f" {conjunction} ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def size(capacity: int | None) -> str:
    """Return a phrase for a budget."""
    return f"{capacity:,} tokens" if capacity is not None else "no fixed capacity"


def finding(question: Question, rows: Sequence[dict[str, Any]], beaten: Collection[str]) -> str:
    """Describe the best policy at a budget, its loss and its savings.

    rows: rows of the feed, in their order. beaten: ids of the rows that the first row is shown to beat.
    """
    measure = question.measure
    judged = [row for row in rows if (row["answers"] if measure == "answers" else row["perplexity"] is not None)]
    if not judged:
        return "Nothing was measured."
    lead, price = _leaders(question, judged, beaten), _price(judged[0], measure)
    return f"{lead} {judged[0]['name']} {price}." if price else lead


def _leaders(question: Question, rows: Sequence[dict[str, Any]], beaten: Collection[str]) -> str:
    """Name the first policy, and the policies over which its lead is within the noise. Draws of one policy count once."""
    best, first = rows[0], "the lowest perplexity" if question.measure == "perplexity" else "the most right answers"
    draws = {row.id: row.settings_key for row in question.rows}
    policies = len({draws[row["id"]] for row in rows})
    others = [row for row in rows[1:] if draws[row["id"]] != draws[best["id"]]]
    if not others:
        return f"{best['name']} is the only policy measured."
    if best["rank"] is None:
        return f"{best['name']} has {first}, but {question.unranked} to rank policies."
    rivals, equal = dict[str, str](), dict[str, str]()  # names of the best draws
    for row in others:
        if row["id"] not in beaten:
            rivals.setdefault(draws[row["id"]], row["name"])
        if _figure(row, question) == _figure(best, question):
            equal.setdefault(draws[row["id"]], row["name"])
    as_good, behind = list(equal.values()), [name for policy, name in rivals.items() if policy not in equal]
    if not behind and as_good:
        return f"{best['name']} and {_some(as_good, policies)} have {first} of {policies} policies: they are equal."
    if not behind:
        return f"{best['name']} is the best of {policies} policies (95 % confidence)."
    as_many = f", as {'have' if len(as_good) > 1 else 'has'} {_some(as_good, policies)}" if as_good else ""
    lead = f"its lead over {_some(behind, policies)} is within the noise"
    return f"{best['name']} has {first} of {policies} policies{as_many}; {lead}."


def _some(names: Sequence[str], policies: int) -> str:
    """Name a few policies, or give their number. policies: number of all policies."""
    if 1 < len(names) == policies - 1:
        return "all others"
    return enumerated(names) if len(names) <= _MAX_NAMES else f"{len(names)} others"


def _figure(row: dict[str, Any], question: Question) -> Any:
    """Return the figure that ranks a row."""
    return row["answers"][0]["share"] if question.measure == "answers" else row["perplexity"]


def _price(row: dict[str, Any], measure: str) -> str:
    """Describe the row's loss, bytes and time. The loss is relative to dense, if dense was measured."""
    lost = _lost(row["loss_to_dense"] or row["loss"], measure)
    parts = [*_answered(row, measure), *lost]
    if (share := row["kv_share"]) is not None:
        parts.append(f"holds {digits(100 * share, 2)} % of dense's bytes")
        if (read := row["kv_read_bytes"]) is not None:
            parts.append(f"reads {digits(100 * read / row['kv_bytes'], 2)} % of them in a step")
    if row["times_dense"] is not None:
        median, low, high = row["times_dense"]
        interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
        parts.append(f"takes {median:.2f}{interval} of dense's time per token")
    return enumerated(parts) if parts else ""


def _answered(row: dict[str, Any], measure: str) -> list[str]:
    """State the figure itself for answers, or for a row without a reference."""
    if measure == "answers":
        task = row["answers"][0]
        share = f"answers {100 * task['share']:.0f} %"
        if task["low"] is None:
            return [f"{share} right ({too_few(task['streams'])})"]
        return [f"{share} [{100 * task['low']:.0f}, {100 * task['high']:.0f}] right"]
    return [f"has perplexity {digits(row['perplexity'])}"] if row["loss"] is None else []


def _lost(loss: dict[str, Any] | None, measure: str) -> list[str]:
    """Compare the row with a reference. A loss increases perplexity and decreases right answers."""
    if loss is None:
        return []
    is_text = measure == "perplexity"
    lost, low, high = (loss[end] for end in (("value", "low", "high") if is_text else ("value", "high", "low")))
    change, *ends = ("" if x is None else signed(x if is_text else -x) for x in (lost, low, high))
    unit = " % of perplexity" if is_text else " points"
    to = loss["to_name"] + (f" (on one token in {loss['stride']})" if loss["stride"] > 1 else "")
    if low is None or high is None:
        return [f"differs from {to} by {change}{unit} (no interval)"]
    if low * high <= 0:
        return [f"is within the noise of {to} ({change}{unit} [{', '.join(ends)}])"]
    near, far = sorted((abs(low), abs(high)))
    amount = f"{_short(abs(lost))}{' %' if is_text else ' points'} [{_short(near)}, {_short(far)}]"
    if is_text:
        return [f"has a perplexity {amount} {'above' if lost > 0 else 'below'} that of {to}"]
    return [f"is {amount} {'behind' if lost > 0 else 'ahead of'} {to}"]


def loss_text(loss: dict[str, Any]) -> str:
    """Return a loss with its interval, for tables."""
    short = "too short" if loss["nats"] else "too few streams"
    interval = short if loss["low"] is None else f"{signed(loss['low'])}, {signed(loss['high'])}"
    return f"{signed(loss['value'])}{' %' if loss['nats'] else ''} [{interval}]"


def _short(value: float) -> str:
    """Format a number with two digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def signed(value: float) -> str:
    """Return the number with its sign."""
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{_short(abs(value))}"
