"""The programs of a cell, and where in its stream each word of a trace finds what it follows from. Imports no torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.machine import LINE_WORDS, WORDS, Program, head_words, program
from kvbench.harness.data.stream import fingerprint, opening
from kvbench.harness.tasks.trace.schema import TraceOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TraceData:
    """Programs, as their prompts and right traces."""

    prompts: NDArray[np.int64]  # token ids, with the tokens that open a stream. [P, N]
    traces: tuple[NDArray[np.int64], ...]  # token ids of each right trace
    prefix: int  # tokens that open a stream
    samples: int  # answers for each program
    steps: float  # of a program, on average
    source: str
    tokenizer: PreTrainedTokenizerBase

    @property
    def ids_sha256(self) -> str:
        """Fingerprint of the prompts; the traces follow from them."""
        return fingerprint(self.prompts.flatten())

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and right traces, each as often as it has answers."""
        prompts = self.prompts.size - self.prefix * len(self.prompts)
        return self.samples * (prompts + sum(len(trace) for trace in self.traces))

    def facts(self) -> dict[str, Any]:
        """Facts about the data, for the record."""
        return {
            "source": self.source, "ids_sha256": self.ids_sha256, "tokens": self.tokens,
            "prefix": self.prompts[0, : self.prefix].tolist(), "steps": self.steps,
        }  # fmt: skip

    def words(self, ids: list[int]) -> list[str]:
        """Tokens as words."""
        return list(self.tokenizer.convert_ids_to_tokens(ids))


def trace_data(options: TraceOptions, tokenizer: PreTrainedTokenizerBase) -> TraceData:
    """Draw the programs. They depend on the options and on their number alone.

    Raises:
        UserError: the model knows other words, or no program ends after as many steps.
    """
    vocabulary = tokenizer.get_vocab()
    if not set(WORDS) <= vocabulary.keys():
        raise UserError("trace needs a model with a token for each word of a program, such as `bench pretrain machine` makes")
    try:
        programs = [
            program(
                random.Random(f"{options.data_seed}/{number}"), options.lines, options.restate, options.tell,
                (options.steps, 2 * options.steps), options.registers,
            )
            for number in range(options.programs)
        ]  # fmt: skip
    except ValueError as error:
        raise UserError(f"trace: {error}: choose other lines, registers or steps") from None
    prefix = opening(tokenizer)
    traces = [[vocabulary[word] for step in made.steps() for word in step.words] for made in programs]
    return TraceData(
        np.array([[*prefix, *(vocabulary[word] for word in made.prompt())] for made in programs]),
        tuple(np.array(trace) for trace in traces), len(prefix), options.samples,
        sum(map(len, traces)) / options.step / len(traces), f"generated, data seed {options.data_seed}", tokenizer,
    )  # fmt: skip


def sources(made: Program) -> Iterator[tuple[int, ...]]:
    """For each word of the trace, the places of the words that it follows from. The prompt's first word has place 0.

    A word of a line, and the name of a register, come from the line in the prompt, or from where the step restates it; the
    register that is told comes from the prompt. A value comes from where it was said last, a sum from its two operands, and the
    next label, or `end`, from the line's and from the three words after `until`.
    """
    head = head_words(made.tell is not None)
    at, lines = len(made.prompt()), {label: head + LINE_WORDS * number for number, label in enumerate(made.lines)}
    said = {register: head + LINE_WORDS * len(lines) + 2 * register + 1 for register in range(len(made.values))}
    for step in made.steps():
        line, first = made.lines[step.label], lines[step.label] + 2
        if step.restated:
            yield from ((first + word,) for word in range(4))
            first, at = at, at + 4
        if made.tell is not None:
            yield from ((2,), (said[made.tell],))
            said[made.tell], at = at + 1, at + 2
        for register, name in ((line.left, first + 1), (line.right, first + 2)):
            yield from ((name,), (said[register],))
            said[register], at = at + 1, at + 2
        yield from ((first,), (at - 3, at - 1))
        said[line.target], at = at + 1, at + 2
        yield (first + 3, head - 3, head - 2, head - 1)
        at += 1
