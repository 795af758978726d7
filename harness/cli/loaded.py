"""Commands that are imported when they run: commands of `kvbench.lab`, and entry points `bench.commands` of packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from kvbench.harness.cli.output import accept_debug
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.plugins import load_entry_point

GROUP = "bench.commands"


class LoadedCommand(click.Command):
    """A command that `bench --help` lists without importing it. It is imported to parse its arguments."""

    def __init__(self, entry: EntryPoint, help: str) -> None:  # noqa: A002 - click's name
        super().__init__(entry.name, help=help, add_help_option=False)
        self.entry = entry

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context of the imported command.

        Raises:
            UserError: the command can't be imported.
        """
        command = self.load()
        accept_debug(command)
        return command.make_context(info_name, args, parent, **extra)

    def load(self) -> click.Command:
        """Import the command.

        Raises:
            UserError: the entry point can't be imported, or is no command.
        """
        command = load_entry_point(self.entry)
        if not isinstance(command, click.Command):
            raise UserError(f"the plug-in '{self.name}' ({self.entry.value}) is not a click.Command")
        return command


# These commands are listed here and not in the metadata of the installed package, so that a checkout needs no installation.
LAB_COMMANDS = [
    LoadedCommand(EntryPoint("pretrain", "kvbench.lab.pretrain.command:pretrain", GROUP), "Pretrain a reference model."),
    LoadedCommand(
        EntryPoint("shared-kv", "kvbench.lab.shared_kv.command:shared_kv", GROUP), "Perplexity where layers share K and V."
    ),
]


def plugin_commands() -> dict[str, LoadedCommand]:
    """Return the commands of installed packages, by name. If two packages have a command of one name, the first is used."""
    entries = reversed(list(entry_points(group=GROUP)))
    return {entry.name: LoadedCommand(entry, f"Command of {_package(entry)}.") for entry in entries}


def _package(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist else entry.module
