"""Verbs that show what there is, and check what a user brings."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import click

from kvbench.harness.cli.output import FILLED, print_rows
from kvbench.harness.core.errors import Exit


@click.command("list")
@click.argument("what", type=click.Choice(["policies", "suites", "tasks", "models"]))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def list_(what: str, as_json: bool) -> None:
    """Show what there is. For models: tiny random models of many families, each put through the self-check.

    \b
    bench list policies
    bench list models
    """
    from kvbench.harness.cli import listing

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
@click.option(
    "--capacity", "capacities", multiple=True, type=click.IntRange(1, 8192), metavar="TOKENS",
    help="Try it at this capacity, up to 8192; 16, 17, 64 and 256 if none is given.",
)  # fmt: skip
def check(name: str, settings: tuple[str, ...], capacities: tuple[int, ...]) -> None:
    """Hold a policy to the interface's rules, say in words what is wrong, and how it will be read.

    \b
    bench policy check h2o
    bench policy check my_policy.py:MyPolicy --set window=8 --capacity 128
    """
    import torch

    from kvbench.harness.core.plugins import ignored_plugins
    from kvbench.harness.run.policy_check import check as checked

    torch.set_num_threads(1)  # tiny models are faster so
    for plugin, reason in ignored_plugins(name).items():
        click.echo(f"bench: the plug-in {plugin} is {reason}", err=True)
    found = checked(name, settings, capacities)
    for finding in found.findings:
        state = "-    " if finding.note else "ok   " if finding.ok else "WRONG"
        told = finding.problem or finding.note
        click.echo(f"{state} {finding.rule}{told and ': '}{told}")
        if finding.error is not None and "--debug" in sys.argv:
            traceback.print_exception(finding.error)
    if found.reading:
        click.echo(f"reads {found.reading}")
    if not all(f.ok for f in found.findings):
        sys.exit(Exit.NO)


@click.command()
def schema() -> None:
    """Print the JSON schema of suite files, for editors.

    \b
    bench schema > suite.schema.json
    """
    from kvbench.harness import suite as suites

    click.echo(json.dumps(suites.schema(), indent=1))


@click.command()
@click.option("--model", metavar="DIR|HUB_ID", type=FILLED, help="Look for this model too.")
@click.option(
    "--data", metavar="DIR", envvar="BENCH_DATA", type=FILLED, help="Look into this directory of text too (or BENCH_DATA)."
)
@click.option("--quick", is_flag=True, help="Leave out what takes seconds: speed, the hub, the families.")
def doctor(model: str | None, data: str | None, quick: bool) -> None:
    """Say what a bug report needs to say: versions, device, what can be reached, which model families work.

    
    bench doctor
    bench doctor --model ./my-model --data ./books
    """
    from kvbench.harness.cli.doctor import report

    failed = False
    for name, found in report(model, Path(data).expanduser() if data else None, quick):
        click.echo(f"{name:<16} {found}")
        failed |= found.startswith("FAILED")
    if failed:
        sys.exit(Exit.NO)
