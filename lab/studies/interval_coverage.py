"""Coverage of 95 % intervals: the share of simulations whose interval contains the true mean. Takes 15 minutes on one core.

`python -m kvbench.lab.studies.interval_coverage` prints the tables of docs/statistics.md. Every process has mean 0. It simulates
the sums over runs of `RUN` tokens that records keep. A table cell is `95.3 (1.09)`: percent of intervals that contain the mean,
and their median width relative to an interval that knows the variance of the mean; `-` if no interval is shown.

Shapes: [R, n] for R repetitions of n runs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.intervals import (
    MIN_BLOCK_TOKENS,
    MIN_BLOCKS,
    Interval,
    clustered,
    clustered_share,
    interval,
    look_lengths,
    wilson,
)
from kvbench.harness.records import Record, RecordStore
from kvbench.harness.records.metrics import NllMetrics
from kvbench.harness.report.pairing import question
from kvbench.lab.studies import RESULTS, interval_methods

Array = NDArray[np.float64]
Method = Callable[[Array, Array, int, int], Interval]
Process = Callable[[np.random.Generator, int, int], Array]  # (draw, R, n) -> [R, n]

RUN = 32  # tokens
STREAMS = (20, 40, 100)
QUESTIONS = (5, 10, 20, 50)  # of a stream
CORRELATIONS = (0, 0.05, 0.1, 0.2)  # of two answers of one stream
SHARES = (0.03, 0.05, 0.2, 0.5, 0.8, 0.95, 0.97)
LEVELS = (0.05, 0.0011, 9e-5)  # of one pair; of the first of 45, by Holm; of the first of 561
LIMIT = 2**19  # tokens of a text that is read until its interval is narrow
CAPACITIES = {12_288: 128, 32_000: 128, 65_536: 128, 100_000: 1_024}  # {tokens of the text: capacity}


def white(draw: np.random.Generator, repetitions: int, runs: int) -> Array:
    """Independent normal tokens."""
    return draw.normal(size=(repetitions, runs)) * math.sqrt(RUN)


def heavy(draw: np.random.Generator, repetitions: int, runs: int) -> Array:
    """Independent tokens from Student's t with 3 degrees of freedom, the smallest integer with a finite variance."""
    return np.stack([draw.standard_t(3, size=(runs, RUN)).sum(1) for _ in range(repetitions)])


def autoregressive(draw: np.random.Generator, repetitions: int, runs: int, a: float) -> Array:
    """Tokens x[i] = a x[i-1] + noise, of variance 1: a run's sum and last token, exactly, from the last token before it."""
    powers = a ** np.arange(RUN)
    to_sum, to_last = np.cumsum(powers)[::-1], powers[::-1]  # the weight of each token's noise
    lower = np.linalg.cholesky(np.array([[to_sum @ to_sum, to_sum @ to_last], [to_sum @ to_last, to_last @ to_last]]))
    last, sums = draw.normal(size=repetitions) / math.sqrt(1 - a * a), np.empty((repetitions, runs))
    for i in range(runs):
        noise = lower @ draw.normal(size=(2, repetitions))
        sums[:, i] = a * powers.sum() * last + noise[0]
        last = a**RUN * last + noise[1]
    return sums * math.sqrt(1 - a * a)


def slow(draw: np.random.Generator, repetitions: int, runs: int, memory: int) -> Array:
    """White noise, plus a component of a tenth of its size with a correlation length of `memory` tokens."""
    return white(draw, repetitions, runs) + 0.1 * autoregressive(draw, repetitions, runs, math.exp(-1 / memory))


def bursts(draw: np.random.Generator, repetitions: int, runs: int, gap: int, length: int) -> Array:
    """White noise, plus bursts like those of a forgotten fact: about `length` tokens long, `gap` apart and 2 nats high."""
    level = np.stack([_level(draw, runs * RUN, gap, length).reshape(runs, RUN).sum(1) for _ in range(repetitions)])
    return level - 2 * length / (length + gap) * RUN + white(draw, repetitions, runs)


def _level(draw: np.random.Generator, tokens: int, gap: int, length: int) -> Array:
    """The height of the burst that each token is in, or 0. [tokens]."""
    steps = np.zeros(tokens + 1)
    at, inside = 0, draw.random() < length / (length + gap)
    while at < tokens:
        end = min(at + int(draw.geometric(1 / (length if inside else gap))), tokens)
        if inside:
            height = 2 * draw.exponential()
            steps[at] += height
            steps[end] -= height
        at, inside = end, not inside
    return np.cumsum(steps[:-1])


