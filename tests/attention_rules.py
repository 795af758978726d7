"""Rules of the literature that score by attention, in plain lists and floats, written from the papers and their authors' code.

Each returns the worth of the positions that every KV head holds, oldest first. Policies and rules both go through a step-by-step
eviction: attention over what is left of a dense pass. Logits at positions of the stream depend on query and key alone, so they
are those of the dense pass.

Axis letters: B streams, H KV heads, G query heads of a KV head, N tokens of the stream, S slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, inf, sqrt

import torch
from prompt_views import Seen, rotation_of
from torch import Tensor

from kvbench.harness.engine.model import Model
from kvbench.policies import Attention, CacheView, HeadSizes, Policy, Written


@dataclass
class Past:
    """Inputs of a published rule in a layer of one stream, as plain lists. Lists over KV heads come first.

    Attributes:
        held: positions that each KV head holds, oldest first. [H][...]
        logits: logits of each query head at each step, for the positions held at that step. [H][step][G][position]
        weights: softmax of `logits`.
        keys: keys rotated to their positions in the stream. [H][N][D]
        ids: token ids. [N]
        uniform: random number of every head and position. [H][N]
        prompt: number of tokens of the prompt.
    """

    keys: list[list[list[float]]]
    ids: list[int]
    uniform: list[list[float]]
    prompt: int
    held: list[list[int]] = field(default_factory=list)
    logits: list[list[list[dict[int, float]]]] = field(default_factory=list)
    weights: list[list[list[dict[int, float]]]] = field(default_factory=list)

    @property
    def now(self) -> int:
        """The newest token's position."""
        return len(self.weights[0]) - 1

    def sums(self, head: int, step: int) -> dict[int, float]:
        """Attention of the query group at a step."""
        group = self.weights[head][step]
        return {p: sum(query[p] for query in group) for p in group[0]}


Rule = Callable[[Past], list[list[float]]]  # worth of the positions held, by KV head


def lists_of(model: Model, layer: int, seen: Seen, tokens: Tensor, prompt: int, seed: int) -> list[Past]:
    """The pasts of a layer's streams before the first token."""
    heads, length = seen.keys.shape[1:3]
    at = torch.arange(length)
    rotated = rotation_of(model, layer)(seen.keys, at.expand(seen.keys.shape[:-1]))
    view = _view(seen, tokens, prompt, layer, seed, model)
    view.position = at.expand(seen.keys.shape[:-1])
    uniform = view.uniform().tolist()
    nothing = [[] for _ in range(heads)], [[] for _ in range(heads)], [[] for _ in range(heads)]
    return [
        Past(rotated[b].tolist(), tokens[b].tolist(), uniform[b], prompt, *([list(x) for x in part] for part in nothing))
        for b in range(len(tokens))
    ]


def walk_lists(pasts: list[Past], seen: Seen, rule: Rule, capacity: int, first: int = 0) -> None:
    """Read all tokens, keep at most `capacity` from step `first` on. Changes the pasts."""
    for b, past in enumerate(pasts):
        logits = seen.logits[b].tolist()
        for t in range(len(past.ids)):
            for head, held in enumerate(past.held):
                held.append(t)
                rows = [{p: query[t][p] for p in held} for query in logits[head]]
                past.logits[head].append(rows)
                past.weights[head].append([_softmax(row) for row in rows])
            if t >= first and len(past.held[0]) > capacity:
                past.held = best(past, rule, capacity)


def best(past: Past, rule: Rule, budget: int) -> list[list[int]]:
    """The positions of highest (worth, rank), in order."""
    return [
        sorted(held[i] for i in sorted(range(len(held)), key=lambda i: (worth[i], i))[max(0, len(held) - budget) :])
        for held, worth in zip(past.held, rule(past), strict=True)
    ]


