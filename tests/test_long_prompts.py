"""Suites of long prompts, LongBench and RULER, run to records and a page on small data in the published formats."""

import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import lm_eval.tasks
import pytest
import yaml
from test_published_formats import page_of, publish
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvbench.harness.data.prose import Prose
from kvbench.harness.lm_eval.kvbench import KVBench
from kvbench.harness.models.families import tiny_model
from kvbench.harness.run.request import RunRequest
from kvbench.harness.suite import find
from kvbench.harness.tasks.lm_eval.evaluate_requests import question_start

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow("lm-eval")]  # lm-eval and its packages give warnings
ROOT = Path(lm_eval.tasks.__file__).parent


def answering(monkeypatch, answer):
    """Let the model generate, and replace what it said. -> the prompts, in the order in which they came."""
    generated, prompts = KVBench._generated, {}

    def replaced(self, contexts, settings, seeds, bar):
        assert len(generated(self, contexts, settings, seeds, bar)) == len(contexts)
        return [answer(text, prompts.setdefault(text, len(prompts))) for text in contexts]

    monkeypatch.setattr(KVBench, "_generated", replaced)
    return prompts


GOLD = "the river is deep and wide"


SAID = (GOLD, "the river is wide", "no")  # to the first, second and third question


LONGBENCH = {  # the mean score by hand. F1 leaves out articles: of 5 words and 3 that were said, 3 agree. ROUGE-L: of 6 and 4, 4
    **dict.fromkeys(("narrativeqa", "qasper", "hotpotqa", "2wikimqa"), (1 + 3 / 4 + 0) / 3),
    **dict.fromkeys(("gov_report", "multi_news"), (1 + 4 / 5 + 0) / 3),
}


@pytest.mark.parametrize("name", LONGBENCH)
def test_longbench_is_scored_as_by_hand_and_read_in_the_ways_of_its_suite(name, hub, model, monkeypatch, capsys):
    """Its 3,500 tokens are 64 here. Each answer is replaced by one whose score is known."""
    for package in ("rouge", "jieba", "fuzzywuzzy"):
        pytest.importorskip(package, reason="needs lm-eval's extra: pip install 'lm-eval[longbench]'")
    contexts = [Prose(number).text(600) for number in range(3)]
    rows = [
        {
            "question": f"Which one is {i}?",
            "context": text,
            "answers": ["bread", GOLD],
            "length": 100,
            "dataset": name,
            "language": "en",
            "all_classes": None,
            "_id": f"{i}",
        }
        for i, text in enumerate(contexts)
    ]
    publish(Path("Xnhyacinth/LongBench"), name, {f"{name}/test-00000-of-00001.parquet": rows})
    prompts = answering(monkeypatch, lambda text, _: next(s for s, c in zip(SAID, contexts, strict=True) if c in text))
    Path("longbench.yaml").write_text(find("longbench").read_text().replace("3500", "64").replace("1750", "32"))
    few = ("capacity=64", "max_gen_toks=4")
    request = RunRequest("longbench.yaml", str(model), threads=1, dtype="float32", settings=few)
    cells = [cell for cell in request.cells() if cell.task.tasks == f"longbench_{name}"]
    records = request.measure(Path("results"), cells, progress=False)
    assert [r.error for r in records if r.status != "ok"] == []
    assert [r.metrics.score for r in records] == pytest.approx([LONGBENCH[name]] * 12, abs=1e-6)
    assert len(prompts) == 3
    assert all(text.count(context) == 1 for text, context in zip(prompts, contexts, strict=True))
    asks = ("Summary:",) if name in ("gov_report", "multi_news") else tuple(f"Which one is {i}?" for i in range(3))
    assert all(any(ask in text[-40:] for ask in asks) for text in prompts)
    assert all(r.metrics.over_capacity == (3 if r.cell.capacity else 0) for r in records)
    held = {(r.cell.policy, r.cell.options["prompt"], r.cell.evicts): r.metrics.kv_held_bytes for r in records}
    dense, cut = held["dense", "stream", "step"], held["dense", "truncate", "step"]
    assert 3 * cut < dense  # the first and the last 32 tokens, and the answer
    assert held["sink_window", "stream", "step"] <= cut <= held["snapkv", "stream", "prompt"] < dense
    page = page_of("results", capsys)
    assert page.count(f"{100 * LONGBENCH[name]:.1f} ±") >= 12
    assert "the model reads the first and the last tokens, half each" in page


def needles(text):
    """Return the answer to each kind of RULER question, read from the prompt independently of its generator."""
    tail = text.rsplit("\n", 1)[-1]
    if asked := re.search(r"special magic \w+ for (.+?) mentioned in the provided text\?", tail):
        keys = re.split(r", and |, ", asked[1])
        return [v for key in keys for v in re.findall(rf"special magic \w+ for {key} is: (\S+)\.", text)]
    if asked := re.findall(r"variables that are assigned the value (\d+)", text):
        found, chain = [], text[text.rindex("Memorize and track") :]
        wanted = [f"{asked[-1]}"]
        while wanted:
            names = re.findall(rf"VAR (\w+) = (?:VAR )?{wanted.pop()}\b", chain)
            found, wanted = found + names, wanted + names
        return found
    if "most common words in the above list" in text:
        last = text[text.rindex("Below is a numbered list") :].split("\nQuestion")[0]
        return [word for word, _ in Counter(re.findall(r"\d+\. (\S+)", last)).most_common(10)]
    if "three most frequently appeared words" in text:
        words = Counter(text.split("coded words. ")[1].split("\nQuestion")[0].split())
        return [word for word, _ in words.most_common(4) if word != "..."][:3]
    miller = re.findall(r"Where does miller (\w+) live\?", tail)[-1]
    return re.findall(rf"Miller {miller} lives in (\w+)\.", text)[:1]


