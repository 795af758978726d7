"""Texts as users bring them: empty ones, other encodings, names of files, tokenizers of other families; and generated prose."""

import hashlib
import math
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import cell_record, edit
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.intervals import MIN_BLOCKS
from kvbench.harness.data import arc, pg19, tables
from kvbench.harness.data.data_files import SPLITS
from kvbench.harness.data.prose import FACTS, MAX_WORDS_BETWEEN, MIN_WORDS_BETWEEN, Prose, fact_costs
from kvbench.harness.data.stream import Text, opening, stream
from kvbench.harness.models.load import load_tokenizer
from kvbench.harness.records.aggregates import nll_figures
from kvbench.harness.records.metrics import StrideBlocks
from kvbench.harness.report.pairing import units
from kvbench.harness.report.verify import problems
from kvbench.harness.suite.text import Source

LENGTH, PREFIX = 5001, 1


def scored_by_hand(nll, starts, stride, prompt):
    """Scored tokens of each text, all and on the stride."""
    texts = [range(*span) for span in pairwise([*starts, LENGTH])]
    return [
        [sum(np.isfinite(nll[i]) and (i - PREFIX - prompt) % step == 0 for i in text) for text in texts] for step in (1, stride)
    ]


@pytest.mark.parametrize(
    ("starts", "prompt"),
    [([1, 1, 2000], 0), ([1, 2000, 2000, 2000, 4000], 0), ([1, 50, 90, 2000], 100), ([1, 2, 3, 4, 5, 3001, 3002, 5000], 0)],
    ids=["first", "between", "inside the prompt", "between two strides"],
)
def test_a_text_without_scored_tokens_counts_none(starts, prompt, tmp_path):
    nll = np.random.default_rng(0).gamma(2, 1, LENGTH).astype(np.float32)
    nll[: PREFIX + prompt] = np.nan
    figures = nll_figures(nll, PREFIX, starts, 4, prompt=prompt)
    everything, on_stride = scored_by_hand(nll, starts, 4, prompt)
    assert figures["texts"]["tokens"] == everything
    assert figures["on_stride"]["texts"]["tokens"] == on_stride
    assert [s == 0 for s in figures["texts"]["nll_sum"]] == [n == 0 for n in everything]
    task = {"name": "perplexity", "tokens": LENGTH - PREFIX, "stride": 4} | ({"prompt": prompt} if prompt else {})
    made = edit(cell_record(figures | {"bits_per_byte": 1.5}, task=task), data={"prefix": [0]})
    np.save(tmp_path / "x.nll.npy", nll)
    digest = hashlib.sha256((tmp_path / "x.nll.npy").read_bytes()).hexdigest()
    assert problems(edit(made, trace={"file": "x.nll.npy", "sha256": digest}), tmp_path) == []


NAMES = ["the_greatest_show", "moby_dick", "pride", "trainspotting", "contest"]


@pytest.mark.parametrize(
    ("names", "read", "left_out"),
    [
        (NAMES, NAMES, []),
        ([*NAMES, "test"], ["test"], NAMES),
        (["my_Test-2", "train", "latest"], ["my_Test-2"], ["latest"]),
        (["test-00000-of-00001-29a571947c0b5ccc", "train-00000-of-00001"], ["test-00000-of-00001-29a571947c0b5ccc"], []),
    ],
    ids=["no split", "one split", "words", "the hub's names"],
)
def test_a_split_is_a_whole_word_of_a_files_own_name(names, read, left_out, tmp_path, capsys):
    folder = tmp_path / "test_train"
    folder.mkdir()
    for name in names:
        (folder / f"{name}.txt").write_text(name)
    assert sorted(book.text for book in pg19.books("test", folder)[1]) == sorted(read)
    said = capsys.readouterr().err
    assert bool(said) == bool(left_out)
    assert all(f"{name}.txt" in said for name in sorted(left_out)[:3])


