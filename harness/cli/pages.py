"""Verbs that make pages of records."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvbench.harness.cli.closing import link
from kvbench.harness.cli.output import FILLED, results_option, skipped, writable
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import atomic_write
from kvbench.harness.core.visible import visible

if TYPE_CHECKING:
    from kvbench.harness.records import Record

STDOUT = "-"
_OURS = (  # what begins a page of ours; the title is that of pages written before they named their generator
    "\nWritten by `bench leaderboard` from ",
    '<meta name="generator" content="KV Bench">',
    "<title>KV Bench leaderboard</title>",
)
_BEGINNING = 1000  # characters of a page that are looked at


@dataclass(frozen=True)
class _Made:
    """Pages and drawings, ready to be written.

    Attributes:
        pages: text by file name; `STDOUT` for none.
        drawings: SVG by file name, by the folder of their page.
    """

    pages: dict[str, str]
    drawings: dict[Path, dict[str, str]]


@click.command()
@results_option
@click.option("--out", type=FILLED, help="The page; - for stdout; README.md in the folder of the records if not given.")
@click.option("--paper", type=FILLED, help="The page of published figures beside ours; paper.md beside --out if not given.")
def leaderboard(results: str, out: str | None, paper: str | None) -> None:
    """Render the leaderboard, and published figures beside ours, from the records.

    Beside the page: `index.html`, the same to sort and filter, and `charts/`, its pictures.

    \b
    bench leaderboard
    bench leaderboard --results leaderboard/results --out leaderboard/README.md
    bench leaderboard --out - --paper -
    """
    from kvbench.harness.report import chart
    from kvbench.harness.report.fence import make_without_broken

    targets = _targets(str(Path(results) / "README.md") if out is None else out, paper)
    for option, path in targets.values():
        _replaceable(path, option)
        _room_for_charts(path, option)
    records, paths = _read(results)
    made, broken = make_without_broken(records, lambda part: _rendered(part, targets))
    for record, error in broken:
        click.echo(
            f"bench: {visible(paths[id(record)])}: left out, no page can be made with it ({visible(repr(error))})", err=True
        )
    if len(broken) == len(records):
        raise UserError(f"{results}: no record there that a page can be made of")
    shown = {folder: _named(made.pages, folder) for folder in made.drawings}  # by the pages that stand there until now
    for folder, drawings in made.drawings.items():
        writable(folder)
        chart.write(drawings, folder / chart.FOLDER)
    for page, text in made.pages.items():
        _write(text, page, len(records) - len(broken))
    for folder, drawings in made.drawings.items():
        for file in shown[folder] - _named(made.pages, folder):
            (folder / chart.FOLDER / file).unlink(missing_ok=True)
        pictures = len(drawings) // 2
        click.echo(f"{pictures} picture{'' if pictures == 1 else 's'} -> {folder / chart.FOLDER}")


def _targets(out: str, paper: str | None) -> dict[str, tuple[str, str]]:
    """Where each page goes, after the option that says so: leaderboard, paper and site, as far as they are asked for.

    Raises:
        UserError: two of them go to one file, or --out names none.
    """
    if not Path(out).name:
        raise UserError(f"--out '{out}': names no file")
    beside = {name: str(Path(out).with_name(name)) for name in ("paper.md", "index.html")} if out != STDOUT else {}
    found = {} if paper == STDOUT else {"leaderboard": ("--out", out)}
    if paper is not None or beside:
        found["paper"] = ("--paper", paper or beside["paper.md"])
    if beside and "leaderboard" in found:
        found["site"] = ("--out", beside["index.html"])
    paths = [Path(path).absolute() for _, path in found.values() if path != STDOUT]
    if len(set(paths)) < len(paths):
        raise UserError(f"{out}: two pages would be written to one file: give another --out or --paper")
    return found


def _replaceable(path: str, option: str) -> None:
    """Whether a page may be written there.

    Raises:
        UserError: something else stands there, which we would destroy.
    """
    where = Path(path)
    if path == STDOUT or not (where.exists() or where.is_symlink()):
        return
    if not where.is_file():
        raise UserError(f"{path}: not a file: give another {option}, or {option} - for stdout")
    if where.stat().st_size and not any(mark in _beginning(where) for mark in _OURS):
        raise UserError(f"{path}: not written by bench leaderboard, and not overwritten: give another {option}")


def _room_for_charts(path: str, option: str) -> None:
    """Whether the folder of a page's drawings can stand beside it.

    Raises:
        UserError: something else has its name.
    """
    from kvbench.harness.report import chart

    charts = Path(path).with_name(chart.FOLDER)
    if path != STDOUT and (charts.exists() or charts.is_symlink()) and not charts.is_dir():
        raise UserError(f"{charts}: not a folder, and the page's charts go there: move it, or give another {option}")


def _beginning(path: Path) -> str:
    """The first characters of a file; empty if it is no regular file."""
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_BEGINNING)


def _read(results: str) -> tuple[list[Record], dict[int, Path]]:
    """The records of a folder, and where each lies, by its identity; what is none is named.

    Raises:
        UserError: there are none.
    """
    from kvbench.harness.records import Problem, RecordStore, from_the_future

    records, paths = [], {}
    for path, found in RecordStore(Path(results)).files():
        if isinstance(found, Problem):
            skipped(found)
        else:
            records.append(found)
            paths[id(found)] = path
    if not records:
        raise UserError(f"{results}: no records there")
    ahead = from_the_future(records, datetime.datetime.now(datetime.UTC))
    if ahead:
        click.echo(f"bench: {len(ahead)} records come from the future, {ahead[0].stem} from {ahead[0].finished}", err=True)
    return records, paths


def _rendered(records: Sequence[Record], targets: Mapping[str, tuple[str, str]]) -> _Made:
    """All pages of the records, and their drawings."""
    from kvbench.harness.report import chart, paper, site
    from kvbench.harness.report import leaderboard as board

    render = {"leaderboard": board.render, "paper": paper.render}
    found = {name: render[name](records) for name in render if name in targets}
    pages = {targets[name][1]: page.text for name, page in found.items()}
    if "site" in targets:
        pages[targets["site"][1]] = site.render(records, found["leaderboard"].charts)
    drawings: dict[Path, dict[str, str]] = {}
    for name, page in found.items():
        if targets[name][1] != STDOUT:
            drawings.setdefault(Path(targets[name][1]).parent, {}).update(chart.draw(page.charts))
    return _Made(pages, drawings)


def _named(pages: Mapping[str, str], folder: Path) -> set[str]:
    """The drawings that pages of ours in a folder show, as they stand there now."""
    from kvbench.harness.report import chart

    standing = (Path(page) for page in pages if page != STDOUT and Path(page).parent == folder and Path(page).is_file())
    return {file for path in standing for file in chart.drawing_files(path.read_text(encoding="utf-8", errors="replace"))}


def _write(text: str, page: str, records: int) -> None:
    """Write a page, whole or not at all."""
    if page == STDOUT:
        click.echo(text, nl=False)
        return
    writable(Path(page).parent)
    with atomic_write(Path(page)) as file:
        file.write(text)
    click.echo(f"{records} record{'' if records == 1 else 's'} -> {link(Path(page), sys.stdout.isatty())}")
