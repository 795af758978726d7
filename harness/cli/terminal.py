"""Printing of a run's result: tables, sentences and paths, wrapped to the width of the terminal."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvbench.harness.records import Record
    from kvbench.harness.report.closing import Table

_GAP = 2  # spaces between columns
_MAX_LINE_COLUMNS = 120  # longer lines are hard to read
_MIN_LINE_COLUMNS = 40


def show_closing(records: Sequence[Record], results: str, to_stdout: bool) -> None:
    """Print the result of a run: on stdout, or on stderr if a program reads stdout.

    Args:
        to_stdout: whether a person reads stdout.
    """
    from kvbench.harness.cli.output import RESULTS, RESULTS_VARIABLE
    from kvbench.harness.report.closing import closing
    from kvbench.harness.report.troubles import troubles

    stream = sys.stdout if to_stdout else sys.stderr
    width = line_width() if stream.isatty() else 100
    lines = [line for table in closing(records) for line in _table(table, width)]
    if problems := troubles(records):
        lines += ["", *(line for problem in problems for line in textwrap.wrap(problem, width, subsequent_indent="  "))]
    option = "" if results == (os.environ.get(RESULTS_VARIABLE) or RESULTS) else f" --results {shlex.quote(results)}"
    folder, *pages = (link(Path(results) / name, stream.isatty()) for name in ("", "index.html", "README.md"))
    lines += ["", f"Records: {folder}", f"Pages: {' and '.join(pages)}, written by: bench leaderboard{option}"]
    click.echo("\n".join(lines), err=not to_stdout)


def line_width() -> int:
    """Return the number of columns of a line on this terminal."""
    return max(_MIN_LINE_COLUMNS, min(_MAX_LINE_COLUMNS, shutil.get_terminal_size().columns))


def link(path: Path, clickable: bool) -> str:
    """Return the path. With `clickable`, return a link that terminals can open (OSC 8), unless TERM is "dumb"."""
    if not clickable or os.environ.get("TERM") == "dumb":
        return str(path)
    return f"\x1b]8;;{path.resolve().as_uri()}\x1b\\{path}\x1b]8;;\x1b\\"


def _table(table: Table, width: int) -> Iterator[str]:
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