def walk_policy(
    model: Model, layer: int, seen: Seen, tokens: Tensor, policy: Policy, capacity: int, prompt: int = 0, seed: int = 0
) -> list[list[list[int]]]:
    """The positions that each KV head holds at the end, if the policy evicts at every step. Slots are used in a random order."""
    draw = torch.Generator().manual_seed(seed)
    view = _view(seen, tokens, prompt, layer, seed, model, capacity + 1)
    (streams, heads, length), slots = seen.keys.shape[:3], capacity + 1
    order = torch.stack([torch.randperm(slots, generator=draw) for _ in range(streams * heads)]).view(streams, heads, slots)
    sizes = HeadSizes(seen.queries.shape[2], seen.keys.shape[-1], seen.values.shape[-1])
    view.states = {s: torch.full((streams, heads, slots, *s.shape(sizes)), 7.0) for s in policy.statistics}
    free = order[..., :1]
    for t in range(length):
        _write(view, seen, tokens, free, t)
        logits = seen.logits[:, :, :, t].gather(-1, view.position.clamp(min=0)[:, :, None].expand(-1, -1, sizes.group, -1))
        logits = logits.masked_fill(~view.valid[:, :, None], -torch.inf)
        step = Attention(weights=logits.softmax(-1), logits=logits, queries=seen.queries[:, :, :, t])
        view.states = {s: s.update(x, step, view) if s.sees else x for s, x in view.states.items()}
        free = order[..., t + 1 : t + 2] if t < capacity else _evict(policy, view)
    return [
        [sorted(p for p, r in zip(*head, strict=True) if r < slots) for head in zip(*of_stream, strict=True)]
        for of_stream in zip(view.position.tolist(), view.rank.tolist(), strict=True)
    ]


def _view(seen: Seen, tokens: Tensor, prompt: int, layer: int, seed: int, model: Model, slots: int = 0) -> CacheView:
    """A cache of empty slots with garbage in them."""
    streams, heads, _, dim = seen.keys.shape
    empty, one = torch.full((streams, heads, slots), slots), torch.ones(streams, 1, 1, dtype=torch.int64)
    keys = torch.full((streams, heads, slots, dim), 1e4)
    return CacheView(
        empty,
        torch.full_like(empty, -1),
        one * 0,
        keys,
        keys.clone(),
        {},
        one * layer,
        torch.arange(heads)[:, None],
        one * prompt,
        len(model.layers),
        seed,
        rotation_of(model, layer),
    )


def _write(view: CacheView, seen: Seen, tokens: Tensor, free: Tensor, t: int) -> None:
    """Put token t into the free slots. free: [B, H, 1]."""
    view.step, view.rank = torch.full_like(view.step, t), view.rank.scatter(-1, free, view.count)
    view.position = view.position.scatter(-1, free, t)
    index = free[..., None].expand(-1, -1, -1, view.keys.shape[-1])
    view.keys = view.keys.scatter(2, index, seen.keys[:, :, t : t + 1])
    view.values = view.values.scatter(2, index, seen.values[:, :, t : t + 1])
    ids = tokens[:, None, t].expand(seen.keys.shape[:2])
    written = Written(seen.keys[:, :, t], seen.values[:, :, t], torch.full_like(ids, t), ids, view.rotate)
    for s, state in view.states.items():
        value = s.written(written)
        for b, h in torch.cartesian_prod(*(torch.arange(n) for n in free.shape[:2])).tolist():
            state[b, h, free[b, h, 0]] = s.initial if value is None else value[b, h]


def _evict(policy: Policy, view: CacheView) -> Tensor:
    """Empty the slot of lowest (importance, rank) of each head. [B, H, 1]."""
    importance = policy.importance(view)
    lowest = importance == importance.amin(-1, keepdim=True)
    victim = view.rank.masked_fill(~lowest, view.rank.shape[-1]).argmin(-1, keepdim=True)
    place = view.rank.gather(-1, victim)
    view.rank = (view.rank - (view.rank > place).long()).scatter(-1, victim, view.rank.shape[-1])
    return victim


