"""Options of the commands that run a suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvbench.harness.cli.output import FILLED

_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--model", metavar="DIR|HUB_ID", type=FILLED, help="Use this model, or all models in a folder."),
    click.option(
        "--data", metavar="DIR", envvar="BENCH_DATA", type=FILLED,
        help="Directory of the text, .parquet or .txt, or of images (or BENCH_DATA).",
    ),
    click.option(
        "--policy", "policies", multiple=True, metavar="POLICY",
        help="Measure only this policy: a name, file.py:Class or '{name: h2o, window: 8}'; repeatable.",
    ),
    click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE",
        help="Change a value of the suite: --set tokens=20000 --set capacity=[128,256].",
    ),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:1."),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Type of the weights and the cache."),
    click.option("--threads", type=click.IntRange(1), help="CPU threads. Default: torch's."),
]  # fmt: skip


def suite_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that `bench run` and `bench baseline update` share."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
