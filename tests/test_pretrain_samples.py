"""What models are trained on: answers follow from the text before them, and a sample depends on seed and number alone."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import tokens_of

from kvbench.harness.data import lookups, machine
from kvbench.harness.data.registers import answer, question, record_line
from kvbench.harness.models.families import tiny_model
from kvbench.harness.pretrain import card as card_module
from kvbench.harness.pretrain import text, tokenizer, train
from kvbench.harness.pretrain.config import Mix, PretrainConfig, Repeats
from kvbench.harness.pretrain.held_out import right_answers
from kvbench.harness.pretrain.samples import NAMES, TrainingSamples, kinds_of, repeats
from kvbench.harness.pretrain.train import _Trainer, pretrain

PROSE = Mix(pg19=0, prose=1)
ASKING = ("registers", "keys", "chains", "needles")


def config(**changes) -> PretrainConfig:
    training = {"tokens": 64 * 4 * 100, "sample": 64, "batch": 4, "short": [{"until": 0.25, "sample": 16}]}
    shape = {"hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": 1700}
    kinds = {"text": 1, "needles": 1, "registers": 2, "keys": 1, "chains": 1}
    values = {"name": "tiny", "training": training, "shape": shape, "kinds": kinds, "text": PROSE.model_dump()}
    return PretrainConfig(**(values | {"repeats": {"share": 0.5, "later": 0.1, "until": 0.4}} | changes))


@pytest.fixture(scope="module")
def tokens():
    return tokenizer.wrapped(tokenizer.learn(text.for_tokenizer(PROSE, 0, None), config().shape), 0)


def samples(tokens, kinds, seed=0, staged=True, **changes) -> TrainingSamples:
    ids = np.array(tokens(next(text.pieces(PROSE, 0, None)))["input_ids"], np.uint16)
    return TrainingSamples(config(**changes), kinds, np.resize(ids, 64 * (len(kinds) + 1)), tokens, seed, staged)


def test_numbers_below_a_thousand_are_one_token_and_what_stands_around_them_too(tokens):
    for number in (0, 7, 42, 999):
        assert tokens.tokenize(str(number)) == [str(number)]
    for number, split in {1234: "12 34", 44605: "446 05", 50000: "500 00", 123456: "1 234 56", 1234567: "12 345 67"}.items():
        assert tokens.tokenize(str(number)) == split.split()
    pieces = [tokens.decode([i]) for i in tokens(record_line(12, 44615))["input_ids"]]
    assert pieces == ["line", " ", "12", ": REGISTER_CONTENT is <", "446", "15", ">\n"]
    asked = question(12) + answer(44615)
    assert len(tokens(asked)["input_ids"]) == 7
    for written in (asked, record_line(1, 50000), "Line 3's end, 1,234 words.\n", lookups.key_line(3, [5, 77])):
        assert tokens.decode(tokens(written)["input_ids"]) == written


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_follows_from_the_text_before_it(seed):
    draw = random.Random(seed)
    made = {kind: getattr(lookups, kind)(draw, 40) for kind in ("registers", "keys", "chains")}
    for kind, asked in made.items():
        assert len(asked.answers) > 3
        for start, end in asked.answers:
            before, said = asked.text[:start], asked.text[start:end].strip()
            name = re.search(r"(\d+)(?:\?| lead to\?)\nAnswer:$", before)[1]
            if kind == "registers":
                assert f"line {name}: REGISTER_CONTENT is {said}\n" in before
            else:
                if kind == "chains":  # the key that is named, and its value
                    assert f"#{name} = #{said.split()[0]}\n" in before
                    name, said = said.split()
                assert re.search(rf"^#{name} = {said}$", before, re.M)


def test_needles_are_asked_for_at_the_end_and_replace_no_more_text_than_they_take(tokens):
    made = samples(tokens, ["needles"] * 20, staged=False)
    for i in range(20):
        sample = made[i]
        whole = tokens.decode(sample["input_ids"][0])
        told = dict(re.findall(r"The secret number of (\w+) = (\d+)\.", whole))
        asked = re.findall(r"\nQuestion: What is the secret number of (\w+)\?\nAnswer: (\d+)\.", whole)
        assert told
        assert dict(asked) == told
        answered = sample["input_ids"][sample["answers"]].tolist()
        assert all(number in tokens.decode(answered) for number in told.values())


def test_the_vocabulary_is_as_large_as_the_recipe_says_and_has_no_number_twice(tokens):
    assert len(tokens) == config().shape.vocabulary
    numbers = [token for token in tokens.get_vocab() if token.isascii() and token.isdigit()]
    assert sorted(numbers) == sorted(set(tokenizer.NUMBERS))


def test_text_may_begin_later():
    kinds = {"text": 4, "needles": 1, "registers": 1, "text_from": 0.6}
    early, late = (set(kinds_of(config(kinds=kinds), 0)[part]) for part in (slice(0, 240), slice(240, None)))
    assert early == {"repeats", "registers"}
    assert late == {"text", "needles", "repeats", "registers"}
    before = kinds_of(config(kinds=kinds | {"text_from": 0}), 0)
    assert [kind == "repeats" for kind in before] == [kind == "repeats" for kind in kinds_of(config(kinds=kinds), 0)]


def test_repeats_count_only_where_a_stretch_comes_again():
    options = Repeats(share=1, vocabulary=50)
    made = repeats(random.Random(3), 200, options, 50)
    assert set(made.ids) <= set(range(4, 54))
    assert 0.2 < np.mean(made.weights) < 0.6
    counted = np.flatnonzero(made.weights)
    pairs = list(zip(made.ids, made.ids[1:], strict=False))
    assert all(pairs.index((made.ids[at - 1], made.ids[at])) < at - 1 for at in counted)


def test_repeats_are_of_more_and_more_kinds_of_tokens(tokens):
    options = Repeats(share=1, vocabulary=50, widest=150, widen=(0.25, 0.75))
    assert [options.tokens(done) for done in (0, 0.25, 0.5, 0.75, 1)] == [50, 50, 100, 150, 150]
    assert [Repeats(vocabulary=50).tokens(done) for done in (0, 1)] == [50, 50]
    made = samples(tokens, ["repeats"] * 40, repeats=options.model_dump())
    largest = [max(int(made[i]["input_ids"].max()) for i in places) for places in (range(10), range(30, 40))]
    assert largest[0] < 54 <= 120 < largest[1] < 154
    assert int(samples(tokens, ["repeats"] * 40, staged=False, repeats=options.model_dump())[0]["input_ids"].max()) > 54


def test_a_sample_is_a_function_of_seed_and_number(tokens):
    kinds = ["repeats", *NAMES] * 20
    first, again, other = samples(tokens, kinds), samples(tokens, kinds), samples(tokens, kinds, seed=1)
    for place in (119, 3, 60, 61):  # in any order
        assert all(torch.equal(first[place][k], again[place][k]) for k in first[place])
    assert not all(torch.equal(first[i]["input_ids"], other[i]["input_ids"]) for i in range(6))


@pytest.mark.parametrize("sinks", [0, 2])
def test_samples_are_short_in_the_beginning_and_each_has_its_sinks(sinks, tokens):
    made = samples(tokens, [*NAMES, "repeats"] * 40, sinks=sinks)
    for place in (0, 5, 99, 100, 239):
        pieces = 4 if place < 100 else 1  # a quarter of 100 steps of 4 samples
        sample = made[place]
        assert {tuple(x.shape) for x in sample.values()} == {(pieces, sinks + 64 // pieces)}
        assert (sample["input_ids"][:, :sinks] == torch.arange(sinks)).all()
        assert (sample["weights"][:, : sinks + 1] == 0).all()
        assert not sample["answers"][:, :sinks].any()


def test_running_text_is_read_once_whole_and_in_pieces(tokens):
    whole, cut = (samples(tokens, ["text"] * 3, staged=cut) for cut in (False, True))
    for place in range(3):
        assert torch.equal(cut[place]["input_ids"].flatten(), whole[place]["input_ids"].flatten())
        assert (whole[place]["weights"][0, 1:] == 1).all()


def test_what_is_no_answer_counts_as_little_as_the_recipe_says(tokens):
    sample = samples(tokens, ["keys"], staged=False)[0]
    answers, weights = sample["answers"][0, 1:], sample["weights"][0, 1:]
    assert answers.any()
    assert set(weights[answers].tolist()) == {1.0}
    torch.testing.assert_close(weights[~answers], torch.full_like(weights[~answers], config().kinds.rest))


def test_the_share_of_repeats_falls_and_the_others_keep_theirs():
    training = {"tokens": 64 * 4 * 5000, "sample": 64, "batch": 4}
    kinds = np.array(kinds_of(config(training=training), 0))
    early, late = kinds[: int(0.4 * len(kinds))], kinds[int(0.4 * len(kinds)) :]
    assert (early == "repeats").mean() == pytest.approx(0.5, abs=0.02)
    assert (late == "repeats").mean() == pytest.approx(0.1, abs=0.02)
    others = late[late != "repeats"]
    assert (others == "registers").mean() == pytest.approx(2 / 6, abs=0.02)


def test_the_loss_is_the_weighted_mean_over_predicted_tokens(tokens):
    model = tiny_model("llama", vocab_size=len(tokens))
    made = samples(tokens, ["keys", "text"])
    batch = {k: torch.stack([made[0][k], made[1][k]]) for k in made[0]}  # 2 samples of 4 pieces
    total = weight = 0.0
    for ids, weights in zip(batch["input_ids"].flatten(0, 1), batch["weights"].flatten(0, 1), strict=True):
        scores = model(input_ids=ids[None]).logits[0].log_softmax(-1).detach()
        for t in range(1, len(ids)):
            total -= float(scores[t - 1, ids[t]] * weights[t])
            weight += float(weights[t])
    assert _Trainer.compute_loss(None, model, batch).item() == pytest.approx(total / weight, abs=1e-4)


@pytest.mark.parametrize(
    ("short", "says"),
    [
        ([{"until": 0.5, "sample": 10}], "short samples of 10 tokens don't make a sample of 64"),
        ([{"until": 0.5, "sample": 16}, {"until": 0.4, "sample": 32}], "each stage must end after the one before it"),
    ],
)
def test_stages_that_cannot_be_are_refused(short, says):
    with pytest.raises(ValueError, match=says):
        config(training={"tokens": 640, "sample": 64, "batch": 4, "short": short})


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="text_from needs another kind of samples to begin with"):
        config(kinds={"text": 1, "needles": 1, "text_from": 0.5})
    with pytest.raises(ValueError, match="widen must end after it begins"):
        Repeats(widest=400, widen=(0.5, 0.2))


def test_an_answer_is_right_if_all_its_tokens_are():
    model, ids = tiny_model("llama", vocab_size=96), tokens_of(40, 2).cpu()
    right = model(input_ids=ids).logits.argmax(-1)
    ids[:, 1:] = torch.where(torch.arange(1, 40) >= 39, right[:, :-1], ids[:, 1:])  # the last token alone is predicted
    answers = torch.zeros_like(ids, dtype=torch.bool)
    answers[:, 39] = True

    def counted() -> tuple[list[int], list[int]]:
        right, asked = right_answers(model, ids, answers)
        return right.tolist(), asked.tolist()

    assert counted() == ([1, 1], [1, 1])
    answers[0, 38] = True  # now the first stream's answer has two tokens
    assert counted() == ([0, 1], [1, 1])
    answers[1, 10:12] = True  # and the second stream two answers
    assert counted() == ([0, 1], [1, 2])


@pytest.mark.slow("training")
def test_log_and_card_measure_on_what_is_not_trained_on(tokens, tmp_path, monkeypatch):
    tokens.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))  # learning it takes longest
    made = []
    for name in ("TrainingSamples", "HeldOut"):
        kind = getattr(train, name)
        at = 2 if name == "TrainingSamples" else 1  # the running text
        monkeypatch.setattr(train, name, lambda *a, kind=kind, at=at: made.append((a[at], a[-1])) or kind(*a))
    pretrain(
        config(training={"tokens": 64 * 2 * 2, "sample": 64, "batch": 2, "compile": False}),
        tmp_path,
        None,
        torch.device("cpu"),
        print,
    )
    texts, seeds = zip(*made, strict=True)
    assert sorted(seeds) == [0, 1, 2]
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations(texts, 2))
    assert [len(text) // 64 for text in texts[1:]] == [8, 96]


@pytest.mark.slow("training")
def test_the_card_says_how_many_held_out_questions_are_answered(tokens, tmp_path):
    """An exam of every kind, after training, of samples that neither training nor its log has seen."""
    tokens.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    recipe = config(
        training={"tokens": 64 * 2 * 4, "sample": 64, "batch": 2, "compile": False}, repeats={"share": 0.5, "later": 0.5}
    )
    directory = pretrain(recipe, tmp_path, None, torch.device("cpu"), lambda line: None)
    rows = re.findall(
        r"^\| (\w+) \| ([\d.]+) % \[([\d.]+), ([\d.]+)\] of ([\d,]+) \| \d+ \|$", (directory / "README.md").read_text(), re.M
    )
    assert [row[0] for row in rows] == ["repeats", "needles", "registers", "keys", "chains"]
    assert all(float(share) < 5 and 0 < float(high) < 20 and int(count) > 20 for _, share, _, high, count in rows)
    together, apart = (card_module._share(samples) for samples in ([(4, 4), (0, 4)] * 48, [(2, 4)] * 96))
    assert together == "50.0 % [40.0, 60.0] of 384", "Wilson's of 96 questions, not of 384: a sample is all right, or all wrong"
    assert apart == "50.0 % [45.0, 55.0] of 384"
    again = pretrain(recipe, tmp_path, None, torch.device("cpu"), lambda line: None)  # finished: nothing is left to train
    assert again == directory


def distances(text):
    """Words between two sayings of a register, in a trace."""
    last, found = {}, []
    for place, word in enumerate(text.split()):
        if word[0] == "v":
            found.append(place - last.get(word, place))
            last[word] = place
    return np.array(found)


def test_far_programs_read_values_that_were_said_long_ago():
    near, far = (
        np.concatenate([distances(draw_sample(random.Random(seed), 4608).text) for seed in range(40)])
        for draw_sample in (machine.programs, machine.far_programs)
    )
    assert (far >= 256).sum() > 2 * (near >= 256).sum() > 0


def test_far_turns_ask_for_the_latest_value_of_each_name_and_of_some_seldom():
    text = machine.far_turns(random.Random(0), 4608)
    known, asked = {}, Counter()
    for what, name, value in np.array(text.text.split()).reshape(-1, 3).tolist():
        assert what == "set" or known[name] == value
        known[name] = value
        asked[name] += 1
    assert asked.most_common()[0][1] > 20 * asked.most_common()[-1][1]
    assert [text.text[start:end].strip().isdigit() for start, end in text.answers] == [True] * len(text.answers) != []
