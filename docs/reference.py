"""Reference pages from the code: commands, options and policies. cog puts them into the pages: `make picture`."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from kvbench.harness.cli import cli
from kvbench.harness.cli.loaded import LoadedCommand
from kvbench.harness.core import plugins
from kvbench.harness.core.grouped import grouped
from kvbench.harness.suite.file import ModelSpec, SuiteFile
from kvbench.policies import Policy

_ALIKE = ("--data", "--device", "--dry-run", "--dtype", "--fresh", "--json", "--model", "--threads")  # described once
_IN_GUIDES = {  # commands whose options a guide shows in use; they are only named
    ("audit",): "audit.md",
    ("baseline", "update"): "gate.md",
    ("check",): "gate.md",
    ("records", "export"): "records.md",
    ("records", "publish"): "records.md",
    ("which",): "which.md",
}
_ALIKE_FIELDS = ("context", "data_seed", "sample_seed", "side_by_side", "split")  # of tasks, described once
_DESCRIBED = ("perplexity",)  # tasks whose options are described; those of the others are named


def commands() -> str:
    """Return a section for each command, `bench run` first: its help, and the options that no section above describes."""
    known: set[tuple[str, str]] = set()
    found = sorted(_commands(cli, ()), key=lambda item: (item[0] != ("run",), item[0]))
    return "\n".join(line for path, command in found for line in _command(path, command, known))


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name, inner in command.commands.items():
        if not inner.hidden:
            yield from _commands(inner.load() if isinstance(inner, LoadedCommand) else inner, (*path, name))


def _command(path: tuple[str, ...], command: click.Command, known: set[tuple[str, str]]) -> list[str]:
    context = click.Context(command, info_name=" ".join(("bench", *path)))
    text, _, examples = (command.help or "").partition("\b\n")
    usage = " ".join(["bench", *path, *command.collect_usage_pieces(context)]).replace(" [OPTIONS]", "")
    lines = [f"### {usage}", "", " ".join(text.split("\n\n")[0].split()), ""]
    of_lab = command.callback is None or command.callback.__module__.startswith("kvbench.lab")
    example = examples.strip().split("\n")[0]
    if not of_lab and path not in _IN_GUIDES and example.startswith(f"bench {' '.join(path)} ") and " --" in example:
        lines += ["```", example, "```", ""]
    if of_lab:
        return lines
    records = [option.get_help_record(context) for option in command.params if isinstance(option, click.Option)]
    keys = {
        (record[0].split()[0].split(",")[0], "") if record[0].startswith(_ALIKE) else record: record
        for record in records
        if record
    }
    new = [record for key, record in keys.items() if key not in known]
    known.update(keys)
    if path in _IN_GUIDES:
        return [*lines, f"[Guide]({_IN_GUIDES[path]}): {', '.join(f'`{_option(names)}`' for names, _ in new)}", ""]
    options = [f"- `{_option(names)}`: {_without_range(' '.join(about.split()))}" for names, about in new]
    return [*lines, *options, ""] if options else lines


def _option(names: str) -> str:
    """Shorten the type of an option."""
    return names.replace("INTEGER RANGE", "N").replace("FLOAT RANGE", "X").replace("INTEGER", "N")


def _without_range(about: str) -> str:
    """Leave out the range of a number: `[default: 8; x>=1]` becomes `[default: 8]`."""
    return re.sub(r" \[[^]:]*x[<>][^]]*\]|; [^][;]*x[<>][^][;]*(?=\])", "", about)


def suite() -> str:
    """Return the keys of a suite file and of its model."""
    parts: dict[str, type[BaseModel]] = {"Keys of a suite": SuiteFile, "`model`": ModelSpec}
    return "\n".join(f"### {title}\n\n{_fields(model)}\n" for title, model in parts.items())


def tasks() -> str:
    """Return the options of each task; one that an earlier task describes in the same words is only named."""
    known: set[str] = set()
    sections = {
        name: _fields(task.options, known) if name in _DESCRIBED else _named(task.options)
        for name, task in sorted(plugins.working_tasks().items())
    }
    return "\n".join(f"### `{name}`\n\n{fields}\n" for name, fields in sections.items())


def _named(model: type[BaseModel]) -> str:
    """Return one line that names the fields with their defaults."""
    fields = [_field(name, field) for name, field in model.model_fields.items() if name != "name"]
    return ", ".join(field.split(":")[0].removeprefix("- ") for field in fields)


def _fields(model: type[BaseModel], known: set[str] | None = None) -> str:
    """Return a line for each field, and one that names the fields whose line is known."""
    lines = [_field(name, field) for name, field in model.model_fields.items() if name != "name"]
    keys = {name if (name := _name(line)) in _ALIKE_FIELDS else line: line for line in lines}
    seen = [line for key, line in keys.items() if known and key in known]
    if known is not None:
        known.update(keys)
    names = ", ".join(line.split(":")[0].removeprefix("- ") for line in seen)
    return "\n".join([*(line for line in lines if line not in seen), *([f"- as above: {names}"] if seen else [])])


def _name(line: str) -> str:
    return line.split("`")[1]


def _field(name: str, field: Any) -> str:
    default = "" if field.is_required() or field.default in (None, "") else f" ({_default(field.default)})"
    about = re.sub(r"; (?:none|all|0) if not given$", "", field.description or "")
    return f"- `{name}`{default}" + (f": {about}" if about else "")


def checks() -> str:
    """Return a table of the checks of `bench audit`."""
    from kvbench.harness.audit.audit import CHECKS

    return "\n".join(["| check | passes if |", "|---|---|", *(f"| `{check.name}` | {check.question} |" for check in CHECKS)])


def audits() -> str:
    """Return a table of the published audits, a row for the caches that fail the same checks."""
    rows = [json.loads(line) for line in (Path(__file__).parent / "data/audits.jsonl").read_text().splitlines()]
    versions = ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())
    lines = [f"{versions}:", "", "| fails | caches |", "|---|---|"]
    lines += [f"| {checks} | {', '.join(map(_audited, alike))} |" for checks, alike in grouped(rows, _failures).items()]
    return "\n".join(lines)


def _failures(row: dict[str, Any]) -> str:
    """Return the checks that fail, each with its models if it passes on others."""
    texts = []
    for name in dict.fromkeys(entry["check"] for entry in row["failed"]):
        models = [entry["model"] for entry in row["failed"] if entry["check"] == name]
        on = "" if models == row["models"] else f" on {', '.join(f'`{model}`' for model in models)}"
        texts.append(f"`{name}`{on}")
    return "; ".join(texts) or "none"


def _audited(row: dict[str, Any]) -> str:
    """Return the name of an audited cache, and of the press inside it."""
    inner = [part.removeprefix("base_press=kvpress:") for part in row["settings"] if part.startswith("base_press=")]
    return f"`{row['target'].removeprefix('kvpress:')}`" + (f" of `{inner[0]}`" if inner else "")


def policies() -> str:
    """Return a section for each policy: what it keeps, its parameters, and its source, which links to the code."""
    return "\n".join(_policy(name, kind) for name, kind in plugins.working_policies().items())


def _policy(name: str, kind: type[Policy]) -> str:
    """Return the section of a policy. Its module's docstring names the source, its class what is kept."""
    text = " ".join((sys.modules[kind.__module__].__doc__ or "").split("\n\nWords:")[0].split())
    source = text.partition(" Differs: ")[0].partition(" Source: ")[2]
    keeps = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
    lines = [keeps]
    types = typing.get_type_hints(kind)
    fields = ", ".join(_parameter(field, types[field.name]) for field in dataclasses.fields(kind) if field.name != "sha256")
    lines += [fields] if fields else []
    code = f"../policies/{kind.__module__.rsplit('.', 1)[-1]}.py"
    lines += [f"[{_without_place(_first_clause(source))}]({code})." if source else f"[Code]({code})."]
    return f"### `{name}`\n\n" + "  \n".join(lines) + "\n"


