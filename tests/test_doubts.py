"""A model that can't be the one that is meant is flagged on all of its rows."""

import json
import math
import shutil

import pytest
from factories import edit, record
from helpers import bench

from kvbench.harness.models.hub import model_directory
from kvbench.harness.models.load import tokenizer_differs
from kvbench.harness.report.doubts import with_doubts


@pytest.fixture
def foreign(tmp_path):
    """`builtin:vanilla` with a tokenizer of the same size whose ids mean other words."""
    folder = tmp_path / "foreign"
    shutil.copytree(model_directory("builtin:vanilla", None, False), folder)
    value = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"] for token in value["added_tokens"]}
    words = {word: number for word, number in value["model"]["vocab"].items() if number not in special}
    numbers = sorted(words.values())
    turned = dict(zip(numbers, numbers[1000:] + numbers[:1000], strict=True))
    value["model"]["vocab"] |= {word: turned[number] for word, number in words.items()}
    (folder / "tokenizer.json").write_text(json.dumps(value))
    return folder


@pytest.mark.slow("measures suites")
def test_a_foreign_tokenizer_that_fits_flags_every_row(foreign, tmp_path, capsys):
    """A foreign tokenizer once gave perplexity 6,511 without a flag."""
    suite = tmp_path / "mine.yaml"
    suite.write_text(
        "suite: mine\nversion: 1\ndescription: Mine.\nmodel: {id: none, revision: null}\ncapacity: 32\n"
        "task: [{name: perplexity, data: prose, tokens: 400}, {name: streameval, lines: 5, query_every: 5, distance: 2}]\n"
        "policies: [dense, window]\n"
    )
    for model, flagged in (("builtin:vanilla", False), (foreign, True)):
        results = tmp_path / str(flagged)
        code, rows, closing = bench(capsys, "run", suite, "--model", model, "--results", results, "--threads", "1")
        assert code == 0, closing
        assert rows.count("\tflagged\t") == 4 * flagged
        assert ("dense is worse than a uniform guess" in closing) == flagged
        assert bench(capsys, "leaderboard", "--results", results)[0] == 0
        assert ("dense is worse than a uniform guess" in (results / "README.md").read_text()) == flagged


