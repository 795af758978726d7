"""Requests through the decode loop, compared with lists, with dense and with other batches. Without lm-eval."""

import random
from functools import partial

import pytest
import torch
from factories import MODES, POLICIES, chooser
from helpers import DEVICE, H2O, CacheConfig, Dense, Random, RecomputeWindow, SinkWindow, adopt, model_of, tiny_model
from reference import ListBackend, MaskBackend

from kvbench.harness.engine.method import EAGER, FASTEST, TOKEN_BY_TOKEN
from kvbench.harness.engine.sampling import Sampler
from kvbench.harness.lm_eval.reading import RequestReader

CAPACITY = 9


def requests(count: int = 6, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Questions with three answers each; contexts and answers have different lengths."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        context = [draw.randrange(96) for _ in range(draw.randrange(1, 40))]
        made += [(context, [draw.randrange(96) for _ in range(draw.randrange(1, 8))]) for _ in range(3)]
    return made


def by_lists(policy, mode, context, continuation, first_eviction=0):
    """Score a continuation token by token over lists."""
    reference = ListBackend(model_of("llama"), chooser(policy, CAPACITY, 0), CAPACITY, mode, 12, first_eviction=first_eviction)
    logits = reference.run(torch.tensor([[*context, *continuation]], device=DEVICE))[0].double().log_softmax(-1)
    at = range(len(context) - 1, len(context) + len(continuation) - 1)
    total = sum(float(logits[t, token]) for t, token in zip(at, continuation, strict=True))
    return total, all(int(logits[t].argmax()) == token for t, token in zip(at, continuation, strict=True))


@pytest.mark.parametrize(
    ("policy", "mode", "prompt"),
    [(policy, mode, ("stream", "once")[(i + j) % 2]) for i, policy in enumerate(POLICIES) for j, mode in enumerate(MODES)],
    ids=str,
)  # every two of these occur together
def test_a_continuation_is_worth_what_lists_say(policy, mode, prompt):
    asked = requests(2)
    reader = RequestReader(model_of("llama"), CacheConfig(policy, CAPACITY, mode, 12), prompt, batch=4, block=40)
    for (context, continuation), found in zip(asked, reader.loglikelihoods(asked), strict=True):
        first = len(context) - 1 if prompt == "once" else 0
        total, greedy = by_lists(policy, mode, context, continuation, first)
        assert found.logprob == pytest.approx(total, abs=1e-3)
        assert found.greedy == greedy


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("prompt", ["stream", "once"])
def test_what_is_said_is_what_lists_say(policy, prompt):
    prompts = [context for context, _ in requests(4, 1)][::3]
    reader = RequestReader(model_of("llama"), CacheConfig(policy, CAPACITY), prompt, batch=3)
    for context, said in zip(prompts, reader.generate(prompts, 6, lambda ids: ids[-1] % 5 == 0), strict=True):
        first = len(context) - 1 if prompt == "once" else 0
        assert by_lists(policy, "cache", context, said, first)[1], "each token is the likeliest"
        assert len(said) == 6 or said[-1] % 5 == 0
        assert not any(token % 5 == 0 for token in said[:-1])


@pytest.mark.parametrize(
    ("policy", "prompt", "method"),
    [
        (policy, ("stream", "once")[(i + j) % 2], method)  # every two of these occur together
        for i, policy in enumerate([SinkWindow(sinks=2), H2O()])
        for j, method in enumerate([EAGER, FASTEST, TOKEN_BY_TOKEN])
    ],
    ids=lambda x: None if x in (EAGER, FASTEST, TOKEN_BY_TOKEN) else str(x),
)
def test_batch_and_block_change_nothing(policy, prompt, method):
    asked, config = requests(7, 2), CacheConfig(policy, CAPACITY)
    one = RequestReader(model_of("llama"), config, prompt, batch=1, block=10_000)
    many = RequestReader(model_of("llama"), config, prompt, batch=8, block=24, method=method)
    for a, b in zip(one.loglikelihoods(asked), many.loglikelihoods(asked), strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    prompts = [context for context, _ in asked]
    assert one.generate(prompts, 5, lambda ids: False) == many.generate(prompts, 5, lambda ids: False)
    assert one.sizes["kv_bytes"] == many.sizes["kv_bytes"] == model_of("llama").kv_bytes(CAPACITY)


@pytest.mark.parametrize(
    "config", [CacheConfig(SinkWindow(), 60), CacheConfig(H2O(), 60), CacheConfig(RecomputeWindow(), 60)], ids=str
)
def test_a_capacity_that_covers_every_request_is_dense_and_a_smaller_one_is_not(config):
    asked = requests(5, 3)
    dense = RequestReader(model_of("llama"), CacheConfig(Dense())).loglikelihoods(asked)
    for a, b in zip(dense, RequestReader(model_of("llama"), config).loglikelihoods(asked), strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    small = RequestReader(model_of("llama"), CacheConfig(config.policy, CAPACITY)).loglikelihoods(asked)
    for (context, continuation), a, b in zip(asked, dense, small, strict=True):
        fits = len(context) + len(continuation) - 1 <= CAPACITY + 1
        assert (abs(a.logprob - b.logprob) < 1e-3) == fits, (len(context), len(continuation))


def kept_of_a_cut_prompt(policy, context, continuation):
    """Return the positions held if the prompt is cut at its end and nothing is evicted later, by step, layer and head."""
    lists = ListBackend(model_of("llama"), chooser(policy, CAPACITY, 0), CAPACITY, "stream", first_eviction=len(context) - 1)
    lists.run(torch.tensor([context], device=DEVICE))
    cut = lists.kept[-1]
    since = [list(range(len(context), len(context) + n)) for n in range(1, len(continuation))]
    return [*lists.kept, *([[[*held, *later] for held in layer] for layer in cut] for later in since)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("batch", [1, 4])
def test_after_a_prompt_that_is_cut_at_its_end_the_cache_grows(policy, batch):
    model, asked = model_of("llama"), requests(2, 6)
    reader = RequestReader(model, CacheConfig(policy, CAPACITY, "stream", evict="prompt"), batch=batch, block=24)
    for (context, continuation), found in zip(asked, reader.loglikelihoods(asked), strict=True):
        tokens = torch.tensor([[*context, *continuation]], device=DEVICE)
        kept = kept_of_a_cut_prompt(policy, context, continuation)
        logits = MaskBackend(model, [*kept, kept[-1]]).run(tokens)[0].double().log_softmax(-1)
        places = range(len(context) - 1, len(context) + len(continuation) - 1)
        assert found.logprob == pytest.approx(sum(float(logits[t, tokens[0, t + 1]]) for t in places), abs=1e-3)


@pytest.mark.parametrize("policy", [H2O(), SinkWindow(sinks=2)], ids=str)
def test_answers_after_a_cut_prompt_do_not_depend_on_the_batch(policy):
    config, prompts = CacheConfig(policy, CAPACITY, evict="prompt"), [context for context, _ in requests(6, 7)]
    one, many = (RequestReader(model_of("llama"), config, batch=batch) for batch in (1, 8))
    said = one.generate(prompts, 12, lambda ids: False)
    assert said == many.generate(prompts, 12, lambda ids: False)
    assert said != RequestReader(model_of("llama"), CacheConfig(policy, CAPACITY)).generate(prompts, 12, lambda ids: False)
    per_token = model_of("llama").kv_bytes(0)
    largest = (max(min(len(p), CAPACITY) for p in prompts) + 11) * per_token
    assert one.sizes["kv_held_bytes"] == largest <= one.sizes["kv_bytes"]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_question_after_the_cut_is_not_seen_by_the_policy(policy, batch):
    """The prompt is cut before the question, which is read from then on, token by token, like an answer."""
    model, draw = model_of("llama"), random.Random(8)
    asked = [([draw.randrange(96) for _ in range(n)], [draw.randrange(96) for _ in range(4)]) for n in (30, 33, 30, 24)]
    cuts = [21, 21, 28, 21]
    reader = RequestReader(model, CacheConfig(policy, CAPACITY, "stream", evict="prompt"), batch=batch, block=24)
    found = reader.loglikelihoods(asked, prompts=cuts)
    said = reader.generate([context for context, _ in asked], 5, lambda ids: False, cuts=cuts)
    for (context, continuation), cut, one, answer in zip(asked, cuts, found, said, strict=True):
        totals = []
        for after in (continuation, answer):
            tokens = torch.tensor([[*context, *after]], device=DEVICE)
            kept = kept_of_a_cut_prompt(policy, context[:cut], [*context[cut:], *after])
            logits = MaskBackend(model, [*kept, kept[-1]]).run(tokens)[0].double().log_softmax(-1)
            places = range(len(context) - 1, len(context) + len(after) - 1)
            totals.append(sum(float(logits[t, tokens[0, t + 1]]) for t in places))
        assert one.logprob == pytest.approx(totals[0], abs=1e-3)
        assert answer == [int(logits[t].argmax()) for t in places], "each token is the likeliest"
    seen = reader.loglikelihoods(asked)
    assert max(abs(a.logprob - b.logprob) for a, b in zip(found, seen, strict=True)) > 1e-2


def test_truncate_reads_first_and_last_tokens_and_no_others():
    asked = requests(5, 4)
    cut = [(c if len(c) <= 7 else [*c[:3], *c[-4:]], a) for c, a in asked]
    config = CacheConfig(Dense())
    found = RequestReader(model_of("llama"), config, "truncate", 7).loglikelihoods(asked)
    assert found == RequestReader(model_of("llama"), config).loglikelihoods(cut)
    by_capacity = RequestReader(model_of("llama"), CacheConfig(SinkWindow(sinks=2), 7), "truncate").loglikelihoods(asked)
    assert by_capacity == RequestReader(model_of("llama"), CacheConfig(SinkWindow(sinks=2), 7)).loglikelihoods(cut)


def kept_after(policy, prompts, batch: int, monkeypatch, generating: bool, whole_texts: bool = False):
    """Positions that each head holds when 12 tokens have followed a prompt: by prompt, for all layers and heads."""
    reader, opened, kept = RequestReader(model_of("llama"), CacheConfig(policy, CAPACITY), batch=batch), [], []
    open_one = reader._open
    monkeypatch.setattr(reader, "_open", lambda lengths: opened.append(open_one(lengths)) or opened[-1])

    def ended(answer):
        if len(answer) == 12 and len(kept) < len(opened):
            kept.append(opened[-1].kept())
        return False

    if generating:
        reader.generate(prompts, 13, ended)
    else:
        reader.loglikelihoods([(p, [*range(13)]) for p in prompts], prompts=[0] * len(prompts) if whole_texts else None)
        kept = [decoder.kept() for decoder in opened]
    return [[set(held) for layer in layers for held in layer[stream]] for layers in kept for stream in range(len(layers[0]))]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("generating", [True, False])
def test_a_policy_is_told_where_a_streamed_prompt_ends(batch, generating, monkeypatch):
    """`keep_prompt` keeps all of it, and draws from what follows."""
    draw = random.Random(3)
    prompts = [[draw.randrange(96) for _ in range(length)] for length in (4, 5, 7)]
    kept = kept_after(Random(keep_prompt=True), prompts, batch, monkeypatch, generating)
    assert len(kept) == 3
    for prompt, heads in zip(prompts, kept, strict=True):
        assert all(len(held) == CAPACITY and held >= {*range(len(prompt))} for held in heads)
        assert len({frozenset(held) for held in heads}) > 1, "heads draw on their own"
    others = kept_after(Random(), prompts, batch, monkeypatch, generating)
    if not generating:
        others += kept_after(Random(keep_prompt=True), prompts, batch, monkeypatch, False, whole_texts=True)
    for prompt, heads in zip(prompts * 2, others, strict=False):
        assert not all(held >= {*range(len(prompt))} for held in heads)


@pytest.mark.parametrize(
    ("policy", "evict"),
    [(H2O(), 1), (H2O(), "prompt"), (Random(keep_prompt=True), 1), (Random(keep_prompt=True), 4), (RecomputeWindow(), 1)],
    ids=str,
)
def test_a_seed_draws_the_same_answer_alone_and_among_others(policy, evict):
    """Also where a prompt comes several times, is read once, and others are longer or done before."""
    prompts = [context for context, _ in requests(5, 9) for _ in range(2)][:9]
    config, seeds, hot = CacheConfig(policy, CAPACITY, evict=evict), [*range(9)], partial(Sampler, temperature=1.5, top_p=0.95)
    one, many = (RequestReader(model_of("llama"), config, batch=batch) for batch in (1, 8))

    def said(reader, seeds, prompts=prompts):
        return reader.generate(prompts, 8, lambda ids: ids[-1] % 5 == 0, seeds=seeds, sampler=hot)

    answers = said(many, seeds)
    assert answers == said(many, seeds) == said(one, seeds)
    assert said(many, seeds[::-1], prompts[::-1]) == answers[::-1]
    assert len({tuple(x) for x in answers[:6]}) == 6, "another seed, another answer, to the same prompt, too"
    assert len({len(x) for x in answers}) > 2


def test_what_is_not_finite_is_no_score():
    model = adopt(tiny_model("llama", vocab_size=96).to(DEVICE))
    torch.nn.init.constant_(model.hf.get_output_embeddings().weight, float("nan"))
    with pytest.raises(ArithmeticError):
        RequestReader(model, CacheConfig(Dense())).loglikelihoods([([1, 2], [3])])


def test_bytes_held_are_those_of_the_tokens_that_are_kept():
    reader, kv_bytes = RequestReader(model_of("llama"), CacheConfig(H2O(), CAPACITY)), model_of("llama").kv_bytes
    reader.loglikelihoods(requests())
    assert (reader.sizes["kv_held_bytes"], reader.sizes["kv_bytes"]) == (kv_bytes(CAPACITY - 1), kv_bytes(CAPACITY))


@pytest.mark.parametrize("settings", [{"temperature": 1.5, "top_k": 3}, {"temperature": 1.2, "top_p": 0.6}], ids=str)
def test_tokens_are_drawn_with_the_probabilities_that_the_settings_leave(settings):
    """Shares of 4,000 streams with the same logits: a standard error of at most 0.008."""
    logits = 2 * torch.randn(12, generator=torch.Generator().manual_seed(0))
    expected = (logits / settings["temperature"]).softmax(-1)
    likeliest, order = expected.sort(descending=True)
    before = likeliest.cumsum(-1) - likeliest
    left = order[: settings["top_k"]] if "top_k" in settings else order[before < settings["top_p"]]
    expected = torch.zeros(12).index_copy(0, left, expected[left] / expected[left].sum())
    drawn = Sampler(range(4000), **settings)(logits.expand(4000, -1)).bincount(minlength=12) / 4000
    torch.testing.assert_close(drawn, expected, atol=0.03, rtol=0)
