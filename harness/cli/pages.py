"""The command `bench leaderboard`. Records that break a page are left out and reported."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvbench.harness.cli.output import FILLED, report_skipped, results_option
from kvbench.harness.core.errors import Exit, UserError
from kvbench.harness.core.files import atomic_write, writable
from kvbench.harness.core.shown import visible

if TYPE_CHECKING:
    from kvbench.harness.records import Record

Result = TypeVar("Result")
STDOUT = Path("-")
_DATA_MARK = 'kvbench("'
_PAGE_MARKS = (  # a page of ours begins with one of these; older pages have only the title
    "\nWritten by `bench leaderboard` from ",
    '<meta name="generator" content="KV Bench">',
    "<title>KV Bench leaderboard</title>",
    '{"feed": "kv-bench"',
    _DATA_MARK,
)
_BEGINNING_CHARACTERS = 1000  # characters of a page that are searched for a mark


@dataclass(frozen=True)
class _Pages:
    """Pages and the files that they load, ready to be written.

    Attributes:
        pages: text by path, or `STDOUT`.
        loaded: text by path, of scripts with data and of drawings.
        feed: data that all pages show.
    """

    pages: dict[Path, str]
    loaded: dict[Path, str]
    feed: dict[str, Any]


@click.command()
@results_option
@click.option(
    "--out", type=FILLED, help="File of the leaderboard; - for stdout. Default: README.md in the folder of the records."
)
@click.option(
    "--paper", type=FILLED, help="File of the page with published figures; - for stdout. Default: paper.md beside --out."
)
@click.option(
    "--site", metavar="URL", default="index.html", help="URL of the published index.html, for links from the leaderboard."
)
@click.option("--figures", metavar="DIR", type=FILLED, help="Also draw the losses of each question in its own file, for a paper.")
@click.option("--format", "form", type=click.Choice(["pdf", "svg", "png"]), help="Format of --figures. Default: pdf.")
def leaderboard(results: str, out: str | None, paper: str | None, site: str, figures: str | None, form: str | None) -> None:
    """Write the pages of a folder of records.

    These are the leaderboard, a page that compares the records with published figures, `index.html`, which answers questions,
    `page/`, the data of suites that `index.html` has no room for, `feed.json`, all data, and `charts/`, the pictures. Records
    that are not correct (bench records verify) are left out, and the exit code is 1.

    \b
    bench leaderboard
    bench leaderboard --results leaderboard/records --out leaderboard/README.md
    bench leaderboard --out - --paper -
    bench leaderboard --figures figures --format svg
    """
    from kvbench.harness.report import losses

    if form and not figures:
        raise UserError("--format: give --figures, too")
    if out is None and Path(results).is_file() and Path(results).suffix == ".jsonl":
        raise UserError(f"{results}: the records of one suite: say with --out where the pages go")
    targets = _targets(Path(results) / "README.md" if out is None else Path(out), None if paper is None else Path(paper))
    for name, path in targets.items():
        _refuse_foreign_file(path, "--paper" if name == "paper" else "--out")
    records, paths, forged = _read(results)
    output, broken = make_without_broken(records, lambda part: _rendered(part, paths, targets, site))
    for record, error in broken:
        click.echo(
            f"bench: {visible(paths[id(record)])}: left out, because rendering it failed ({visible(repr(error))})", err=True
        )
    if len(broken) == len(records):
        raise UserError(f"{results}: no page written, because rendering failed for every record there")
    _write_all(output, len(records) - len(broken))
    if figures:
        files = losses.draw(output.feed, writable(Path(figures)), form or "pdf")
        _report_pictures(len(files), Path(figures))
    if forged:
        click.echo(f"bench: {forged} of {forged + len(records)} records are not correct: see bench records verify", err=True)
        sys.exit(Exit.NO)


def _targets(out: Path, paper: Path | None) -> dict[str, Path]:
    """Return the file of each page to write: leaderboard, paper, site, feed. Only the first two can go to stdout.

    Raises:
        UserError: two pages have the same file, or `out` names no file.
    """
    if not out.name:
        raise UserError(f"--out '{out}' is not the name of a file")
    if paper == STDOUT:
        return {"paper": STDOUT}
    targets = {"leaderboard": out} | ({} if paper is None else {"paper": paper})
    if out != STDOUT:
        names = {"leaderboard": out.name, "paper": "paper.md", "site": "index.html", "feed": "feed.json"}
        targets = {page: out.with_name(name) for page, name in names.items()} | targets
    files = [path.absolute() for path in targets.values() if path != STDOUT]
    if len(set(files)) < len(files):
        raise UserError(f"{out}: two pages would be written to one file: give another --out or --paper")
    return targets


def _refuse_foreign_file(page: Path, option: str) -> None:
    """Refuse to overwrite a file that is not a page of ours, or that has the name of the charts' folder."""
    from kvbench.harness.report import chart

    charts = page.with_name(chart.FOLDER)
    if page == STDOUT:
        return
    if (charts.exists() or charts.is_symlink()) and not charts.is_dir():
        raise UserError(f"{charts}: not a folder, and the page's charts go there: move it, or give another {option}")
    if not (page.exists() or page.is_symlink()):
        return
    if not page.is_file():
        raise UserError(f"{page}: not a file: give another {option}, or {option} - for stdout")
    if page.stat().st_size and not any(mark in _beginning(page) for mark in _PAGE_MARKS):
        raise UserError(f"{page}: exists and was not written by bench leaderboard: give another {option}")