@pytest.mark.parametrize(
    ("paths", "read"),
    [
        (["latest.jsonl", "contest.jsonl"], ["contest", "latest"]),
        (["ARC-Easy/test-0.jsonl", "ARC-Easy/train-0.jsonl", "ARC-Challenge/test-0.jsonl"], ["ARC-Easy/test-0"]),
        (["arc-easy_test.jsonl", "arc-challenge_test.jsonl"], ["arc-easy_test"]),
        (["no-ARC-Easyness/test.jsonl", "b/train.jsonl"], ["no-ARC-Easyness/test"]),
    ],
    ids=["no split", "the hub's folders", "one folder", "a folder that only resembles a subset"],
)
def test_a_subset_is_a_whole_name_inside_the_users_folder(paths, read, tmp_path):
    folder = tmp_path / "ARC-Challenge train"
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    chosen = tables.files(folder, (arc.SUBSETS, "ARC-Easy"), (SPLITS, "test"))
    assert [str(path.relative_to(folder).with_suffix("")) for path in chosen] == read


def test_texts_beside_parquet_are_left_out_aloud(tmp_path, capsys):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "A.PARQUET")
    (tmp_path / "b.txt").write_text("b")
    assert [book.text for book in pg19.books("test", tmp_path)[1]] == ["a"]
    assert "b.txt" in capsys.readouterr().err


def test_untitled_rows_have_titles_of_their_own(tmp_path):
    pq.write_table(pa.table({"title": ["Emma", None], "text": ["a", "b"]}), tmp_path / "named.parquet")
    pq.write_table(pa.table({"text": ["c", "d", ""]}), tmp_path / "plain.parquet")
    titles = [book.title for book in pg19.books("test", tmp_path)[1]]
    assert titles == ["Emma", "named 2", "plain 1", "plain 2", "plain 3"]


TEXT = "Ein Café.\r\nnaïve" + "é" * 9


@pytest.mark.parametrize(
    ("encoding", "says"),
    [("cp1252", "byte 0xe9 at offset 7"), ("utf-16", "UTF-16"), ("utf-32", "UTF-32"), ("utf-16-le", "byte 0xe9 at offset 14")],
)
def test_a_text_that_is_not_utf8_is_refused_with_the_first_wrong_byte(encoding, says, tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT.encode(encoding))
    with pytest.raises(UserError, match=rf"{re.escape(str(tmp_path / 'a.txt'))}: .*{says}"):
        list(pg19.books("test", tmp_path)[1])
    (tmp_path / "suite.yaml").write_bytes(f"suite: {TEXT[:8]}".encode(encoding))
    with pytest.raises(UserError, match=r"suite.yaml: (not text in UTF-8: byte 0x\w\w at offset|begins with)"):
        Source(tmp_path / "suite.yaml")
    (tmp_path / "row.jsonl").write_bytes(f'{{"question": "{TEXT[:8]}"}}'.encode(encoding))
    with pytest.raises(UserError, match=r"row.jsonl: (not text in UTF-8: byte 0x\w\w at offset|begins with)"):
        tables.rows(tmp_path / "row.jsonl", ("question",))


def test_ascii_in_utf16_without_a_mark_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("plain".encode("utf-16-le"))
    with pytest.raises(UserError, match="byte 0x00 at offset 1"):
        list(pg19.books("test", tmp_path)[1])


