"""Names of models, texts, tasks and questions, for people; whose code a policy is."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvbench.harness.core.visible import visible
from kvbench.harness.records import Record
from kvbench.harness.report.chart import file_name
from kvbench.harness.report.feed.question import Question

_POLICIES = Path(__file__).parents[3] / "policies"
_CITATION = re.compile(r"^Source:\s*(.*?)(?:\n\s*\n|\nDiffers:|\Z)", re.S | re.M)


@dataclass(frozen=True)
class Origin:
    """Where a policy comes from.

    Attributes:
        code: whose code ran: "KV Bench", or the file or module that was named.
        paper: the source that its docstring names; empty if it names none.
        arxiv: number of the paper; empty if it names none.
    """

    code: str
    paper: str
    arxiv: str


@lru_cache
def origin(policy: str) -> Origin:
    """Where the policy of this name comes from."""
    module, colon, _ = policy.partition(":")
    if colon:
        return Origin("transformers" if module == "hf" else Path(module).name, "", "")
    path = _POLICIES / f"{policy}.py"
    if not re.fullmatch(r"[a-z0-9_]+", policy) or not path.is_file():
        return Origin("a plug-in", "", "")
    found = _CITATION.search(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    paper = " ".join(found[1].split()) if found else ""
    number = re.search(r"arXiv:(\d{4}\.\d{4,5})", paper)
    return Origin("KV Bench", paper, number[1] if number else "")


_BUILTIN = Path(__file__).parents[2] / "models" / "builtin"
_TEXTS = {"pg19": "books (PG-19)", "prose": "generated prose", "backcopy": "Bigram-Backcopy"}
_TASKS = {"streameval": "StreamEval", "arc_stream": "ARC as a stream", "turns": "conversations"}


def about(question: Question) -> str:
    """Which model answers: how large it is, where it was trained, and where kept tokens stand."""
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
    return visible(f"{cell.model.id}: {', '.join(part for part in parts if part)}.")


def subject(question: Question) -> str:
    """The text or task, in a few words."""
    said = text(question.first) if question.measure == "perplexity" else task(question.first)
    said = f"{said}, {question.positions} positions" if question.positions else said
    return f"{said}, K and V as {question.stored}" if question.stored else said


def text(record: Record) -> str:
    """The text, and how much of it."""
    options = record.cell.options
    name = _TEXTS.get(str(options.get("data")), str(options.get("data", record.cell.task.name)))
    parts = [name, f"{record.data.tokens:,} tokens" if record.data.tokens else ""]
    parts += [f"book {options['book']}"] if options.get("book") is not None else []
    parts += [f"{options['newlines']} newlines first"] if options.get("newlines") is not None else []
    parts += [f"{options['streams']} streams"] if options.get("streams") not in (None, 1) else []
    return visible(", ".join(part for part in parts if part))


def task(record: Record) -> str:
    """The task, and how it is asked."""
    options = record.cell.options
    name = str(options.get("tasks") or _TASKS.get(record.cell.task.name, record.cell.task.name))
    extra = [f"{options['lines']} lines"] if "lines" in options else []
    extra += [f"asked in {options['mode']}"] if "mode" in options else []
    extra += [f"{options['samples']} answers each"] if options.get("samples", 1) > 1 else []
    extra += ["right traces read"] if options.get("teacher") else []
    extra += [f"question {options['question']}"] if options.get("question") else []
    extra += [f"prompt {options['prompt']}"] if options.get("prompt") not in (None, "stream") else []
    return visible(", ".join([name.removeprefix("kvbench_"), *extra]))


def evicting(evicts: str) -> str:
    """When tokens are evicted, in words."""
    return {"step": "at every step", "prompt": "once, after the prompt"}.get(evicts, evicts)


def identifier(question: Question) -> str:
    """A readable, unique name for links. It stays the same when a cell is measured again."""
    cell = question.first.cell
    text = question.first.data.ids_sha256 if question.measure == "perplexity" else ""
    unique = [cell.suite, cell.suite_version, cell.as_json()["model"], cell.options, text, question.evicts, question.machine]
    unique += [x for x in (question.positions, question.stored) if x]
    return file_name(f"{cell.suite} {cell.model.id} {subject(question)} {question.evicts}", repr(unique))
