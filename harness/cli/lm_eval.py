"""`bench lm-eval`: lm-eval's own command line, with our model added."""

from __future__ import annotations

import sys

import click

from kvbench.harness.core.errors import UserError


@click.command(
    "lm-eval",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def lm_eval(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Run lm-eval under a policy.

    This is lm-eval's own command line with the model `kvbench`, which evicts while it reads.

    --model_args takes: pretrained, policy and its parameters, capacity, positions, limit, prompt (stream, once or truncate),
    prompt_tokens, seed, dtype, revision, max_length. All other options are lm-eval's: see 'bench lm-eval run --help'.

    \b
    bench lm-eval --model_args pretrained=builtin:sink_2,policy=sink_window,sinks=4,capacity=64 --tasks kvbench_cloze
    bench lm-eval --model_args pretrained=EleutherAI/pythia-160m,policy=h2o,capacity=128 --tasks arc_easy,piqa --limit 100
    bench lm-eval ls tasks
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        click.echo(context.get_help())
        return
    from kvbench.harness.lm_eval import catalogue

    catalogue.register()
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    command = list(arguments)
    if command[0] not in ("run", "ls", "validate"):
        command.insert(0, "run")
    sys.argv = ["bench lm-eval", *command]
    setup_logging()
    parser = HarnessCLI()
    parsed = parser.parse_args()
    if parsed.command == "run" and not getattr(parsed, "config", None):
        parsed.model = parsed.model or "kvbench"
        vars(parsed).setdefault("batch_size", "16")
    catalogue.keep_requests_apart(vars(parsed))
    try:
        catalogue.refuse_settings(vars(parsed))
        if hasattr(parsed, "include_path"):
            parsed.include_path = catalogue.with_our_tasks(parsed.include_path, getattr(parsed, "config", None))
        parser.execute(parsed)
    except UserError:
        raise
    except Exception as error:
        explained = catalogue.unreachable(error) or catalogue.unknown(error) or catalogue.refused(error, "lm-eval")
        if explained is None:
            raise
        raise explained from error