@pytest.mark.parametrize(
    ("vocab_size", "tokenizer", "doubt"),
    [
        (50304, {}, None),  # padded, as Pythia is
        (1000, {"entries": 800}, None),
        (50304, {"entries": 32000}, "its tokenizer has 32,000 entries, and its config a vocabulary of 50,304"),
        (50304, {"entries": 50305}, "its tokenizer has 50,305 entries, and its config a vocabulary of 50,304"),
        (50304, {"bos_token_id": 7}, None),  # the other one agrees
        (50304, {"bos_token_id": 7, "eos_token_id": None}, "its tokenizer and its config disagree: bos_token_id 7 and 1"),
        (50304, {"bos_token_id": None, "eos_token_id": 3}, None),  # one of several
        (50304, {"bos_token_id": None, "eos_token_id": None}, None),
    ],
)
def test_a_tokenizer_disagrees_by_size_or_by_all_of_its_special_tokens(vocab_size, tokenizer, doubt, tmp_path):
    class Fake:
        bos_token_id, eos_token_id = tokenizer.get("bos_token_id", 1), tokenizer.get("eos_token_id", 2)

        def __len__(self):
            return tokenizer.get("entries", 50277)

    config = {"model_type": "llama", "vocab_size": vocab_size, "bos_token_id": 1, "eos_token_id": [2, 3]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tokenizer_differs(Fake(), tmp_path) == doubt


SHAPES = [{"layers": 2, "heads": 2, "key_dim": 4, "value_dim": 4}]
TOKEN_BYTES = 2 * 2 * (4 + 4) * 4  # in float32


def flags_of(*records):
    return [r.metrics.flags for r in with_doubts(records)][-1]


def read(held, off=0.0, policy="h2o", **parts):
    """A record of a text of 200 tokens, `off` nats from dense in one run of 32, that holds `held` tokens."""
    sums = [64.0, 64.0 + off, *[64.0] * 4]
    blocks = {"nll_sum": sums, "tokens": [32] * len(sums), "size": 32}
    metrics = {"blocks": blocks, "kv_held_bytes": held * TOKEN_BYTES}
    made = record(policy, None if policy == "dense" else 8)
    return edit(made, metrics=metrics, data={"tokens": 200}, facts={"kv_shapes": SHAPES, **parts.pop("facts", {})}, **parts)


@pytest.mark.parametrize(
    ("held", "off", "flagged"),
    [
        (8, 0.0, True),
        (8, 4e-4, True),  # rounding of a run of 32 tokens: other kernels give other sums
        (8, 2e-3, False),  # the least that eviction changed in a published record
        (199, 0.0, False),  # the text fits, so nothing was evicted
        (190, 0.0, False),  # the last tokens alone were read without some
    ],
)
def test_nlls_that_equal_those_of_dense_although_tokens_were_evicted(held, off, flagged):
    flags = flags_of(read(199, policy="dense"), read(held, off))
    assert flags == (["no effect: all NLLs equal those of dense, but 96% of dense's bytes are evicted"] if flagged else [])


def answered(policy, outcomes="", scores=None, **metrics):
    """A record of questions that are right or wrong, or have scores."""
    count = len(scores or outcomes)
    figures = {
        "questions": count,
        "requests": count,
        "over_capacity": 0 if policy == "dense" else count,
        "metric": "acc",
        "score": 0.0,
        "kv_held_bytes": 1000 if policy == "dense" else 400,
        **metrics,
    }
    right = outcomes.count("1")
    figures |= {"right": right, "accuracy": right / count, "outcomes": outcomes} if outcomes else {"scores": scores}
    made = record(policy, None if policy == "dense" else 8)
    return edit(made, cell={"task": {"name": "lm_eval", "tasks": "t"}}, metrics=figures)


@pytest.mark.parametrize(
    ("of_dense", "ours", "change", "flagged"),
    [
        ("10" * 40, "10" * 40, {}, True),
        ("10" * 40, "10" * 39 + "11", {}, False),
        ("110", "110", {}, False),  # chance may do that
        ("1" * 80, "1" * 80, {}, False),  # so does every good policy
        ("10" * 40, "10" * 40, {"over_capacity": 30}, False),  # most prompts fit
        ("10" * 40, "10" * 40, {"kv_held_bytes": 1000}, False),
    ],
)
def test_answers_that_equal_those_of_dense_are_many_and_of_both_kinds(of_dense, ours, change, flagged):
    flags = flags_of(answered("dense", of_dense), answered("h2o", ours, **change))
    assert any(flag.startswith("no effect: all answers") for flag in flags) == flagged


@pytest.mark.parametrize(
    ("held", "parameters", "flag"),
    [
        (65, {"holds": 64}, None),  # the newest token on top
        (128, {"holds": 64}, "not evicting: it holds 128 tokens per KV head, but should hold 64 at most"),
        (128, {}, None),  # nobody says what it should hold
        (199, {"compression_ratio": 0.5}, "not evicting: it holds all bytes that dense holds, but should evict 50% of a prompt"),
        (199, {"press": {"compression_ratio": 0.5}}, "not evicting"),
        (199, {"compression_ratio": 0.0}, None),
        (150, {"compression_ratio": 0.5}, None),
    ],
)
def test_a_contestant_that_holds_more_than_it_should(held, parameters, flag):
    theirs = {"policy": "mine.py:Theirs", "capacity": None, "parameters": {"attention": None, **parameters}}
    flags = flags_of(read(199, policy="dense"), read(held, 1.0, cell=theirs, facts={"code": "mine.py"}))
    assert [f for f in flags if f.startswith(flag or "")] if flag else flags == []


def of_model(policy, nll, **facts):
    """A record whose model guesses among 100 tokens, with a bucket within its training length and one beyond."""
    buckets = [{"from": 0, "to": 64, "tokens": 64, "nll": nll[0]}, {"from": 64, "to": 128, "tokens": 64, "nll": nll[1]}]
    made = record(policy, None if policy == "dense" else 8)
    return edit(made, metrics={"buckets": buckets}, facts={"vocab_size": 100, "training_length": 64} | facts)


def test_only_dense_and_only_within_the_training_length_counts():
    chance = math.log(100)
    calm = [of_model("dense", (chance - 0.01, 9.0)), of_model("window", (9.0, 9.0))]
    assert [r.metrics.flags for r in with_doubts(calm)] == [[], []]
    wrong = [of_model("dense", (chance + 0.01, 0.0)), of_model("window", (1.0, 1.0))]
    wrong.append(of_model("h2o", (1.0, 1.0), weights_sha256="b"))
    first, second, other = (r.metrics.flags for r in with_doubts(wrong))
    assert first == second
    assert "perplexity 101, vocabulary 100" in first[0]
    assert other == []
    assert [r.metrics.flags for r in wrong] == [[], [], []], "records stay as they are"
