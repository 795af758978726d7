"""The command `bench show`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvbench.harness.cli.output import FILLED, results_option
from kvbench.harness.core.files import writable


@click.group()
def show() -> None:
    """Show the contents of a record.

    \b
    bench show table 128d93c6
    bench show kept 128d93c6
    bench show attention 1a2d4db3
    """


@show.command()
@click.argument("record", type=FILLED)
@results_option
@click.option("--out", type=FILLED, help="File of the picture, .png, .svg or .pdf. Default: .kept.png beside the record.")
@click.option("--stream", type=click.IntRange(0), default=0, show_default=True, help="Draw this stream of several.")
@click.option("--json", "as_json", is_flag=True, help="Print the map as JSON, and draw nothing.")
@click.option("--replay", type=FILLED, metavar="FILE", help="Write the table that the policy replay reads, and draw nothing.")
def kept(record: str, results: str, out: str | None, stream: int, as_json: bool, replay: str | None) -> None:
    """Draw the positions that every layer keeps.

    RECORD is a record's file, or the beginning of a cell id. It must have been measured with --trace kept. The picture has a
    panel per layer. Each column is a step, and the shade says which share of the KV heads holds a position. The path of the
    picture goes to stdout.

    \b
    bench run quickstart --policy h2o --trace kept
    bench show kept 128d93c6
    bench show kept 128d93c6 --out h2o.svg
    bench run quickstart --policy h2o --trace kept=all --fresh
    bench show kept 128d93c6 --replay h2o.pt
    """
    from kvbench.harness.report import chart, keep_map
    from kvbench.harness.report.sources import find_record

    given, folder = find_record(record, Path(results))
    path = keep_map.map_file(given, folder)
    if as_json:
        click.echo(json.dumps(keep_map.rows(path)))
        return
    whole = keep_map.read_map(path)
    if replay is not None:
        from kvbench.harness.run.keep_map_writer import write_replay

        write_replay(given, whole, Path(replay))
        click.echo(replay)
        return
    cell = given.cell
    size = "" if cell.capacity is None else f" at capacity {cell.capacity:,}"
    target = folder / f"{given.stem}.kept.png" if out is None else Path(out)
    title = f"What {cell.policy}{size} keeps: {cell.model.id}, {cell.suite}"
    chart.picture(keep_map.specification(keep_map.of_stream(whole, stream), title), target)
    click.echo(str(target))


@show.command()
@click.argument("record", type=FILLED)
@results_option
@click.option("--out", type=FILLED, help="File of the picture, .png, .svg or .pdf. Default: .attention.png beside the record.")
@click.option("--head", type=click.IntRange(0), help="Draw this query head. Default: the mean of all heads.")
@click.option("--layer", "layers", type=click.IntRange(0), multiple=True, help="Draw this layer; may be repeated. Default: all.")
def attention(record: str, results: str, out: str | None, head: int | None, layers: tuple[int, ...]) -> None:
    """Draw maps of mean attention logits.

    RECORD is a record's file, or the beginning of a cell id, of the task attention. The picture has a panel per layer: the logits
    that the first tokens of a sample give each other, mean over samples. Its path goes to stdout.

    \b
    bench run attention-builtin
    bench show attention 1a2d4db3
    bench show attention 1a2d4db3 --layer 2 --head 0 --out layer2.svg
    """
    from kvbench.harness.report import chart
    from kvbench.harness.report.logit_maps import logits_in, maps
    from kvbench.harness.report.sources import find_record

    given, folder = find_record(record, Path(results))
    logits = logits_in(given, folder, head, layers)
    of_heads = "mean of all heads" if head is None else f"head {head}"
    target = folder / f"{given.stem}.attention.png" if out is None else Path(out)
    title = f"Mean attention logits of {given.cell.model.id}, {given.cell.policy}: {of_heads}"
    chart.picture(maps(logits, layers or range(len(logits)), title), target)
    click.echo(str(target))


@show.command()
@click.argument("record", type=FILLED)
@results_option
@click.option(
    "--out", type=FILLED, help="File of the table, with its pictures in charts/ beside it. Default: stdout, no pictures."
)
def table(record: str, results: str, out: str | None) -> None:
    """Print the table of a cell's task, in Markdown.

    RECORD is a record's file, or the beginning of a cell id. The table has a row for every policy that was measured in the same
    task of its suite and model, with all figures of the task. If the suite was measured on the kept models of a pretraining,
    curves over its steps come first.

    \b
    bench show table 128d93c6
    bench show table 128d93c6 --out streameval.md
    """
    from kvbench.harness.core.files import atomic_write
    from kvbench.harness.records import RecordStore
    from kvbench.harness.report import chart, sections
    from kvbench.harness.report.sources import find_record

    given, _ = find_record(record, Path(results))
    page = sections.section(given, RecordStore(Path(results)).read_all()[0])
    if out is None:
        click.echo("\n".join(line for line in page.text.splitlines() if not line.startswith("<picture>")))
        return
    chart.write(chart.draw(page.charts), writable(Path(out).parent) / chart.FOLDER)
    with atomic_write(Path(out)) as file:
        file.write(page.text)
    click.echo(out)
