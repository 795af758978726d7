"""The end of a run on the terminal: tables, sentences and paths, none wider than the terminal."""

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

_GAP = 2  # blanks between columns
_WIDEST = 120  # columns: longer lines are hard to read
_NARROWEST = 40


def show_closing(records: Sequence[Record], results: str, to_stdout: bool) -> None:
    """Show what a run came to: on stdout, or on stderr where stdout is for a program.

    Args:
        records: of the run.
        results: the folder of the records.
        to_stdout: whether a person reads stdout.
    """
    from kvbench.harness.report.closing import closing

    stream = sys.stdout if to_stdout else sys.stderr
    width = line_width() if stream.isatty() else 100
    said = closing(records)
    lines = [line for table in said.tables for line in _table(table, width)]
    if said.troubles:
        lines += ["", *(line for trouble in said.troubles for line in textwrap.wrap(trouble, width, subsequent_indent="  "))]
    option = "" if results == default_results() else f" --results {shlex.quote(results)}"
    folder, *pages = (link(Path(results) / name, stream.isatty()) for name in ("", "index.html", "README.md"))
    lines += ["", f"Records: {folder}", f"Pages: {' and '.join(pages)}; to make them: bench leaderboard{option}"]
    click.echo("\n".join(lines), err=not to_stdout)


def default_results() -> str:
    """The folder of records where no option names another."""
    from kvbench.harness.cli.output import RESULTS, RESULTS_VARIABLE

    return os.environ.get(RESULTS_VARIABLE) or RESULTS


def line_width() -> int:
    """Columns of the terminal that are used."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))


def link(path: Path, clickable: bool) -> str:
    """A path that a terminal opens when it is clicked on (OSC 8); elsewhere the plain path."""
    return f"\x1b]8;;{path.resolve().as_uri()}\x1b\\{path}\x1b]8;;\x1b\\" if clickable else str(path)


def _table(table: Table, width: int) -> Iterator[str]:
    """A table, its heading before it and its notes after it."""
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
    """A row: the policy and the status stand left, figures right."""
    first, *figures, last = (
        cell.rjust(size) if 0 < place < len(cells) - 1 else cell.ljust(size)
        for place, (cell, size) in enumerate(zip(cells, widths, strict=True))
    )
    return (" " * _GAP).join([first, *figures, last]).rstrip()


def _stacked(table: Table, width: int) -> Iterator[str]:
    """A table that is too wide: each policy on a line of its own, its figures below it."""
    for cells in table.lines:
        yield _cut(cells[0], width)
        figures = ", ".join(f"{head} {cell}" for head, cell in zip(table.head[1:], cells[1:], strict=True) if cell)
        yield from textwrap.wrap(figures, width, initial_indent="  ", subsequent_indent="  ")


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