def _beginning(path: Path) -> str:
    """Return the first characters of a file; empty if it is no regular file."""
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_BEGINNING_CHARACTERS)


def _read(results: str) -> tuple[list[Record], dict[int, Path], int]:
    """Read the records of a folder. Incorrect records and files that are no records are reported and left out.

    Returns:
        Records whose figures follow from their traces, the path of each record by `id`, and the number of incorrect records.

    Raises:
        UserError: the folder has no correct records.
    """
    from kvbench.harness.records import Problem, RecordStore, from_the_future
    from kvbench.harness.report.doubts import with_doubts
    from kvbench.harness.report.verify import problems

    correct: list[Record] = []
    files: list[Path] = []
    forged = 0
    for path, record in RecordStore(Path(results)).files():
        if isinstance(record, Problem):
            report_skipped(record)
        elif wrong := problems(record, path.parent):
            click.echo(f"bench: {visible(path)}: left out, because it is not correct: {visible(wrong[0])}", err=True)
            forged += 1
        else:
            correct.append(record)
            files.append(path)
    if not correct:
        none = "no correct records" if forged else "no records"
        raise UserError(f"{results}: {none} there: run a suite first, or give another --results")
    records = with_doubts(correct)
    paths = {id(record): path for record, path in zip(records, files, strict=True)}
    ahead = from_the_future(records, datetime.datetime.now(datetime.UTC))
    if ahead:
        click.echo(f"bench: {len(ahead)} records have a time in the future, e.g. {ahead[0].stem}: {ahead[0].finished}", err=True)
    return records, paths, forged


def _rendered(records: Sequence[Record], paths: Mapping[int, Path], targets: Mapping[str, Path], address: str) -> _Pages:
    """Render all pages and their drawings.

    Args:
        paths: paths of the records' files, by `id`.
        targets: file of each page to render.
        address: address of the site, for links.
    """
    from kvbench.harness.report import chart, feed, paper, sections, site
    from kvbench.harness.report import leaderboard as board
    from kvbench.harness.report.site.maps import maps

    data = feed.feed(records)
    unasked = sections.unasked(records, {(q["suite"], q["suite_version"]) for q in data["questions"]})
    render = {"leaderboard": lambda: board.render(data, unasked, address), "paper": lambda: paper.render(records)}
    pages, loaded = dict[Path, str](), dict[Path, str]()
    for name, file in ((name, targets[name]) for name in render if name in targets):
        page = render[name]()
        pages[file] = page.text
        drawings = {} if file == STDOUT else chart.draw(page.charts)
        loaded |= {file.with_name(chart.FOLDER) / drawing: svg for drawing, svg in drawings.items()}
    if "site" in targets:
        html, scripts = site.render(data, maps(records, paths))
        pages |= {targets["site"]: html, targets["feed"]: feed.text(data)}
        loaded |= {targets["site"].with_name(site.FOLDER) / name: text for name, text in scripts.items()}
    return _Pages(pages, loaded, data)


