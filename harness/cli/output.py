"""Output of the commands of `bench`: tables for terminals and pipes, the result of a run, and the option --results."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbench.harness.core.shown import visible

if TYPE_CHECKING:
    from kvbench.harness.core.checks import Report
    from kvbench.harness.records import Problem, Record
    from kvbench.harness.report.closing import Table


RESULTS = "results"
RESULTS_VARIABLE = "BENCH_RESULTS"
_GAP = 2  # spaces between columns
_MAX_LINE_COLUMNS = 120  # longer lines are hard to read
_MIN_LINE_COLUMNS = 40


def text(value: str) -> str:
    """Return a text that is not empty, so that an empty shell variable doesn't silently mean the current folder or the default.

    Raises:
        click.BadParameter: the text is empty.
    """
    if not value.strip():
        raise click.BadParameter("it is empty")
    return value


FILLED = text  # type of arguments and options; click shows the function's name in its help


results_option = click.option(
    "--results",
    default=RESULTS,
    show_default=True,
    envvar=RESULTS_VARIABLE,
    type=FILLED,
    metavar="DIR",
    help=f"Folder of the records (or {RESULTS_VARIABLE}).",
)


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


def show_checks(report: Report) -> None:
    """Print a row per check and, with --debug, the tracebacks of errors that the code under test raised."""
    print_rows(report.rows(), as_json=False)
    for check in report.checks if debugging() else ():
        if check.error is not None:
            traceback.print_exception(check.error)


def show_closing(records: Sequence[Record], results: str, to_stdout: bool) -> None:
    """Print the result of a run: on stdout, or on stderr if a program reads stdout.

    Args:
        to_stdout: whether a person reads stdout.
    """
    from kvbench.harness.report.closing import closing
    from kvbench.harness.report.doubts import troubles

    stream = sys.stdout if to_stdout else sys.stderr
    width = line_width() if stream.isatty() else 100
    lines = [line for table in closing(records) for line in _closing_table(table, width)]
    if problems := troubles(records):
        lines += ["", *(line for problem in problems for line in textwrap.wrap(problem, width, subsequent_indent="  "))]
    option = "" if results == (os.environ.get(RESULTS_VARIABLE) or RESULTS) else f" --results {shlex.quote(results)}"
    folder, *pages = (link(Path(results) / name, stream.isatty()) for name in ("", "index.html", "README.md"))
    lines += ["", f"Records: {folder}", f"For pages ({' and '.join(pages)}), run: bench leaderboard{option}"]
    click.echo("\n".join(lines), err=not to_stdout)


def line_width() -> int:
    """Return the number of columns of a line on this terminal."""
    return max(_MIN_LINE_COLUMNS, min(_MAX_LINE_COLUMNS, shutil.get_terminal_size().columns))


def link(path: Path, clickable: bool) -> str:
    """Return the path. With `clickable`, return a link that terminals can open (OSC 8), unless TERM is "dumb"."""
    if not clickable or os.environ.get("TERM") == "dumb":
        return str(path)
    return f"\x1b]8;;{path.resolve().as_uri()}\x1b\\{path}\x1b]8;;\x1b\\"


def _closing_table(table: Table, width: int) -> Iterator[str]:
    """Yield the lines of a table, with its heading and notes."""
    yield ""
    yield from textwrap.wrap(table.heading, width)
    yield ""
    widths = [max(map(len, column)) for column in zip(table.head, *table.lines, strict=True)]
    if sum(widths) + _GAP * (len(widths) - 1) <= width:
        yield from (_line(cells, widths) for cells in (table.head, *table.lines))
    else:
        yield from _stacked(table, width)
    if table.notes:
        yield ""
    for note in table.notes:
        yield from textwrap.wrap(note, width)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a row. The policy and the status are aligned left, figures right."""
    first, *figures, last = (
        cell.rjust(size) if 0 < place < len(cells) - 1 else cell.ljust(size)
        for place, (cell, size) in enumerate(zip(cells, widths, strict=True))
    )
    return (" " * _GAP).join([first, *figures, last]).rstrip()


def _stacked(table: Table, width: int) -> Iterator[str]:
    """Yield the rows of a table that is too wide: each policy on its own line, its figures below."""
    for cells in table.lines:
        yield from textwrap.wrap(cells[0], width, subsequent_indent="    ")
        figures = ", ".join(f"{head} {cell}" for head, cell in zip(table.head[1:], cells[1:], strict=True) if cell)
        yield from textwrap.wrap(figures, width, initial_indent="  ", subsequent_indent="  ")