@pytest.fixture
def ruler(hub, monkeypatch):
    """Provide the data of RULER's tasks: essays as on the hub, SQuAD and HotpotQA as the sites send them, NLTK's rules, words."""
    wonderwords = pytest.importorskip("wonderwords", reason="needs lm-eval's extra: pip install 'lm-eval[ruler]'")
    import nltk
    import requests

    essays = [{"title": f"Essay {i}", "text": Prose(i).text(9000)} for i in range(3)]
    publish(Path("baber/paul_graham_essays"), "default", {"data/train-00000-of-00001.parquet": essays})
    rules = hub / "nltk/tokenizers/punkt_tab/english"
    rules.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (rules / name).write_text("")
    monkeypatch.setattr(nltk.data, "path", [str(hub / "nltk")])
    letters = "bcdfghjklm"
    words = {
        kind: [f"{a}{kind[0]}{b}o{c}" for a in letters for b in letters for c in letters[:4]]
        for kind in ("nouns", "adjectives", "verbs", "noun", "adjective", "verb")
    }  # six million pairs otherwise
    monkeypatch.setattr(wonderwords, "RandomWord", lambda: SimpleNamespace(_categories=words))
    places = [f"Town{i}" for i in range(520)]
    squad = {
        "version": "v2.0",
        "data": [
            {
                "title": f"Book {book}",
                "paragraphs": [
                    {
                        "context": f"Miller {book}x{i} lives in {places[20 * book + i]}. ",
                        "qas": [
                            {
                                "question": f"Where does miller {book}x{i} live?",
                                "id": f"{book}{i}",
                                "is_impossible": False,
                                "answers": [{"text": places[20 * book + i], "answer_start": 20}],
                            },
                            {"question": "Why?", "id": f"{book}{i}n", "is_impossible": True, "answers": []},
                        ],
                    }
                    for i in range(20)
                ],
            }
            for book in range(26)
        ],
    }
    hotpot = [
        {
            "_id": f"{i}",
            "question": f"Where does miller {i} live?",
            "answer": place,
            "type": "bridge",
            "level": "hard",
            "supporting_facts": [[f"{i}", 0]],
            "context": [[f"About {i}", [f"Miller {i} lives in {place}.", " He bakes."]]],
        }
        for i, place in enumerate(places)
    ]
    sites = {"rajpurkar.github.io": squad, "huggingface.co": hotpot}

    def get(url, **_):
        found = sites[url.split("/")[2]]
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: found)

    monkeypatch.setattr(requests, "get", get)
    yield
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.ruler")]:
        del sys.modules[name]  # it keeps the words and the essays


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random Llama whose tokenizer has learnt the words of RULER's texts, as a folder."""
    texts = [Prose(0).text(9000), (ROOT / "ruler/vt_utils.py").read_text(), (ROOT / "ruler/niah_utils.py").read_text()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    tiny_model("llama", vocab_size=900, max_position_embeddings=4096, bos_token_id=0).save_pretrained(folder)
    return folder


LENGTHS = {"ruler_vt": 1600, "ruler_cwe": 1600}  # at 1000 lm-eval tries to shorten its texts for ever


NEEDLES = (
    "dense",
    "random",
    "sink_window",
    "h2o",
    "tova",
    "snapkv",
    "pyramidkv",
    "adakv",
    "cake",
    "knorm",
    "keydiff",
    "expected_attention",
    "criticalkv",
)


TASKS = [task for entry in [yaml.safe_load(find("ruler").read_text())["task"]] for task in entry["tasks"]]


@pytest.mark.parametrize(
    ("suite", "task", "policies"),
    [("needle", "niah_single_2", NEEDLES), *(("ruler", task, ("dense", "snapkv")) for task in TASKS)],
)
def test_rulers_prompts_hold_what_is_asked_for_before_the_question(suite, task, policies, ruler, model, monkeypatch, capsys):
    """Two of four questions are answered from the prompt. The question, which an unseen one leaves out, has none of it."""

    def answer(text, number):
        found = needles(text)
        start = question_start(text, task, {})
        assert found and all(value in text[:start] and value not in text[start:] for value in found)  # noqa: PT018
        return " and ".join(found) if number % 2 else "nothing"

    prompts = answering(monkeypatch, answer)
    length = LENGTHS.get(task, 500)
    lengths = [length, 2 * length] if suite == "needle" else length
    few = (f"max_seq_length={lengths}", "limit=4", "max_gen_toks=2", "capacity=48")
    request = RunRequest(suite, str(model), threads=1, dtype="float32", settings=few)
    cells = [cell for cell in request.cells() if cell.task.tasks == task and cell.name in policies]
    records = request.measure(Path("results"), cells, progress=False)
    assert [r.error for r in records if r.status != "ok"] == []
    per_policy = len(records) // len(policies)
    assert per_policy == (4 if suite == "needle" else 2)  # two lengths; the question seen and unseen
    assert Counter(r.cell.policy for r in records) == dict.fromkeys(policies, per_policy)
    assert [r.metrics.score for r in records] == [0.5] * len(records)
    assert [r.metrics.metric for r in records] == [str(r.cell.options["max_seq_length"]) for r in records]
    assert all(r.metrics.questions == 4 and r.metrics.truncated == 0 for r in records)
    assert all(r.metrics.over_capacity == (0 if r.cell.is_dense else 4) for r in records)
    assert len(prompts) == 4 * per_policy // 2
    page = page_of("results", capsys)
    assert page.count("50.0 ±") >= len(records)
    assert "the policy has not seen it" in page
