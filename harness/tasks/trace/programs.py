"""Programs of a cell, and judgement of answers by their right traces. Imports no torch.

`sources` yields the places of the words from which each word of a trace follows. `figures` computes a record's figures from its
trace file.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.intervals import MIN_BLOCKS, clustered_share
from kvbench.harness.data.register_machine import (
    JUMP,
    LEFT,
    LINE_WORDS,
    RIGHT,
    TARGET,
    TOLD,
    WORDS,
    ZERO,
    Program,
    head_words,
    program,
)
from kvbench.harness.data.stream import fingerprint, opening
from kvbench.harness.records.aggregates import buckets, pass_at, pass_sizes
from kvbench.harness.tasks.trace.trace_options import TraceOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Judgement = tuple[int, bool]  # a distance in words, and whether the step or value at that distance is right


@dataclass(frozen=True)
class TraceData:
    """Programs, as their prompts and right traces."""

    prompts: NDArray[np.int64]  # token ids, with the tokens that open a stream. [P, N]
    traces: tuple[NDArray[np.int64], ...]  # token ids of each right trace
    prefix: int  # number of tokens that open a stream
    samples: int  # answers for each program
    steps: float  # mean number of steps of a program
    source: str
    tokenizer: PreTrainedTokenizerBase

    @property
    def ids_sha256(self) -> str:
        """Fingerprint of the prompts; the traces follow from them."""
        return fingerprint(self.prompts.flatten())

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and right traces, counted once per answer."""
        prompts = self.prompts.size - self.prefix * len(self.prompts)
        return self.samples * (prompts + sum(len(trace) for trace in self.traces))

    def facts(self) -> dict[str, Any]:
        """Return the facts about the data for the record."""
        return {
            "source": self.source,
            "ids_sha256": self.ids_sha256,
            "tokens": self.tokens,
            "prefix": self.prompts[0, : self.prefix].tolist(),
            "steps": self.steps,
        }

    def words(self, ids: list[int]) -> list[str]:
        """Return tokens as words."""
        return list(self.tokenizer.convert_ids_to_tokens(ids))


def trace_data(options: TraceOptions, tokenizer: PreTrainedTokenizerBase) -> TraceData:
    """Draw the programs, each of which depends only on the options and its number.

    Raises:
        UserError: the model lacks words of programs, or no program ends after the required number of steps.
    """
    vocabulary = tokenizer.get_vocab()
    if not set(WORDS) <= vocabulary.keys():
        raise UserError("trace needs a model with a token for each word of a program, such as `bench pretrain machine` makes")
    try:
        programs = [
            program(
                random.Random(f"{options.data_seed}/{number}"),
                options.lines,
                options.restate,
                options.tell,
                (options.steps, 2 * options.steps),
                options.registers,
            )
            for number in range(options.programs)
        ]
    except ValueError as error:
        raise UserError(f"trace: {error}: choose other lines, registers or steps") from None
    prefix = opening(tokenizer)
    traces = [[vocabulary[word] for step in drawn.steps() for word in step.words] for drawn in programs]
    return TraceData(
        np.array([[*prefix, *(vocabulary[word] for word in drawn.prompt())] for drawn in programs]),
        tuple(np.array(trace) for trace in traces),
        len(prefix),
        options.samples,
        sum(map(len, traces)) / options.step / len(traces),
        f"generated, data seed {options.data_seed}",
        tokenizer,
    )


def sources(program: Program) -> Iterator[tuple[int, ...]]:
    """Yield for each word of the trace the places of the words from which it follows. The prompt's first word has place 0.

    The name of a register and the next label, or `end`, follow from the line in the prompt. A value follows from its previous
    occurrence, a sum from its two operands. The words with the line's number follow from the label that began the step, and the
    word for the branch also from the sum. The register whose value is told follows from the prompt.
    """
    head = head_words(program.tell is not None)
    place, lines = len(program.prompt()), {label: head + LINE_WORDS * number for number, label in enumerate(program.lines)}
    last_place = {register: head + LINE_WORDS * len(lines) + 2 * register + 1 for register in range(len(program.values))}
    for step in program.steps():
        line, first, label = program.lines[step.label], lines[step.label], place - 1
        operands = []
        for register, name in ((line.left, LEFT), (line.right, RIGHT)):
            yield from ((first + name,), (last_place[register],))
            operands.append(place + 1)
            last_place[register], place = place + 1, place + 2
            if program.restate == "full":
                yield (label,)
                place += 1
        yield from ((first + TARGET,), tuple(operands))
        last_place[line.target], place = place + 1, place + 2
        result = place - 1
        if program.tell is not None:
            yield from ((TOLD,), (last_place[program.tell],))
            last_place[program.tell], place = place + 1, place + 2
        yield from ((label, result), (first + (JUMP if step.values[line.target] else ZERO),))
        place += 2


@dataclass(frozen=True)
class JudgedAnswer:
    """Judgement of an answer.

    Attributes:
        right: whether the answer equals the program's trace, word by word.
        words: number of words of the answer.
        words_right: number of words before the first wrong word.
        matches: number of words that equal the trace's word at the same place.
        final: whether the last stated value of every register is the value with which the program ends.
        ending: "ended" if the last word is `end`; "looped" if the last steps, as many as the program has lines, occur before in
            the same words; else "cut", at the limit. A right trace never loops, because it would never end.
        told: whether each step obeys `tell`, by its distance from the prompt. A step obeys if it states the register and a digit
            between the result and the branch. A step ends with a label or `end`, or at twice its regular number of words.
        reads: whether each restated value is right, by its distance from its previous occurrence. Only values after right words
            count; with `teacher`, all values count.
    """

    right: bool
    words: int
    words_right: int
    matches: int
    final: bool
    ending: str
    told: list[Judgement]
    reads: list[Judgement]


