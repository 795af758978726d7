"""The command `bench policy check`."""

from __future__ import annotations

import sys

import click

from kvbench.harness.cli.output import show_checks
from kvbench.harness.core.errors import Exit


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
    "--capacity",
    "capacities",
    multiple=True,
    type=click.IntRange(1, 8192),
    metavar="TOKENS",
    help="Check at this capacity; repeatable. Default: 16, 17, 64 and 256.",
)
def check(name: str, settings: tuple[str, ...], capacities: tuple[int, ...]) -> None:
    """Check a policy against every rule of the interface, and show the method that reads text under it.

    \b
    bench policy check h2o
    bench policy check my_policy.py:MyPolicy --set window=8 --capacity 128
    """
    import torch

    from kvbench.harness.core.plugins import ignored_plugins
    from kvbench.harness.run.policy_check import check as checked
    from kvbench.harness.run.progress import StderrConsole, steps_view

    torch.set_num_threads(1)  # faster for tiny models
    for plugin, reason in ignored_plugins(name).items():
        click.echo(f"bench: the plug-in {plugin} is {reason}", err=True)
    with steps_view(StderrConsole()) as progress:
        result = checked(name, settings, capacities, progress)
    show_checks(result)
    if result.reading:
        click.echo(f"method: {result.reading}")
    if not result.ok:
        sys.exit(Exit.NO)
