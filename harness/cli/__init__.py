"""The command `bench`. Results go to stdout, messages and progress to stderr. Heavy modules are imported only when needed."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import traceback
from typing import Any, NoReturn

import click

from kvbench import __version__
from kvbench.harness.cli import audit, doctor, judge, listing, lm_eval, pages, policy, records, run, show
from kvbench.harness.cli import which as which_policy
from kvbench.harness.cli.loaded import LAB_COMMANDS, plugin_commands
from kvbench.harness.cli.output import accept_debug, debugging
from kvbench.harness.core import plugins
from kvbench.harness.core.errors import Exit, UserError, described, first_line
from kvbench.harness.core.shown import visible

_EXPECTED = (UserError, OSError, click.ClickException, click.Abort, click.exceptions.Exit)  # errors that `main` reports itself


class _Commands(click.Group):
    """Group of all commands. It handles closed pipes, because click would exit with 1, which some commands use as an answer."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names that `bench --help` shows."""
        return sorted({*self.commands, *plugin_commands()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return one of our commands, or a command of an installed package."""
        return super().get_command(ctx, cmd_name) or plugin_commands().get(cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises:
            UserError: a command of an installed package failed.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _exit_closed_pipe()
        except _EXPECTED:
            raise
        except Exception as error:
            if ctx.invoked_subcommand in self.commands:
                raise
            raise UserError(f"the plug-in '{ctx.invoked_subcommand}' failed: {described(error)}; --debug shows more") from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bench")
@click.option("--debug", is_flag=True, help="Show a traceback with every error, and with every failed cell.")
@click.option(
    "--task",
    "tasks",
    multiple=True,
    envvar="BENCH_TASKS",
    metavar="FILE.PY:CLASS",
    help="Load your own task, to read its records. Repeat for several, or list them in BENCH_TASKS, separated by spaces.",
)
def cli(debug: bool, tasks: tuple[str, ...]) -> None:  # noqa: ARG001 - `output.debugging` reads sys.argv
    """KV Bench: what an LLM loses, and gains, when part of its KV cache is thrown away.

    \b
    bench run quickstart      measure every policy; results go to ./results
    bench which MODEL         find the policy for a model of yours
    bench leaderboard         write the pages of ./results: index.html and README.md
    """
    for task in tasks:
        plugins.task_class(task)


for _command in (
    run.run,
    which_policy.which,
    pages.leaderboard,
    lm_eval.lm_eval,
    judge.compare,
    judge.check,
    judge.baseline,
    records.records,
    show.show,
    run.probe,
    listing.list_,
    policy.policy,
    audit.audit,
    listing.schema,
    doctor.doctor,
    *LAB_COMMANDS,
):
    cli.add_command(_command)


accept_debug(cli)


def main() -> None:
    """Run the console script. A user's mistake gives one line and an exit code (`Exit`); our bugs give a traceback."""
    _open_closed_streams()
    try:
        code = _run()
        sys.stdout.flush()  # notice a closed pipe here and not at exit
        sys.exit(code)
    except BrokenPipeError:
        _exit_closed_pipe()


def _run() -> int:
    """Run the command line, report an error, and return the exit code.

    Raises:
        BrokenPipeError: the reader of our output is gone.
    """
    try:
        result = cli.main(standalone_mode=False)
        return result if isinstance(result, int) else Exit.OK
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        return Exit.MISTAKE
    except click.ClickException as error:
        return _report_mistake(error.format_message())
    except UserError as error:
        return _report_mistake(str(error))
    except (KeyboardInterrupt, click.Abort):
        click.echo("bench: stopped; finished cells are kept: run the same command again to go on", err=True)
        return Exit.STOPPED
    except BrokenPipeError:
        raise
    except OSError as error:  # an error of the user's disk or network
        name, reason = error.filename or "a file or connection", error.strerror or first_line(error) or type(error).__name__
        return _report_mistake(f"{visible(name)}: {visible(reason)}; finished cells are kept; --debug shows where")
    except Exception:
        return _report_crash()


def _open_closed_streams() -> None:
    """Open the null device as stdout or stderr if the process was started with the stream closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as the process lives


def _exit_closed_pipe() -> NoReturn:
    """Exit because the reader of our output is gone. Buffered output goes to the null device, so that exiting can't fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # in tests, a stream may not be a file
            os.dup2(null, stream.fileno())
    sys.exit(Exit.CLOSED_PIPE)


def _report_mistake(message: str) -> int:
    """Print a mistake in one line, after the traceback if --debug is given."""
    if debugging():
        traceback.print_exc()
    click.echo(f"bench: {message}", err=True)
    return Exit.MISTAKE


def _report_crash() -> int:
    """Print the traceback and versions that a bug report needs."""
    traceback.print_exc()
    versions = f"kv-bench {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    click.echo(f"bench: this is a bug in KV Bench ({versions}): please report the lines above; finished cells are kept", err=True)
    return Exit.CRASH
