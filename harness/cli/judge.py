"""Verbs that compare records and judge them."""

from __future__ import annotations

import json

import click

from harness.cli.output import print_rows
from harness.errors import UserError


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("--markdown", is_flag=True, help="Print as markdown, for a comment on a pull request.")
def compare(a: str, b: str, as_json: bool, markdown: bool) -> None:
    """Judge B against A, metric by metric: each a record's file, a folder of records, or a git revision.

    Paired token by token and question by question where both read the same.

    \b
    bench compare HEAD leaderboard/results
    bench compare before/ after/ --markdown
    bench compare results/.../h2o-*.json results/.../sink_window-*.json
    """
    from harness.report import verdicts
    from harness.report.sources import records_of

    with records_of(a) as (first, folder_a), records_of(b) as (second, folder_b):
        found = verdicts.of((first, folder_a), (second, folder_b))
    if not found:
        raise UserError(f"{a} and {b} have no cell in common: {len(first)} and {len(second)} records")
    if as_json:
        click.echo(json.dumps([x.as_json() for x in found], indent=1, ensure_ascii=False))
    elif markdown:
        click.echo(verdicts.markdown(found, a, b), nl=False)
    else:
        print_rows([x.cells() for x in found], False)
        click.echo(verdicts.summary(found), err=True)
