"""The command `bench`: a verb a job. Results on stdout, everything else on stderr; nothing heavy is imported early."""

from __future__ import annotations

import os
import sys

import click

from harness import __version__
from harness.cli import judge, keep, lm_eval, look, measure, pages
from harness.errors import NO_ROOM, UserError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bench")
def cli() -> None:
    """KV Bench: what an LLM loses, and gains, when part of its KV cache is thrown away.

    \b
    bench run suites/pg19.yaml      measure, one record a cell
    bench leaderboard               records -> leaderboard/README.md
    """


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


def main() -> None:
    """The console script: a user's mistake is one line and exit code 2; Ctrl-C is 130."""
    try:
        result = cli.main(standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"bench: {error.format_message()}", err=True)
        sys.exit(2)
    except UserError as error:
        click.echo(f"bench: {error}", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("bench: stopped; finished cells are kept, run the same command again to go on", err=True)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        click.echo(f"bench: {error.filename or 'a temporary file'}: {error.strerror}; finished cells are kept", err=True)
        sys.exit(2)
