"""Running of programs by a model under a policy, many side by side, or reading of their right traces.

Axis letters: B answers side by side, N tokens of a prompt, T words of a trace, V vocabulary.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.harness.data.register_machine import Program
from kvbench.harness.engine.decoder import Decoder
from kvbench.harness.engine.sampling import Sampler
from kvbench.harness.tasks.task import Job, MeasurementError
from kvbench.harness.tasks.trace.programs import TraceData, figures, sources
from kvbench.harness.tasks.trace.trace_options import TraceMetrics, TraceOptions

Said = tuple[list[int], float | None]  # an answer's tokens, and its `held` in the trace file


def measure(options: TraceOptions, job: Job) -> TraceMetrics:
    """Get one or more answers for each program, and write one line of JSON per answer to the trace file.

    Raises:
        MeasurementError: logits are not finite.
    """
    data: TraceData = job.data
    at_once, lines, sizes = options.side_by_side or options.answers, [], {"kv_bytes": 0, "state_bytes": 0}
    with job.trace.open("w", encoding="utf-8") as trace:
        for start in range(0, options.answers, at_once):
            numbers = range(start, min(start + at_once, options.answers))
            answers, decoder, streams = (_predict if options.teacher else _write)(options, job, numbers)
            for number, (tokens, held) in zip(numbers, answers, strict=True):
                program, sample = divmod(number, options.samples)
                prompt = data.words(data.prompts[program, data.prefix :].tolist())
                words = {"prompt": " ".join(prompt), "said": " ".join(data.words(tokens)), "held": held}
                lines.append({"program": program, "sample": sample, **words})
                trace.write(json.dumps(lines[-1]) + "\n")
            sizes = {name: max(size, getattr(decoder, name) // streams) for name, size in sizes.items()}
            job.progress(data.tokens * len(lines) // options.answers, f"{len(lines):,} of {options.answers:,} answers")
    return TraceMetrics.from_json(figures(lines, options) | sizes)


def _opened(options: TraceOptions, job: Job, numbers: Sequence[int]) -> tuple[Decoder, Tensor]:
    """Return a decoder that has read the prompts of some answers, and the logits after the prompts. [B, V]."""
    prompts = torch.from_numpy(job.data.prompts[[number // options.samples for number in numbers]]).to(job.model.device)
    decoder = job.decoder(len(numbers))
    return decoder, decoder.read_prompt(prompts, job.block)


def _write(options: TraceOptions, job: Job, numbers: Sequence[int]) -> tuple[list[Said], Decoder, int]:
    """Write answers word by word. Return the answers, the final decoder, and the number of its streams."""
    data: TraceData = job.data
    end = data.tokenizer.convert_tokens_to_ids("end")
    traces = [data.traces[number // options.samples].tolist() for number in numbers]
    answers: list[list[int]] = [[] for _ in numbers]
    held: dict[int, float | None] = {}  # `held` of each answer with a wrong word
    rows = list(range(len(numbers)))  # answer of each stream
    decoder, logits = _opened(options, job, numbers)
    choose = Sampler([_seed(options, number) for number in numbers], options.temperature, options.top_p)
    for place in range(options.limit):
        tokens = choose(_finite(logits), rows)
        for stream, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            if answers[row][-1:] == [end]:
                continue
            answers[row].append(token)
            if row not in held and token != traces[row][place]:
                held[row] = decoder.fork([stream]).held(_sources(data, numbers[row] // options.samples, place))
        unfinished = [stream for stream, row in enumerate(rows) if answers[row][-1] != end]
        if not unfinished:
            break
        if 2 * len(unfinished) <= len(rows):  # drop the finished streams
            decoder, rows, tokens = decoder.fork(unfinished), [rows[stream] for stream in unfinished], tokens[unfinished]
        logits = decoder(tokens[:, None])[:, -1]
    return [(words, held.get(row)) for row, words in enumerate(answers)], decoder, len(rows)


def _predict(options: TraceOptions, job: Job, numbers: Sequence[int]) -> tuple[list[Said], Decoder, int]:
    """Read right traces in blocks. Return the likeliest word at each place, the final decoder, and the number of its streams."""
    traces = [torch.from_numpy(job.data.traces[number]) for number in numbers]
    decoder, logits = _opened(options, job, numbers)
    ids = torch.nn.utils.rnn.pad_sequence(traces, batch_first=True).to(job.model.device)  # padding is dropped below
    parts = [_finite(logits)[:, None].argmax(-1)]
    parts += [_finite(decoder(block)).argmax(-1) for block in ids[:, :-1].split(job.block, 1)]
    likeliest = torch.cat(parts, 1).tolist()  # [B, T]
    return [(words[: len(trace)], None) for words, trace in zip(likeliest, traces, strict=True)], decoder, len(numbers)


def _seed(options: TraceOptions, number: int) -> int:
    """Return the seed of an answer's words, which depends only on the numbers of the program and the sample."""
    program, sample = divmod(number, options.samples)
    return random.Random(f"{options.sample_seed}/{program}/{sample}").getrandbits(63)


def _sources(data: TraceData, program: int, place: int) -> list[int]:
    """Return the positions in the stream of the sources of a right trace's word."""
    words = data.words(data.prompts[program, data.prefix :].tolist())
    return [data.prefix + source for source in list(sources(Program.from_prompt(words)))[place]]


def _finite(logits: Tensor) -> Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise MeasurementError("logits are not finite")
    return logits
