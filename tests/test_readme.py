"""Readers of the README and of docs/ get whole paragraphs, links that lead somewhere, and commands that parse."""

import re
import shlex
from pathlib import Path

import click
import pytest

from kvbench.harness.cli import cli
from kvbench.harness.cli.loaded import LoadedCommand

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r'(?:\]\(|(?:src|srcset)=")([^)"\s#]*)(?:#([^)"\s]+))?')
FENCED = re.compile(r"^```.*?^```$", re.S | re.M)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs write them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_files_and_headings():
    broken = []
    for page in PAGES:
        for target, anchor in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
            path = page.parent / target if target else page
            if re.match("[a-z]+:", target):
                continue
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
                broken.append(f"{page.name}: {target}#{anchor}")
    assert broken == []


def commands() -> list[str]:
    """Return the `bench` commands in code blocks of all pages."""
    blocks = [block for page in PAGES for block in FENCED.findall(page.read_text(encoding="utf-8"))]
    return sorted({line.strip() for block in blocks for line in re.findall(r"^bench .*$", block.replace("\\\n", ""), re.M)})


@pytest.mark.parametrize("line", commands(), ids=str)
def test_commands_have_known_verbs_and_options(line):
    arguments = shlex.split(re.split(r"[|>&]| \.\.\.", line)[0], comments=True)[1:]
    command: click.Command = cli
    while isinstance(command, click.Group):
        _, arguments, _ = command.make_parser(click.Context(command)).parse_args(arguments)
        name, *arguments = arguments
        assert command.get_command(click.Context(command), name), name
        command = command.get_command(click.Context(command), name)
    command = command.load() if isinstance(command, LoadedCommand) else command
    context = click.Context(command, **command.context_settings)  # raw arguments are passed on to another parser
    command.make_parser(context).parse_args(arguments)  # raises NoSuchOption