def _write_all(output: _Pages, records: int) -> None:
    """Write pages and the files that they load, and delete those that only the replaced pages loaded. records: their number."""
    for path in output.loaded:
        if path.suffix == ".js":
            _refuse_foreign_file(path, "--out")
    files = [page for page in output.pages if page != STDOUT]
    outdated = _loaded_by(files) - output.loaded.keys()
    for path, text in [*output.loaded.items(), *((file, output.pages[file]) for file in files)]:
        with atomic_write(writable(path.parent) / path.name) as written:
            written.write(text)
    for path in outdated:
        path.unlink(missing_ok=True)
    click.echo(output.pages.get(STDOUT, ""), nl=False)
    for file in files:
        click.echo(f"{records} record{'' if records == 1 else 's'} -> {file}")
    drawings = [path.parent for path in output.loaded if path.suffix == ".svg"]
    for folder in dict.fromkeys(drawings):
        _report_pictures(drawings.count(folder) // 2, folder)


def _loaded_by(pages: Iterable[Path]) -> set[Path]:
    """Return the drawings that existing pages show, and the scripts of ours beside them."""
    from kvbench.harness.report import chart, site

    loaded: set[Path] = set()
    for page in (page for page in pages if page.is_file()):
        shown = chart.drawing_files(page.read_text(encoding="utf-8", errors="replace"))
        loaded |= {page.with_name(chart.FOLDER) / file for file in shown}
        scripts = page.with_name(site.FOLDER).glob("*.js")
        loaded |= {script for script in scripts if _beginning(script).startswith(_DATA_MARK)}
    return loaded


def _report_pictures(count: int, folder: Path) -> None:
    click.echo(f"{count} picture{'' if count == 1 else 's'} -> {folder}")


def make_without_broken(
    records: Sequence[Record], make: Callable[[list[Record]], Result]
) -> tuple[Result, list[tuple[Record, Exception]]]:
    """Call `make` with as many records as it accepts.

    Returns:
        The result, and the records left out, each with its exception.

    Raises:
        Exception: `make` fails even without records.
    """

    def error(part: list[Record]) -> Exception | None:
        try:
            make(part)
        except Exception as raised:  # after any error, the remaining records still get their page
            return raised
        return None

    try:
        return make(list(records)), []
    except Exception:
        make([])

    def works(part: list[Record]) -> bool:
        return error(part) is None

    first = _extended([], list(records), works)
    others = _extended([], _without(records, first), works)
    kept = max(first, others, key=len)  # a record that fails with every other record does not exclude good records
    kept = _extended(kept, _without(records, kept), works)  # some records failed only in combination with a record now left out
    broken = _without(records, kept)
    sound = _without(records, broken)
    return make(sound), [(r, reason) for r in broken if (reason := error([*sound, r])) is not None]


def _extended(kept: list[Record], part: list[Record], works: Callable[[list[Record]], bool]) -> list[Record]:
    """Add as many records of a part as can be rendered with the kept records. Halving finds a bad record in few trials."""
    if works([*kept, *part]):
        return [*kept, *part]
    if len(part) < 2:
        return kept
    middle = len(part) // 2
    return _extended(_extended(kept, part[:middle], works), part[middle:], works)


def _without(records: Sequence[Record], others: Sequence[Record]) -> list[Record]:
    """Return the records that are not among `others`."""
    known = {id(r) for r in others}
    return [r for r in records if id(r) not in known]
