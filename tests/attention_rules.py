"""Rules of the literature that score by attention, in plain lists and floats, written from the papers and their authors' code.

Each returns the worth of the positions that every KV head holds, oldest first.
"""

from __future__ import annotations

from math import exp, inf, sqrt

from attention_walk import Past, Rule


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
