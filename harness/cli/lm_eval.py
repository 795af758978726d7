"""The verb that hands everything to lm-eval's own command line, our model among its models."""

from __future__ import annotations

import sys

import click


@click.command(
    "lm-eval",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def lm_eval(context: click.Context, arguments: tuple[str, ...]) -> None:
    """lm-eval's own command line with the model `kvbench`: any of its tasks under a policy, evicting as it goes.

    What --model_args may say: pretrained, policy and its parameters, capacity, positions, limit, prompt (stream, once or
    truncate), prompt_tokens, seed, dtype, revision, max_length. All else is lm-eval's: 'bench lm-eval run --help'.

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
    from lm_eval.__main__ import cli_evaluate

    given = list(arguments)
    if given[0] not in ("run", "ls", "validate"):
        given.insert(0, "run")
    said = {argument.split("=", 1)[0] for argument in given}
    if given[0] == "run" and not said & {"-h", "--help"}:
        given += [] if said & {"--model", "-M", "--config", "-C"} else ["--model", "kvbench"]
        given += [] if said & {"--batch_size", "-b", "--config", "-C"} else ["--batch_size", "16"]
    if not said & {"--include_path", "-h", "--help"}:
        given += ["--include_path", str(catalogue.GENERATED)]
    sys.argv = ["bench lm-eval", *given]
    try:
        cli_evaluate()
    except Exception as error:
        explained = catalogue.unreachable(error) or catalogue.unknown(error)
        if explained is None:
            raise
        raise explained from error
