"""The commands `bench submit` and `bench review`."""

from __future__ import annotations

import datetime
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvbench.harness.cli.output import FILLED, RESULTS, RESULTS_VARIABLE, writable
from kvbench.harness.core.errors import Exit, UserError
from kvbench.harness.core.visible import visible

if TYPE_CHECKING:
    from kvbench.harness.report.review import Review

PUBLISHED = "leaderboard/results"
_SAMPLE_CELLS = 8


@click.command()
@click.argument("folder", default=RESULTS, envvar=RESULTS_VARIABLE, type=FILLED)
@click.option("--to", default=PUBLISHED, show_default=True, metavar="DIR", type=FILLED, help="Folder of the records that stand.")
@click.option("--replace", is_flag=True, help="Also submit newer records of cells that stand.")
def submit(folder: str, to: str, replace: bool) -> None:
    """Check the records in FOLDER, and lay them down for a pull request.

    Every record must follow from its trace, say where it comes from, and name no path of your machine. With the records that
    stand, the suites must be complete. If anything is wrong, nothing is laid down. Cells that stand are left as they are.

    \b
    bench submit results/zoo
    bench submit results/zoo --replace
    """
    from kvbench.harness.records import RecordStore
    from kvbench.harness.run.submission import check, lay_down, not_standing, read_files

    files, wrong = read_files(Path(folder))
    cells = len({record.cell_id for _, record in files})
    if not files and not wrong:
        raise UserError(f"{folder}: no records there: run a suite first, or name another folder")
    new = not_standing(files, Path(to), replace)
    if not new and not wrong:
        raise UserError(f"{folder}: its {cells} cells all stand in {to}; --replace submits newer records of them")
    wrong += check(new, RecordStore(Path(to)).read_all()[0])
    if wrong:
        for line in wrong:
            click.echo(visible(line))
        click.echo(f"{len(wrong)} problem{'' if len(wrong) == 1 else 's'}, nothing laid down", err=True)
        sys.exit(Exit.NO)
    written = lay_down(new, writable(Path(to)))
    if len(new) < cells:
        click.echo(f"{cells - len(new)} cells stand already, and were left as they are", err=True)
    size = sum(path.stat().st_size for path in written)
    click.echo(f"{len(new)} records in {len(written)} files, {size / 2**20:.1f} MiB -> {to}")
    _say_what_is_next(Path(to), sorted({str(path.parent) for path in written}))


def _say_what_is_next(to: Path, folders: list[str]) -> None:
    """Print the commands that lead to a pull request."""
    page = to.parent / "README.md"
    commands = [
        f"bench review {shlex.quote(str(to))} --base HEAD:{shlex.quote(str(to))}",
        f"bench leaderboard --results {shlex.quote(str(to))} --out {shlex.quote(str(page))}",
        f"git add --force {' '.join(map(shlex.quote, folders))}",
        f"git add {shlex.quote(str(to.parent))}",
    ]
    for line in ("Next, in the project's checkout:", *commands, "Then commit, and open a pull request."):
        click.echo(line, err=True)


@click.command()
@click.argument("folder", default=PUBLISHED, type=FILLED)
@click.option(
    "--base", default="HEAD", show_default=True, type=FILLED, metavar="DIR|REVISION",
    help="The records before the submission: a folder, or a git revision such as HEAD^1 or HEAD:leaderboard/results.",
)  # fmt: skip
@click.option("--sample", default=_SAMPLE_CELLS, show_default=True, type=click.IntRange(0), help="Cells to measure again.")
@click.option("--seed", type=FILLED, help="Decides which cells are drawn. Default: the hash of the last commit.")
@click.option("--data", metavar="DIR", envvar="BENCH_DATA", type=FILLED, help="Directory of the text, if a suite needs one.")
@click.option("--write", is_flag=True, help="Mark cells that agree as repeated by CI. The workflow on main does that.")
def review(folder: str, base: str, sample: int, seed: str | None, data: str | None, write: bool) -> None:
    """Review what FOLDER adds to the records of --base, as the workflow on a pull request does.

    It checks the records as `bench submit` does, measures a sample of cells again where the model is built in, and compares the
    rows with those that stand. Prints Markdown. Exit code 1: something is wrong, or a repeated cell differs.

    \b
    bench review
    bench review leaderboard/results --base HEAD^1 --sample 20
    """
    from kvbench.harness.report.review import markdown
    from kvbench.harness.report.sources import open_folder
    from kvbench.harness.run import submission

    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder")
    seed = seed or _last_commit()
    with open_folder(base) as before:
        result = submission.review(Path(folder), before, seed, sample, data)
    click.echo(markdown(result), nl=False)
    if not result.accepted:
        sys.exit(Exit.NO)
    if write:
        _mark(result, Path(folder))


def _last_commit() -> str:
    """The hash of the checkout's last commit.

    Raises:
        UserError: this is no git checkout, or it has no commit.
    """
    try:
        done = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        raise UserError("git is not installed to look for the last commit: give a --seed") from None
    if done.returncode:
        raise UserError("no git checkout with a commit is here: give a --seed")
    return done.stdout.strip()


def _mark(result: Review, folder: Path) -> None:
    """List the cells that were measured again, and agreed, as repeated by CI."""
    from kvbench.harness.records import RecordStore, Submitted, add_submitted, fingerprint

    agreeing = [(r.submitted, r.again) for r in result.repeats if r.again is not None and not r.differs]
    for record, again in agreeing:
        note = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {again.facts.device}, commit {_last_commit()[:12]}"
        entry = Submitted(record=record.stem, sha256=fingerprint(record), repeated=note)
        add_submitted(RecordStore(folder).path(record).parent, [entry])
    click.echo(f"{len(agreeing)} records marked as repeated by CI", err=True)
