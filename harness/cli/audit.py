"""The command `bench audit`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kvbench.harness.cli.output import FILLED, show_checks
from kvbench.harness.core.errors import Exit
from kvbench.harness.core.files import atomic_write, writable


@click.command()
@click.argument("target", type=FILLED)
@click.option("--model", "models", multiple=True, type=FILLED, help="Model to read with; repeatable. Default: three tiny ones.")
@click.option("--budget", "--capacity", type=click.IntRange(1), metavar="TOKENS", help="Tokens that a KV head should keep.")
@click.option("--sinks", type=click.IntRange(0), default=0, metavar="TOKENS", help="First tokens that should always be held.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a parameter of the constructor.")
@click.option("--like", type=FILLED, metavar="POLICY", help="Policy of KV Bench that should hold the same tokens.")
@click.option("--skip", multiple=True, type=FILLED, metavar="CHECK", help="Leave a check out; repeatable.")
@click.option("--html", "page", type=FILLED, metavar="FILE", help="Write a page with pictures of the positions held.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def audit(
    target: str,
    models: tuple[str, ...],
    budget: int | None,
    sinks: int,
    settings: tuple[str, ...],
    like: str | None,
    skip: tuple[str, ...],
    page: str | None,
    as_json: bool,
) -> None:
    """Check what a KV cache does.

    TARGET is a class of a transformers cache or of one layer's cache in a file, a cache of transformers, a press of kvpress, or a
    policy. It reads texts token by token, in blocks, in batches and in a second turn. The exit code is 1 if a check fails.

    \b
    bench audit my_cache.py:MyCache --budget 64
    bench audit my_cache.py:MyCache --budget 64 --set first=4 --like sink_window --model smollm2
    bench audit kvpress:SnapKVPress --set compression_ratio=0.5
    bench audit DynamicCache
    bench audit h2o --capacity 64 --html h2o.html
    """
    import torch

    from kvbench.harness.audit.audit import audited, models_of
    from kvbench.harness.audit.subject import subject_of
    from kvbench.harness.run.progress import StderrConsole, steps_view

    torch.set_num_threads(1)  # faster for tiny models
    subject = subject_of(target, settings, budget, sinks)
    named = [model for name in models for model in models_of(name)] or models_of(None)
    with steps_view(StderrConsole()) as progress:
        result = audited(subject, named, like, skip, progress)
    if page is not None:
        with atomic_write(writable(Path(page).parent) / Path(page).name) as file:
            file.write(result.to_html())
    if as_json:
        click.echo(result.to_json())
    else:
        show_checks(result)
        click.echo(f"bench: {result.summary}", err=True)
    if not result.ok:
        sys.exit(Exit.NO)