def resampled(draw: np.random.Generator, repetitions: int, runs: int, recorded: Array, stretch: int) -> Array:
    """Random concatenations of stretches of recorded runs; a stretch of 1 is a single run."""
    starts = draw.integers(len(recorded), size=(repetitions, -(-runs // stretch), 1))
    places = (starts + np.arange(stretch)) % len(recorded)
    return recorded[places.reshape(repetitions, -1)[:, :runs]]


PROCESSES: dict[str, Process] = {
    "white": white,
    "white, t3": heavy,
    **{f"AR {a}": partial(autoregressive, a=a) for a in (0.3, 0.9, 0.98, 0.99)},
    "bursts of 64 tokens, 600 apart": partial(bursts, gap=600, length=64),
    "bursts of 100 tokens, 2,000 apart": partial(bursts, gap=2000, length=100),
    "slow component, memory 256": partial(slow, memory=256),
    "slow component, memory 1,000": partial(slow, memory=1000),
}


def recorded_differences(folder: Path) -> Iterator[tuple[int, Array]]:
    """Yield tokens per run and each run's deviation from the expected difference [n], for every pair of comparable records."""
    records, _ = RecordStore(folder).read_all()
    having = [r for r in records if r.measured(NllMetrics)]
    seen = set()
    for a, b in combinations(having, 2):
        if question(a) == question(b) and a.cell.capacity == b.cell.capacity:
            size, off = _deviations(a, b)
            if off.any() and (shape := (size, round(float(np.abs(off).sum()), 1))) not in seen:  # skip equal runs of one cell
                seen.add(shape)
                yield size, off


def _deviations(a: Record, b: Record) -> tuple[int, Array]:
    assert isinstance(a.metrics, NllMetrics)
    assert isinstance(b.metrics, NllMetrics)
    x, y = a.metrics.blocks, b.metrics.blocks
    if x.tokens != y.tokens:
        return 0, np.zeros(0)
    full = np.arange(len(x.tokens)) * x.size > (a.cell.capacity or 0)
    off, tokens = (np.array(x.nll_sum) - np.array(y.nll_sum))[full], np.array(x.tokens)[full]
    return x.size, off - off.sum() / tokens.sum() * tokens


def coverage(series: Array, method: Method, size: int = RUN, capacity: int = 128) -> tuple[float, float, float]:
    """Percent of shown intervals that contain 0; percent shown; their median width relative to the oracle's."""
    tokens = np.full(series.shape[1], float(size))
    found = [method(x, tokens, size, capacity) for x in series]
    ends = np.array([(i.low, i.high) for i in found if i.low is not None]).reshape(-1, 2)
    if not len(ends):
        return math.nan, 0.0, math.nan
    oracle = 2 * 1.96 * float((series.sum(1) / tokens.sum()).std())
    held = (ends[:, 0] <= 0) & (ends[:, 1] >= 0)
    return 100 * held.mean(), 100 * len(ends) / len(found), float(np.median(ends[:, 1] - ends[:, 0])) / oracle


def coverage_of_looks(series: Array, looks: list[int], planned: int, capacity: int = 128) -> tuple[float, float]:
    """Return two percentages of coverage, for one stopping rule and for all looks at once.

    The first is the percentage of intervals that contain 0 if reading stops at half the median width of the first look. The
    second is the percentage of texts in which the intervals of all looks contain 0. It applies to a reader who may stop at any
    look.

    Args:
        series: sums over runs of whole texts. [R, n].
        looks: tokens read at each look.
        planned: number of looks for which intervals are corrected; 1 for no correction.
        capacity: capacity of the cache in tokens.
    """
    found = [[interval(x[: n // RUN], np.full(n // RUN, float(RUN)), RUN, capacity, planned) for n in looks] for x in series]
    ends = np.array([[(i.low, i.high) for i in text] for text in found])  # [R, looks, 2]
    held, widths = (ends[..., 0] <= 0) & (ends[..., 1] >= 0), ends[..., 1] - ends[..., 0]
    narrow = widths <= np.median(widths[:, 0]) / 2
    narrow[:, -1] = True
    return 100 * held[np.arange(len(held)), narrow.argmax(1)].mean(), 100 * held.all(1).mean()


def _cell(covered: float, shown: float, width: float) -> str:
    if not shown:
        return "-"
    return f"{covered:.1f} ({width:.2f})" + (f", shown {shown:.0f} %" if shown < 100 else "")


def _print(title: str, head: list[str], rows: Iterator[list[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|---|{'---:|' * (len(head) - 1)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def _by_length(method: Method, repetitions: int, seed: int) -> Iterator[list[str]]:
    for name, process in PROCESSES.items():
        cells = []
        for tokens, capacity in CAPACITIES.items():
            series = process(np.random.default_rng(seed), repetitions, tokens // RUN)
            cells.append(_cell(*coverage(series, method, RUN, capacity)))
        yield [name, *cells]


def _of_records(folder: Path, repetitions: int, seed: int) -> Iterator[list[str]]:
    pairs, before = list(recorded_differences(folder)), interval_methods.percentile_bootstrap
    yield _over_pairs("shuffled", pairs, interval, None, 1, repetitions, seed)
    yield _over_pairs("stretches of 2,048 tokens", pairs, interval, None, 2048, repetitions, seed)
    for tokens in (32_000, 65_536):
        yield _over_pairs("shuffled", pairs, interval, tokens, 1, repetitions, seed)
        yield _over_pairs("stretches of 2,048 tokens", pairs, interval, tokens, 2048, repetitions, seed)
    yield _over_pairs("stretches of 8,192 tokens", pairs, interval, 65_536, 8192, repetitions, seed)
    yield _over_pairs("the method before: shuffled", pairs, before, 32_000, 1, repetitions, seed)
    yield _over_pairs("the method before: stretches of 2,048 tokens", pairs, before, 32_000, 2048, repetitions, seed)


def _over_pairs(
    name: str, pairs: list[tuple[int, Array]], method: Method, tokens: int | None, stretch: int, repetitions: int, seed: int
) -> list[str]:
    """Coverage over all pairs that are long enough, for texts of `tokens` (or the records' length) made of such stretches."""
    found = []
    for size, off in pairs:
        length = tokens or len(off) * size
        if len(off) * size >= length:
            series = resampled(np.random.default_rng(seed), repetitions, length // size, off, max(stretch // size, 1))
            found.append(coverage(series, method, size)[0])
    shown = [x for x in found if not math.isnan(x)]
    low, middle = np.quantile(shown, [0.1, 0.5])
    return [
        name,
        f"{tokens:,}" if tokens else "as recorded",
        str(len(shown)),
        f"{middle:.1f}",
        f"{low:.1f}",
        f"{min(shown):.1f}",
        str(sum(x < 93 for x in shown)),
    ]


def _of_texts(repetitions: int, seed: int) -> Iterator[list[str]]:
    kinds: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
        "normal": lambda draw, shape: draw.normal(size=shape),
        "exponential": lambda draw, shape: draw.exponential(size=shape) - 1,
        "log-normal": lambda draw, shape: draw.lognormal(size=shape) - math.exp(0.5),
    }
    for name, kind in kinds.items():
        cells = []
        for count in (20, 40, 100):
            draw = np.random.default_rng(seed)
            lengths = 1000 * draw.lognormal(sigma=0.5, size=(repetitions, count))  # tokens
            sums = kind(draw, (repetitions, count)) * lengths
            found = [clustered(x, n) for x, n in zip(sums, lengths, strict=True)]
            oracle = 2 * 1.96 * np.std([i.mean for i in found])
            width = np.median([(i.high or 0) - (i.low or 0) for i in found])
            held = np.mean([(i.low or 0) <= 0 <= (i.high or 0) for i in found])
            cells.append(f"{100 * held:.1f} ({width / oracle:.2f})")
        yield [name, *cells]


def clusters(
    draw: np.random.Generator, repetitions: int, streams: int, questions: int, share: float, correlation: float
) -> Array:
    """Right answers of each stream; answers of one stream are correlated (beta-binomial). [R, streams]."""
    if correlation == 0:
        return draw.binomial(questions, share, size=(repetitions, streams)).astype(float)
    rest = (1 - correlation) / correlation
    shares = draw.beta(share * rest, (1 - share) * rest, size=(repetitions, streams))
    return draw.binomial(questions, shares).astype(float)


def coverage_of_shares(right: Array, questions: int, share: float, by_question: bool = False) -> float:
    """Percent of intervals that contain the share, over streams or as if questions were independent."""
    asked = np.full(right.shape[1], float(questions))
    ends = [wilson(int(x.sum()), int(asked.sum())) if by_question else clustered_share(x, asked) for x in right]
    return 100 * float(np.mean([found is not None and found[0] <= share <= found[1] for found in ends]))


def _of_shares(repetitions: int, seed: int) -> Iterator[list[str]]:
    for correlation in CORRELATIONS:
        cells = []
        for streams in STREAMS:
            made = [
                (clusters(np.random.default_rng(seed), repetitions, streams, n, share, correlation), n, share)
                for n in QUESTIONS
                for share in SHARES
            ]
            ours, theirs = ([coverage_of_shares(*one, by_question) for one in made] for by_question in (False, True))
            cells.append(f"{min(ours):.1f}, {np.mean(ours):.1f} ({min(theirs):.1f}, {np.mean(theirs):.1f})")
        yield [f"{correlation:g}", *cells]


def _of_tails(draws: int, seed: int) -> Iterator[list[str]]:
    tokens = np.full(MIN_BLOCKS, float(MIN_BLOCK_TOKENS))
    methods: dict[str, Callable[[Array], Interval]] = {
        "blocks of a text": lambda sums: interval(sums, tokens, MIN_BLOCK_TOKENS, 0),
        "texts": lambda sums: clustered(sums, tokens),
    }
    for units, method in methods.items():
        for kind in ("normal", "laplace"):
            values = getattr(np.random.default_rng(seed), kind)(size=(draws, MIN_BLOCKS))
            p = np.array([method(x).p for x in values], float)
            yield [f"{MIN_BLOCKS} {units}, {kind}", *(f"{np.mean(p < level) / level:.2f}" for level in LEVELS)]


def _of_methods(repetitions: int, seed: int) -> Iterator[list[str]]:
    names = ("white", "AR 0.99", "bursts of 64 tokens, 600 apart", "slow component, memory 1,000")
    series = [PROCESSES[name](np.random.default_rng(seed), repetitions, 32_000 // RUN) for name in names]
    for name, method in interval_methods.TRIED.items():
        yield [name, *(_cell(*coverage(x, method)) for x in series)]


def _of_looks(repetitions: int, seed: int) -> Iterator[list[str]]:
    looks = look_lengths(LIMIT, 128)
    for name in ("white", "AR 0.99", "bursts of 64 tokens, 600 apart", "slow component, memory 1,000"):
        series = PROCESSES[name](np.random.default_rng(seed), repetitions, LIMIT // RUN)
        (stop, whenever), (stop_alone, whenever_alone) = (coverage_of_looks(series, looks, n) for n in (len(looks), 1))
        yield [name, *(f"{x:.1f}" for x in (stop, stop_alone, whenever, whenever_alone))]


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repetitions", type=int, default=2000, help="of a cell; of the bootstraps and of each pair of records, a quarter"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path, default=RESULTS)
    asked = parser.parse_args()
    few, error = asked.repetitions // 4, 1.96 * math.sqrt(95 * 5 / asked.repetitions)
    print(f"`{' '.join(['python', *sys.argv])}`: {asked.repetitions:,} repetitions; a coverage of 95 is known to ±{error:.1f}")
    lengths = ["tokens, capacity", *(f"{tokens:,}, {capacity:,}" for tokens, capacity in CAPACITIES.items())]
    _print("Processes:", lengths, _by_length(interval, asked.repetitions, asked.seed))
    title = "Books of unequal length (standard deviation of the logarithm 0.5), by their number:"
    _print(title, ["values of a book", "20", "40", "100"], _of_texts(asked.repetitions, asked.seed))
    title = "Right answers in streams of 5 to 50 questions, shares of 3 to 97 %: lowest, mean (Wilson over questions):"
    _print(title, ["correlation", *(f"{n} streams" for n in STREAMS)], _of_shares(few, asked.seed))
    head = ["blocks", *(f"p < {level:g}" for level in LEVELS)]
    title = "How often p is below a level, over the level, if nothing differs:"
    _print(title, head, _of_tails(200 * asked.repetitions, asked.seed))
    head = ["recorded differences", "tokens", "pairs", "median", "lowest tenth", "lowest", "below 93"]
    _print(
        "Differences between recorded runs, drawn again; coverage over pairs:", head, _of_records(asked.records, few, asked.seed)
    )
    head = [
        f"looks at {', '.join(f'{n:,}' for n in look_lengths(LIMIT, 128))} tokens",
        "stops when narrow",
        "uncorrected",
        "stops when it suits",
        "uncorrected",
    ]
    _print("Texts that are read until their interval is narrow, capacity 128:", head, _of_looks(few, asked.seed))
    tried = ["method", "white", "AR 0.99", "bursts, 600 apart", "slow, memory 1,000"]
    _print("What was tried, at 32,000 tokens and capacity 128:", tried, _of_methods(few, asked.seed))
    title = "The method before, which chose its blocks by the data, and whether to show an interval:"
    _print(title, lengths, _by_length(interval_methods.percentile_bootstrap, few, asked.seed))


if __name__ == "__main__":
    main()
