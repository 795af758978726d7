"""Verbs that make pages of records."""

from __future__ import annotations

import datetime
from pathlib import Path

import click

from harness.cli.output import RESULTS, writable
from harness.files import atomic_write


@click.command()
@click.option("--results", default=RESULTS, show_default=True, help="Folder of the records.")
@click.option("--out", default="leaderboard/README.md", show_default=True, help="The page; - for stdout.")
@click.option("--paper", default=None, help="The page of published figures beside ours; paper.md beside --out if not given.")
def leaderboard(results: str, out: str, paper: str | None) -> None:
    """Render the leaderboard, and published figures beside ours, from the records.

    Beside the page: `index.html`, the same to sort and filter, and `charts/`, its pictures.

    \b
    bench leaderboard
    bench leaderboard --results my/results --out -
    bench leaderboard --results my/results --out - --paper -
    """
    from harness.records import RecordStore, from_the_future
    from harness.report import chart, site
    from harness.report import leaderboard as board
    from harness.report import paper as published

    records, problems = RecordStore(Path(results)).read_all()
    for problem in problems:
        click.echo(f"bench: {problem.path}: skipped, {problem.reason}", err=True)
    ahead = from_the_future(records, datetime.datetime.now(datetime.UTC))
    if ahead:
        click.echo(f"bench: {len(ahead)} records come from the future, {ahead[0].stem} from {ahead[0].finished}", err=True)
    pages = {}
    if paper != "-":
        pages[out] = board.render(records)
    if paper is not None or out != "-":
        pages[paper or str(Path(out).with_name("paper.md"))] = published.render(records)
    for path, page in pages.items():
        _page(page.text, path, len(records))
    if out != "-" and out in pages:
        _page(site.render(records, pages[out].charts), str(Path(out).with_name("index.html")), len(records))
    for folder in {Path(path).parent for path in pages if path != "-"}:
        shown = [c for path, page in pages.items() if path != "-" and Path(path).parent == folder for c in page.charts]
        chart.write(shown, folder / chart.FOLDER)
        click.echo(f"{len(shown)} pictures -> {folder / chart.FOLDER}")


def _page(text: str, out: str, records: int) -> None:
    """Write a page, whole or not at all."""
    if out == "-":
        click.echo(text, nl=False)
        return
    path = Path(out)
    writable(path.parent)
    with atomic_write(path) as file:
        file.write(text)
    click.echo(f"{records} records -> {out}")