def _parameter(field: dataclasses.Field[Any], annotated: Any) -> str:
    """Write a parameter with its default, and the words that it may have instead."""
    if field.default is dataclasses.MISSING or field.default is None:
        return f"`{field.name}`"
    words = [word for part in (annotated, *typing.get_args(annotated)) for word in typing.get_args(part) if isinstance(word, str)]
    return f"`{field.name}={'|'.join(dict.fromkeys([_default(field.default), *words]))}`"


def _default(value: Any) -> str:
    """Write a default as a suite has it; a policy is its name."""
    if isinstance(value, Policy):
        return type(value).__module__.rsplit(".", 1)[-1]
    return str(list(value)) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else f"{value}"


def _first_clause(text: str) -> str:
    """Return the first sentence up to a semicolon; dots of abbreviations and numbers do not end a sentence."""
    return re.split(r"(?<=[a-z0-9)`'\"]\.) (?=[A-Z`])|; ", text)[0].rstrip(".")


def _without_place(source: str) -> str:
    """Leave out what follows the paper's number: the code names section, equation or algorithm, and what is left out."""
    return re.split(r"(?<=\d)(?:, (?=Section|Algorithm|Fig|Eq)|: (?=of the ))|(?<=\)): ", source)[0]


if __name__ == "__main__":
    print({name: len(globals()[name]().split()) for name in ("commands", "suite", "tasks", "policies")})