def judged(prompt: str, answer: str, options: TraceOptions) -> JudgedAnswer:
    """Compare an answer with the trace of the program in its prompt."""
    program, words = Program.from_prompt(prompt.split()), answer.split()
    steps = list(itertools.islice(program.steps(), 2 * options.steps))
    trace = [word for step in steps for word in step.words]
    matches = [a == b for a, b in zip(words, trace, strict=False)]
    words_right = matches.index(False) if False in matches else len(matches)
    counted = len(trace) if options.teacher else words_right + 1
    places = itertools.islice(sources(program), len(trace))
    reads = [
        (options.prompt + place - source[0], match)
        for place, (word, match, source) in enumerate(zip(trace[:counted], matches, places, strict=False))
        if word.isdigit() and len(source) == 1
    ]
    return JudgedAnswer(
        right=words == trace,
        words=len(words),
        words_right=words_right,
        matches=sum(matches),
        final=_last_values(program, words) == steps[-1].values,
        ending=_ending(words, len(program.lines) * options.step),
        told=[] if program.tell is None else list(_told(words, program.tell, options.step)),
        reads=reads,
    )


def _last_values(program: Program, words: Sequence[str]) -> tuple[int, ...]:
    """Return the last stated value of each register, in the prompt or the answer."""
    values = list(program.values)
    for name, value in itertools.pairwise(words):
        if name[0] == "v" and value.isdigit() and int(name[1:]) < len(values):
            values[int(name[1:])] = int(value)
    return tuple(values)


def _ending(words: Sequence[str], stretch: int) -> str:
    """Return the ending of an answer: "ended", "looped" or "cut". stretch: words of as many steps as the program has lines."""
    if words[-1] == "end":
        return "ended"
    text, end = f" {' '.join(words)} ", f" {' '.join(words[-stretch:])} "
    return "looped" if end in text[:-1] else "cut"


def _told(words: Sequence[str], register: int, length: int) -> Iterator[Judgement]:
    """Yield the end of each step and whether the step obeys `tell`. length: words of a right step."""
    start, obeys = 0, re.compile(rf"(?: v\d \d(?: [MN]\d+)?){{3}} v{register} \d [OZ]\d+ (?:L\d+|end)$")
    for end, word in enumerate(words, 1):
        if word[0] == "L" or word == "end" or end - start == 2 * length:
            yield end, bool(obeys.search(" ".join(["", *words[start:end]])))
            start = end


def figures(lines: Sequence[dict[str, Any]], options: TraceOptions) -> dict[str, Any]:
    """Compute all figures except bytes.

    Args:
        lines: lines of the trace file, one per answer, program by program. `prompt` and `said` are words. `held` is the cached
            share of the sources of the first wrong word when that word was written.
    """
    answers = [judged(line["prompt"], line["said"], options) for line in lines]
    right, words = sum(a.right for a in answers), sum(a.words for a in answers)
    held = [line["held"] for line in lines if line["held"] is not None]
    result: dict[str, Any] = {
        "questions": len(answers),
        "right": right,
        "accuracy": right / len(answers),
        "outcomes": "".join("01"[a.right] for a in answers),
        "words": words,
        "words_right": [a.words_right for a in answers],
        "reads": _by_distance([a.reads for a in answers], options),
        "tokens_read": len(answers) * options.prompt + words,
    }
    if options.teacher:
        return result | {"word_accuracy": sum(a.matches for a in answers) / words}
    endings = [a.ending for a in answers]
    return result | {
        "final": sum(a.final for a in answers),
        "endings": {name: endings.count(name) for name in ("ended", "looped", "cut")},
        **({"told": _by_distance([a.told for a in answers], options)} if options.tell else {}),
        **({"held": sum(held) / len(held)} if held else {}),
        **({"pass_at": list(_pass_at(result["outcomes"], options.samples))} if options.samples > 1 else {}),
    }


def _by_distance(judgements: Sequence[Sequence[Judgement]], options: TraceOptions) -> list[dict[str, int]]:
    """Count the judgements and the right judgements in each bucket of distances. Empty buckets are left out."""
    distances, right = (np.array(x) for x in zip(*itertools.chain(*judgements), (0, False), strict=True))
    result = []
    for start, stop in buckets(options.prompt + options.limit + 1):
        inside = (distances[:-1] >= start) & (distances[:-1] < stop)
        if inside.any():
            result.append({"from": start, "to": stop, "count": int(inside.sum()), "right": int(right[:-1][inside].sum())})
    return result


def _pass_at(outcomes: str, samples: int) -> Iterator[dict[str, Any]]:
    """Yield pass@k for k above 1, with intervals over programs."""
    right = np.array([outcomes[start : start + samples].count("1") for start in range(0, len(outcomes), samples)], np.float64)
    for k in pass_sizes(samples)[1:]:
        shares = pass_at(right, samples, k)
        ends = clustered_share(shares, np.ones(len(shares))) if len(shares) >= MIN_BLOCKS else None
        yield {"k": k, "share": float(shares.mean())} | ({} if ends is None else {"low": ends[0], "high": ends[1]})
