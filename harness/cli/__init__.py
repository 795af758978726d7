"""The command `bench`: a verb a job. Results on stdout, everything else on stderr; nothing heavy is imported early."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import traceback
from typing import Any, NoReturn

import click

from kvbench import __version__
from kvbench.harness.cli import judge, keep, lm_eval, look, measure, pages
from kvbench.harness.cli.output import debugging
from kvbench.harness.core import plugins
from kvbench.harness.core.errors import DISK_ERRNOS, Exit, UserError


class _Bench(click.Group):
    """All verbs. Where a pipe is closed, click itself would end with 1, which is an answer of some verbs."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _end_unheard()


@click.group(cls=_Bench, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bench")
@click.option("--debug", is_flag=True, help="Show a traceback with every error, and with every failed cell.")
@click.option(
    "--task", "tasks", multiple=True, envvar="BENCH_TASKS", metavar="FILE.PY:CLASS",
    help="Read records of a task of yours as it declares (or BENCH_TASKS, several with blanks between them).",
)  # fmt: skip
def cli(debug: bool, tasks: tuple[str, ...]) -> None:  # noqa: ARG001 - sys.argv is looked at (`output.debugging`)
    """KV Bench: what an LLM loses, and gains, when part of its KV cache is thrown away.

    \b
    bench run quickstart      measure every policy, one record a cell, in ./results
    bench leaderboard         make the pages of ./results: index.html and README.md
    """
    for task in tasks:
        plugins.task_class(task)


for _verb in (
    measure.run,
    pages.leaderboard,
    lm_eval.lm_eval,
    judge.compare,
    judge.check,
    judge.baseline,
    keep.records,
    measure.pretrain,
    look.list_,
    look.policy,
    look.schema,
    look.doctor,
):
    cli.add_command(_verb)


def _accept_debug(command: click.Command) -> None:
    """`--debug` behind the verb is as good as before it (`output.debugging`)."""
    if isinstance(command, click.Group):
        for verb in command.commands.values():
            _accept_debug(verb)
    else:
        command.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, hidden=True))


_accept_debug(cli)


def main() -> None:
    """The console script: what goes wrong becomes one line and an exit code (`Exit`); a crash of ours keeps its traceback."""
    _open_what_is_closed()
    try:
        code = _code()
        sys.stdout.flush()  # so that a reader who has gone is noticed here and not at exit
        sys.exit(code)
    except BrokenPipeError:
        _end_unheard()


def _code() -> int:
    """Run the command line, and say what went wrong.

    Raises:
        BrokenPipeError: whoever read our output has gone.
    """
    try:
        result = cli.main(standalone_mode=False)
        return result if isinstance(result, int) else Exit.OK
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        return Exit.MISTAKE
    except click.ClickException as error:
        return _mistake(error.format_message())
    except UserError as error:
        return _mistake(str(error))
    except (KeyboardInterrupt, click.Abort):
        click.echo("bench: stopped; finished cells are kept, run the same command again to go on", err=True)
        return Exit.STOPPED
    except BrokenPipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
            return _mistake(f"{error.filename or 'a temporary file'}: {error.strerror}; finished cells are kept")
        return _crashed()


def _open_what_is_closed() -> None:
    """Give a process that was started with a closed stdout or stderr one that leads nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as the process lives


def _end_unheard() -> NoReturn:
    """Whoever read our output has gone. What is still to be written would fail at exit, and goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # one that is no file, as in tests
            os.dup2(nowhere, stream.fileno())
    sys.exit(Exit.CLOSED_PIPE)


def _mistake(message: str) -> int:
    """One line; the traceback only if it was asked for."""
    if debugging():
        traceback.print_exc()
    click.echo(f"bench: {message}", err=True)
    return Exit.MISTAKE


def _crashed() -> int:
    """A bug of ours: everything that a report of it needs."""
    traceback.print_exc()
    where = f"kv-bench {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    click.echo(f"bench: this is a bug of ours ({where}): please report the lines above; finished cells are kept", err=True)
    return Exit.CRASH