def test_a_byte_order_mark_of_utf8_is_skipped(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT.encode("utf-8-sig"))
    assert [book.text for book in pg19.books("test", tmp_path)[1]] == [TEXT.replace("\r\n", "\n")]
    (tmp_path / "row.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "q"}')
    assert tables.rows(tmp_path / "row.jsonl", ("question",)) == [{"question": "q"}]


def with_template(tokenizer, before, after, **names):
    """A tokenizer that puts these special tokens around a text."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens([*before, *after])
    ids = [(token, backend.token_to_id(token)) for token in (*before, *after)]
    backend.post_processor = TemplateProcessing(single=" ".join([*before, "$A", *after]), special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (["[gMASK]", "<sop>"], [], {}),  # as GLM's, which names no BOS
        (["<s>"], ["</s>"], {"bos_token": "<s>", "eos_token": "</s>"}),
        (["[CLS]"], ["[SEP]"], {"cls_token": "[CLS]", "sep_token": "[SEP]"}),
        ([], ["</s>"], {"eos_token": "</s>"}),  # as T5's
        ([], [], {"bos_token": "<s>"}),  # as Qwen's: it names a BOS, and puts none
    ],
    ids=["two marks", "BOS and EOS", "CLS and SEP", "EOS alone", "none"],
)
def test_a_stream_opens_with_what_the_tokenizer_itself_puts_before_a_text(before, after, names, model_dir):
    tokenizer = with_template(load_tokenizer(model_dir), before, after, **names)
    assert tokenizer.convert_ids_to_tokens(opening(tokenizer)) == before
    made = stream([Text("a", "some text")], "here", tokenizer, 9)
    assert (made.prefix, len(made.ids)) == (len(before), len(before) + 9)


def test_texts_without_scored_tokens_are_no_units_of_an_interval():
    """The first text that is scored is the one in which the caches fill."""
    counts = [0, 7, 0, *range(1, MIN_BLOCKS + 1)]
    texts = {"nll_sum": [2.0 * n for n in counts], "tokens": counts}
    blocks = StrideBlocks.model_validate({"nll_sum": [1.0], "tokens": [1], "size": 32, "texts": texts})
    assert units(blocks, 8, None, 0).tokens.tolist() == list(range(1, MIN_BLOCKS + 1))


@pytest.fixture(scope="module")
def made():
    prose = Prose(0)
    return prose, prose.text(1_000_000)


def test_the_same_seed_gives_the_same_text_however_it_is_asked_for():
    prose = Prose(3)
    pieces = "".join(prose.text(500) for _ in range(40))
    assert Prose(3).text(len(pieces) - 1) == pieces
    assert Prose(4).text(1000)[:200] != pieces[:200]


def test_tellings_are_where_they_say(made):
    prose, text = made
    words = {w for values in FACTS.values() for w in values}
    assert len(prose.tellings) > 5000
    assert all(text[t.start : t.end] in words for t in prose.tellings if t.end <= len(text))


def test_distances_reach_from_the_nearest_to_the_farthest(made):
    prose, _ = made
    back = [t.words_back for t in prose.tellings if t.words_back is not None]
    doublings = Counter(int(math.log2(x)) for x in back)
    assert min(back) >= MIN_WORDS_BETWEEN
    assert sorted(back)[int(0.99 * len(back))] <= 1.1 * MAX_WORDS_BETWEEN
    assert all(doublings[i] > 0.04 * len(back) for i in range(6, 13))
    assert 0.4 < len(back) / len(prose.tellings) < 0.8


def test_a_fact_told_again_is_the_one_told_before(made):
    """The name before a value belongs to an earlier telling with the same value, `words_back` words before."""
    prose, text = made
    word_at = {found.start(): number for number, found in enumerate(re.finditer(r"\S+", text))}
    last: dict[tuple[str, str], int] = {}
    told = 0
    for telling in prose.tellings[:3000]:
        sentence = text[max(text.rfind(end, 0, telling.start) for end in (". ", ".\n")) + 1 : telling.end]
        value = text[telling.start : telling.end]
        name = " ".join(w.strip(",") for w in sentence.split() if w[0].isupper() and w != "It")
        if telling.words_back is None:
            last[name, value] = word_at[telling.start]
        elif (name, value) in last:
            told += 1
            assert word_at[telling.start] - last[name, value] == telling.words_back
            last[name, value] = word_at[telling.start]
    assert told > 1500


def test_what_a_fact_costs_is_counted_by_how_far_back_it_was_told():
    """For a reader who forgets after 300 words, a fact repeated earlier costs nothing, and later the log of its choices."""
    prose = Prose(7)
    text = prose.text(400_000)
    nll = np.full(len(text), 0.01, np.float32)  # one token per byte
    nll[0] = np.nan
    for telling in prose.tellings:
        forgotten = telling.words_back is None or telling.words_back > 256
        nll[telling.start : telling.end] = math.log(16) / (telling.end - telling.start) if forgotten else 0
    rows = fact_costs(nll, np.ones(len(text), np.int64), 7)
    assert [r["words_back"] for r in rows][:2] == [None, [32, 64]]
    assert sum(r["tellings"] for r in rows) > 2000
    for row in rows:
        expected = 0 if row["words_back"] and row["words_back"][1] <= 256 else math.log(16)
        assert row["nats"] == pytest.approx(expected, abs=1e-3)
        assert row["drawn_nats"] == pytest.approx(math.log(16))
