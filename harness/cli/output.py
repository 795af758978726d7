"""Functions shared by the commands of `bench`: the option --results, and tables for terminals and pipes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvbench.harness.core.visible import visible

if TYPE_CHECKING:
    from kvbench.harness.records import Problem

RESULTS = "results"
RESULTS_VARIABLE = "BENCH_RESULTS"


def text(value: str) -> str:
    """Return a text that is not empty, so that an empty shell variable doesn't silently mean the current folder or the default.

    Raises:
        click.BadParameter: the text is empty.
    """
    if not value.strip():
        raise click.BadParameter("it is empty")
    return value


FILLED = text  # type of arguments and options; click shows the function's name in its help


def results_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option `--results`."""
    option = click.option(
        "--results",
        default=RESULTS,
        show_default=True,
        envvar=RESULTS_VARIABLE,
        type=FILLED,
        metavar="DIR",
        help=f"Folder of the records (or {RESULTS_VARIABLE}).",
    )
    return option(command)


def debugging() -> bool:
    """Whether --debug is given, before or after the command's name."""
    return "--debug" in sys.argv


def accept_debug(command: click.Command) -> None:
    """Accept `--debug` after a command, too."""
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            accept_debug(subcommand)
    elif not any("--debug" in parameter.opts for parameter in command.params):
        command.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, hidden=True))


def stdout_is_stderr() -> bool:
    """Whether stdout and stderr go to one file or pipe, as with 2>&1. Such a log is read by a person, not by a program."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):  # a stream that is no file
        return False


def report_skipped(problem: Problem) -> None:
    """Report on stderr that a file is skipped because it is not a record."""
    click.echo(f"bench: {visible(problem.path)}: skipped, {problem.reason}", err=True)


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows as a table on a terminal, as tab-separated lines to a pipe, or as JSON."""
    if as_json:
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    if not sys.stdout.isatty():
        for line in ([list(rows[0])] if rows else []) + [list(r.values()) for r in rows]:
            click.echo("\t".join("" if v is None else visible(v) for v in line))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*(rows[0] if rows else ()), box=None, header_style="bold")
    for row in rows:
        table.add_row(*("" if v is None else escape(visible(v)) for v in row.values()))
    Console().print(table)