def _softmax(row: dict[int, float]) -> dict[int, float]:
    top = max(row.values())
    total = sum(exp(x - top) for x in row.values())
    return {p: exp(x - top) / total for p, x in row.items()}


def tova(force_last: bool) -> Rule:
    def rule(past: Past):
        heads = range(len(past.held))
        queries = [query for h in heads for query in past.weights[h][past.now]]
        mean = {p: sum(query[p] for query in queries) / len(queries) for p in past.held[0]}
        return [[inf if force_last and p == past.now else mean[p] for p in past.held[h]] for h in heads]

    return rule


def snapkv(window: int, kernel: int, pool: str, group: str) -> Rule:
    def rule(past: Past):
        out = []
        for h, held in enumerate(past.held):
            steps = [t for t in range(past.now - window + 1, past.now + 1) if t >= 0]
            older = [p for p in held if p <= past.now - window]
            by_query_head = [
                [sum(past.weights[h][t][g][p] for t in steps) for p in older] for g in range(len(past.weights[h][past.now]))
            ]
            reduce = sum if group == "sum" else max
            scores = [reduce(column) for column in zip(*by_query_head, strict=True)]
            near = [scores[max(0, i - kernel // 2) : i + kernel // 2 + 1] for i in range(len(scores))]
            pooled = [sum(x) / kernel if pool == "avg" else max(x) for x in near]
            out.append(pooled + [inf] * (len(held) - len(older)))
        return out

    return rule


def kvpress_snapkv(window: int, kernel: int) -> Rule:
    """Mean over the window, average pooling of each query head, then the mean over the group."""

    def rule(past: Past):
        out = []
        for h, held in enumerate(past.held):
            older = [p for p in held if p <= past.now - window]
            heads = []
            for g in range(len(past.weights[h][past.now])):
                mean = [sum(past.weights[h][past.now - i][g][p] for i in range(window)) / window for p in older]
                padded = [0.0] * (kernel // 2) + mean + [0.0] * (kernel // 2)
                heads.append([sum(padded[i : i + kernel]) / kernel for i in range(len(mean))])
            mean = [sum(x) / len(x) for x in zip(*heads, strict=True)]
            out.append(mean + [inf] * (len(held) - len(older)))
        return out

    return rule


def random_tokens(keep_prompt: bool, sinks: int, window: int) -> Rule:
    def worth(past: Past, h: int, p: int):
        if p < sinks or p > past.now - window:
            return (2, 0.0)
        return (int(keep_prompt and p < past.prompt), past.uniform[h][p])

    return lambda past: [[worth(past, h, p) for p in held] for h, held in enumerate(past.held)]


def h2o(window: int, normalise: str) -> Rule:
    def rule(past: Past):
        out = []
        for h, held in enumerate(past.held):
            worth = []
            for p in held:
                received = sum(past.sums(h, t)[p] for t in range(p, past.now + 1))
                queries_that_saw_it = sum(p in past.weights[h][t][0] for t in range(past.now + 1))
                steps = past.now + 1 - max(p, past.prompt - 1)
                by = {"none": 1, "visible": queries_that_saw_it, "age": steps}[normalise]
                worth.append(inf if p > past.now - window else received / by)
            out.append(worth)
        return out

    return rule


def scissorhands(window: int, history: int, bucket_steps: int, threshold: float) -> Rule:
    """History: the steps since the start of the bucket that is `history / bucket_steps - 1` before that of now."""

    def rule(past: Past):
        start = (past.now // bucket_steps) * bucket_steps - history + bucket_steps
        out = []
        for h, held in enumerate(past.held):
            worth = []
            for p in held:
                low = 0
                for t in range(max(start, p), past.now + 1):
                    group = past.weights[h][t]
                    low += sum(q[p] for q in group) / len(group) < threshold / len(group[0])
                worth.append(inf if p > past.now - window else -low)
            out.append(worth)
        return out

    return rule


def roco(protected: int, window: int) -> Rule:
    def rule(past: Past):
        out = []
        for h, held in enumerate(past.held):
            mean, deviation = [], []
            for p in held:
                received = [past.sums(h, t)[p] for t in range(p, past.now + 1)]
                mean.append(sum(received) / len(received))
                square = sum(x * x for x in received) / len(received)
                deviation.append(inf if p > past.now - window else sqrt(max(0.0, square - mean[-1] ** 2)))
            most = sorted(range(len(held)), key=lambda i: (deviation[i], i))[len(held) - protected :] if protected else []
            out.append([inf if i in most else mean[i] for i in range(len(held))])
        return out

    return rule


def finch(window: int, delimiter: int | None) -> Rule:
    def rule(past: Past):
        out = []
        for h, held in enumerate(past.held):
            marks = [p for p in held if past.ids[p] == delimiter]
            start = marks[-1] if marks else -1
            question = [t for t in range(past.now - window + 1, past.now + 1) if t > start and t >= 0]
            kept = [p for p in range(past.now - window + 1, past.now + 1) if p >= start]
            worth = []
            for p in held:
                seen = [past.sums(h, t).get(p, 0.0) * (len(past.weights[h][t][0]) - 1) for t in question]
                worth.append(inf if p in kept else sum(seen))
            out.append(worth)
        return out

    return rule


def chunks(inner: Rule, length: int, as_kvpress: bool) -> Rule:
    def rule(past: Past):
        scores = inner(past)
        top = max(x for row in scores for x in row if x < inf) + 1
        total: dict[int, float] = {}
        for h, held in enumerate(past.held):
            for number in {p // length for p in held}:
                mine = [x for p, x in zip(held, scores[h], strict=True) if p // length == number]
                mine = [min(x, top) for x in mine] if as_kvpress else [x for x in mine if x < inf]
                total[number] = total.get(number, 0) + (sum(mine) / len(mine) if mine else 0)
        return [
            [inf if x == inf and not as_kvpress else total[p // length] for p, x in zip(held, scores[h], strict=True)]
            for h, held in enumerate(past.held)
        ]

    return rule


def rkv(window: int, kernel: int, mix: float, similar: float, keep_prompt: bool) -> Rule:
    def rule(past: Past):
        out = []
        for h, held in enumerate(past.held):
            older = [p for p in held if p <= past.now - window]
            attention = [0.0] * len(older)
            for t in range(past.now - window + 1, past.now + 1):
                logits = [max(query[p] for query in past.logits[h][t]) for p in older]
                shares = [exp(x - max(logits)) for x in logits]
                attention = [a + x / sum(shares) / window for a, x in zip(attention, shares, strict=True)]
            pooled = [max(attention[max(0, i - kernel // 2) : i + kernel // 2 + 1]) for i in range(len(older))]
            redundancy = _redundancy([past.keys[h][p] for p in held], similar)
            worth = [mix * a - (1 - mix) * r for a, r in zip(pooled, redundancy, strict=False)]
            ranked = [(int(keep_prompt and p < past.prompt), x) for p, x in zip(older, worth, strict=True)]
            out.append(ranked + [(2, inf)] * (len(held) - len(older)))
        return out

    return rule


def _redundancy(keys: list[list[float]], similar: float) -> list[float]:
    norms = [sqrt(sum(x * x for x in key)) + 1e-8 for key in keys]
    n = len(keys)
    cosine = [
        [0.0 if i == j else sum(a * b for a, b in zip(keys[i], keys[j], strict=True)) / (norms[i] * norms[j]) for j in range(n)]
        for i in range(n)
    ]
    for row in cosine:
        row[max((j for j in range(n) if row[j] > similar), default=0)] = 0.0
    mean = [sum(row[j] for row in cosine) / n for j in range(n)]
    shares = [exp(x - max(mean)) for x in mean]
    return [x / sum(shares) for x in shares]
