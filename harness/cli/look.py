"""The commands `bench list`, `policy`, `schema` and `doctor`."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import click

from kvbench.harness.cli.output import FILLED, debugging, print_rows
from kvbench.harness.core.errors import Exit


@click.command("list")
@click.argument("what", type=click.Choice(["policies", "suites", "tasks", "models"]))
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def list_(what: str, as_json: bool) -> None:
    """List policies, suites, tasks or model families. For each family, a tiny random model goes through the self-check.

    \b
    bench list policies
    bench list models
    """
    from kvbench.harness.cli import listing

    print_rows(getattr(listing, what)(), as_json)


@click.group()
def policy() -> None:
    """Check a policy.

    \b
    bench policy check my_policy.py:MyPolicy
    """


@policy.command("check")
@click.argument("name")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a parameter of the policy.")
@click.option(
    "--capacity", "capacities", multiple=True, type=click.IntRange(1, 8192), metavar="TOKENS",
    help="Check at this capacity; repeatable. Default: 16, 17, 64 and 256.",
)  # fmt: skip
def check(name: str, settings: tuple[str, ...], capacities: tuple[int, ...]) -> None:
    """Check every rule of the interface on a policy, and show how fast text is read under it and why.

    \b
    bench policy check h2o
    bench policy check my_policy.py:MyPolicy --set window=8 --capacity 128
    """
    import torch

    from kvbench.harness.core.plugins import ignored_plugins
    from kvbench.harness.run.policy_check import check as checked

    torch.set_num_threads(1)  # faster for tiny models
    for plugin, reason in ignored_plugins(name).items():
        click.echo(f"bench: the plug-in {plugin} is {reason}", err=True)
    result = checked(name, settings, capacities)
    for finding in result.findings:
        state = "-    " if finding.note else "ok   " if finding.ok else "WRONG"
        detail = finding.problem or finding.note
        click.echo(f"{state} {finding.rule}{detail and ': '}{detail}")
        if finding.error is not None and debugging():
            traceback.print_exception(finding.error)
    if result.reading:
        click.echo(f"reads {result.reading}")
    if not all(f.ok for f in result.findings):
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
@click.option("--model", metavar="DIR|HUB_ID", type=FILLED, help="Also look for this model.")
@click.option(
    "--data", metavar="DIR", envvar="BENCH_DATA", type=FILLED, help="Also read from this directory of text (or BENCH_DATA)."
)
@click.option("--quick", is_flag=True, help="Leave out facts that take seconds: speed, the hub, the model families.")
def doctor(model: str | None, data: str | None, quick: bool) -> None:
    """Show the facts that a bug report needs.

    These are versions, device, what can be reached, and which model families work.

    \b
    bench doctor
    bench doctor --model ./my-model --data ./books
    """
    from kvbench.harness.cli.doctor import report

    failed = False
    for name, fact in report(model, Path(data).expanduser() if data else None, quick):
        click.echo(f"{name:<16} {fact}")
        failed |= fact.startswith("FAILED")
    if failed:
        sys.exit(Exit.NO)
