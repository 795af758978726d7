"""Judges answers beside the right traces, and computes a record's figures from its trace file. Imports no torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.harness.core.intervals import MIN_BLOCKS, clustered_share
from kvbench.harness.data.machine import Program
from kvbench.harness.records.aggregates import pass_at, pass_sizes
from kvbench.harness.tasks.common.samples import buckets
from kvbench.harness.tasks.trace.programs import sources
from kvbench.harness.tasks.trace.schema import TraceOptions

Judgement = tuple[int, bool]  # a distance in words, and whether what is there is right


@dataclass(frozen=True)
class Answer:
    """One answer, judged.

    Attributes:
        right: it is the program's trace, word by word.
        words: that it has.
        words_right: those before the first wrong one.
        matches: words that equal the trace's at the same place.
        final: every register, as last said, has the value with which the program ends.
        ending: ended, if its last word is `end`; looped, if its last steps, as many as the program has lines, came before in the
            same words, which a right trace never has, as it would go on for ever; cut, if it is neither when it is at its limit.
        told: whether each step obeys `tell`, by its distance from the prompt: it says that register and a digit before both
            operands and the result. A step ends with a label or `end` after a digit, or once it has as many words as two.
        reads: whether each value said again is right, by its distance from where it was said last. Only what follows right words
            counts, which with `teacher` is all.
    """

    right: bool
    words: int
    words_right: int
    matches: int
    final: bool
    ending: str
    told: list[Judgement]
    reads: list[Judgement]


def judged(prompt: str, said: str, options: TraceOptions) -> Answer:
    """Judge an answer, beside the trace of the program in its prompt."""
    program, words = Program.from_prompt(prompt.split()), said.split()
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
    return Answer(
        right=words == trace, words=len(words), words_right=words_right, matches=sum(matches),
        final=_last_values(program, words) == steps[-1].values, ending=_ending(words, len(program.lines) * options.step),
        told=[] if program.tell is None else list(_told(words, program.tell, options.step)), reads=reads,
    )  # fmt: skip


def _last_values(program: Program, words: Sequence[str]) -> tuple[int, ...]:
    """The value that each register was last said to have, from the prompt on."""
    values = list(program.values)
    for name, value in itertools.pairwise(words):
        if name[0] == "v" and value.isdigit() and int(name[1:]) < len(values):
            values[int(name[1:])] = int(value)
    return tuple(values)


def _ending(words: Sequence[str], stretch: int) -> str:
    """How an answer ends; `stretch`: words of as many steps as the program has lines."""
    if words[-1] == "end":
        return "ended"
    text, end = f" {' '.join(words)} ", f" {' '.join(words[-stretch:])} "
    return "looped" if end in text[:-1] else "cut"


def _told(words: Sequence[str], register: int, length: int) -> Iterator[Judgement]:
    """Whether each step obeys; `length`: words of a right step."""
    start, obeys = 0, re.compile(rf" v{register} \d(?: v\d \d){{3}} (?:L\d+|end)$")
    for end, (before, word) in enumerate(itertools.pairwise(words), 2):
        if (before.isdigit() and (word[0] == "L" or word == "end")) or end - start == 2 * length:
            yield end, bool(obeys.search(" ".join(["", *words[start:end]])))
            start = end


def figures(lines: Sequence[dict[str, Any]], options: TraceOptions) -> dict[str, Any]:
    """All figures but bytes.

    Args:
        lines: of the trace file, one per answer, program by program: `prompt` and `said`, in words, and `held`: the share of
            what the first wrong word follows from that was cached then.
        options: of the cell.
    """
    answers = [judged(line["prompt"], line["said"], options) for line in lines]
    right, words = sum(a.right for a in answers), sum(a.words for a in answers)
    held = [line["held"] for line in lines if line["held"] is not None]
    result: dict[str, Any] = {
        "questions": len(answers), "right": right, "accuracy": right / len(answers),
        "outcomes": "".join("01"[a.right] for a in answers), "words": words, "words_right": [a.words_right for a in answers],
        "reads": _by_distance([a.reads for a in answers], options), "tokens_read": len(answers) * options.prompt + words,
    }  # fmt: skip
    if options.teacher:
        return result | {"word_accuracy": sum(a.matches for a in answers) / words}
    endings = [a.ending for a in answers]
    return result | {
        "final": sum(a.final for a in answers), "endings": {name: endings.count(name) for name in ("ended", "looped", "cut")},
        **({"told": _by_distance([a.told for a in answers], options)} if options.tell else {}),
        **({"held": sum(held) / len(held)} if held else {}),
        **({"pass_at": list(_pass_at(result["outcomes"], options.samples))} if options.samples > 1 else {}),
    }  # fmt: skip


def _by_distance(judgements: Sequence[Sequence[Judgement]], options: TraceOptions) -> list[dict[str, int]]:
    """What is right in each bucket of distances that has any."""
    distances, right = (np.array(x) for x in zip(*itertools.chain(*judgements), (0, False), strict=True))
    found = []
    for start, stop in buckets(options.prompt + options.limit + 1):
        inside = (distances[:-1] >= start) & (distances[:-1] < stop)
        if inside.any():
            found.append({"from": start, "to": stop, "count": int(inside.sum()), "right": int(right[:-1][inside].sum())})
    return found


def _pass_at(outcomes: str, samples: int) -> Iterator[dict[str, Any]]:
    """pass@k for k above 1, with intervals over programs."""
    right = np.array([outcomes[start : start + samples].count("1") for start in range(0, len(outcomes), samples)], np.float64)
    for k in pass_sizes(samples)[1:]:
        shares = pass_at(right, samples, k)
        ends = clustered_share(shares, np.ones(len(shares))) if len(shares) >= MIN_BLOCKS else None
        yield {"k": k, "share": float(shares.mean())} | ({} if ends is None else {"low": ends[0], "high": ends[1]})
