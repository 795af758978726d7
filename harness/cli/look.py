"""Verbs that show what there is, and check what a user brings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from harness.cli.output import print_rows
from harness.errors import Exit


@click.command("list")
@click.argument("what", type=click.Choice(["policies", "suites", "tasks", "models"]))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def list_(what: str, as_json: bool) -> None:
    """Show what there is. For models: tiny random models of many families, each put through the self-check.

    \b
    bench list policies
    bench list models
    """
    from harness import listing

    print_rows(getattr(listing, what)(), as_json)


@click.group()
def policy() -> None:
    """Work on policies.

    \b
    bench policy check my_policy.py:MyPolicy
    """


@policy.command("check")
@click.argument("name")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A parameter of the policy.")
def check(name: str, settings: tuple[str, ...]) -> None:
    """Hold a policy to the interface's rules, and say in words what is wrong.

    \b
    bench policy check h2o
    bench policy check my_policy.py:MyPolicy --set window=8
    """
    from harness.policy_check import run_checks

    findings = run_checks(name, settings)
    for finding in findings:
        click.echo(f"{'ok   ' if finding.ok else 'WRONG'} {finding.rule}" + (f": {finding.problem}" if finding.problem else ""))
    if not all(f.ok for f in findings):
        sys.exit(Exit.NO)


@click.command()
def schema() -> None:
    """Print the JSON schema of suite files, for editors.

    \b
    bench schema > suite.schema.json
    """
    from harness import suite as suites

    click.echo(json.dumps(suites.schema(), indent=1))


@click.command()
@click.option("--model", metavar="DIR|HUB_ID", help="Look for this model too.")
@click.option("--data", metavar="DIR", envvar="BENCH_DATA", help="Look into this directory of text too (or BENCH_DATA).")
@click.option("--quick", is_flag=True, help="Leave out what takes seconds: speed, the hub, the families.")
def doctor(model: str | None, data: str | None, quick: bool) -> None:
    """Say what a bug report needs to say: versions, device, what can be reached, which model families work.

    
    bench doctor
    bench doctor --model ./my-model --data ./books
    """
    from harness.doctor import report

    failed = False
    for name, found in report(model, Path(data).expanduser() if data else None, quick):
        click.echo(f"{name:<16} {found}")
        failed |= found.startswith("FAILED")
    if failed:
        sys.exit(Exit.NO)
