"""Text as tokens: every byte accounted for, wherever it comes from."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbench.harness.core.errors import UserError
from kvbench.harness.data import pg19, wikitext
from kvbench.harness.data.stream import Text, stream
from kvbench.harness.data.texts import check_folders, texts
from kvbench.harness.models.load import load_tokenizer
from kvbench.harness.run.request import RunRequest


def test_tokens_stand_for_every_byte_of_the_text(model_dir):
    tokenizer = load_tokenizer(model_dir)
    texts = [Text("a", "naïve, 🙂 café\n"), Text("b", "plain text after it")]
    size = sum(len(t.text.encode()) for t in texts)
    made = stream(texts, "here", tokenizer, size)  # a byte-level tokenizer without merges has one token per byte
    assert tokenizer.decode(made.ids) == "".join(t.text for t in texts)
    assert made.byte_counts.sum() == size
    assert made.starts == (("a", 0), ("b", len(texts[0].text.encode())))


def test_a_shorter_stream_is_the_beginning_of_a_longer_one(model_dir):
    tokenizer, texts = load_tokenizer(model_dir), [Text("a", "abc " * 500), Text("b", "xyz " * 500)]
    short, long = (stream(texts, "here", tokenizer, n) for n in (100, 3000))
    assert np.array_equal(short.ids, long.ids[:100])
    assert short.ids_sha256 != long.ids_sha256


def test_the_tokenizers_bos_opens_the_stream_once(shared):
    tokenizer = load_tokenizer(shared / "models/stories260K")
    made = stream([Text("a", "Once upon"), Text("b", " a time")], "here", tokenizer, 5)
    assert made.ids[: made.prefix].tolist() == [1]
    assert [title for title, _ in made.starts] == ["a", "b"]
    assert 1 not in made.ids[made.prefix :]


def test_tokenising_in_pieces_gives_the_tokens_of_the_whole_text(shared, monkeypatch):
    """This uses a real book and the model's own tokenizer."""
    from kvbench.harness.data import stream as module

    tokenizer = load_tokenizer(shared / "models/stories260K")
    book = next(pg19.books("test", shared / "data/pg19")[1]).text[:200_000]
    whole = tokenizer(book, add_special_tokens=False)["input_ids"]
    for piece in (1_000, 30_000):
        monkeypatch.setattr(module, "_MIN_PIECE_CHARACTERS", piece)
        made = stream([Text("a", book)], "here", tokenizer, len(whole))
        assert made.ids[made.prefix :].tolist() == whole
        assert made.byte_counts.sum() == len(book.encode())
        assert (made.byte_counts >= 0).all()


def test_parquet_files_are_read_by_split_in_order(tmp_path):
    for name in ("train", "test"):
        table = pa.table({"short_book_title": [f"{name} {i}" for i in range(3)], "text": [f"{name} text {i}" for i in range(3)]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    source, books = pg19.books("test", tmp_path)
    assert [(b.title, b.text) for b in books] == [(f"test {i}", f"test text {i}") for i in range(3)]
    assert source == "local test.parquet"
    with pytest.raises(UserError, match="no .parquet file of the split 'validation'"):
        pg19.books("validation", tmp_path)


def test_newlines_open_the_stream_in_place_of_the_bos(model_dir, text_dir):
    from kvbench.harness.tasks.perplexity import Perplexity, PerplexityOptions

    tokenizer = load_tokenizer(model_dir)
    plain = Perplexity.data(PerplexityOptions(tokens=50), lambda: tokenizer, text_dir)
    opened = Perplexity.data(PerplexityOptions(tokens=50, newlines=4), lambda: tokenizer, text_dir)
    assert opened.prefix == 4
    assert tokenizer.decode(opened.ids[:4]) == "\n\n\n\n"
    assert np.array_equal(opened.ids[4:], plain.ids[plain.prefix :])
    assert opened.byte_counts[:4].sum() == 0


@pytest.fixture
def catalogue(tmp_path):
    rows = [
        {
            "short_book_title": f"book {n}",
            "publication_date": None,
            "url": f"http://www.gutenberg.org/ebooks/{n}",
            "text": f"text {n} " * 20,
        }
        for n in (11, 10146, 12)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "test.parquet")
    return tmp_path


def test_one_book_by_its_number_ends_the_stream_where_it_ends(catalogue, model_dir):
    from kvbench.harness.tasks.perplexity import Perplexity, PerplexityOptions

    tokenizer = load_tokenizer(model_dir)
    made = Perplexity.data(PerplexityOptions(book=10146, tokens=10_000), lambda: tokenizer, catalogue)
    assert tokenizer.decode(made.ids) == "text 10146 " * 20
    assert made.starts == (("book 10146", 0),)
    assert Perplexity.data(PerplexityOptions(book=10146, tokens=7), lambda: tokenizer, catalogue).tokens == 7
    with pytest.raises(UserError, match="no book 13"):
        Perplexity.data(PerplexityOptions(book=13), lambda: tokenizer, catalogue)


@pytest.mark.parametrize(
    "text", ["é word " * 4000, "naïve" * 4000, "a\n\n" * 9000, "日本語、" * 5000, " " * 20_000, "\U0001f642" * 9000]
)
def test_pieces_account_for_every_byte_of_any_text(model_dir, monkeypatch, text):
    """A byte-level tokenizer without merges has one token per byte, wherever the text is cut."""
    from kvbench.harness.data import stream as module

    monkeypatch.setattr(module, "_MIN_PIECE_CHARACTERS", 1000)
    ids, ends = module.tokenise(load_tokenizer(model_dir), text, 10**9)
    assert len(ids) == ends[-1] == len(text.encode())
    assert load_tokenizer(model_dir).decode(ids) == text
    assert max(len(piece) for _, piece in module._pieces(text)) <= 2001


RAW = " \n = Robert Boulter = \n \n Robert Boulter is an English film actor . \n"  # as wiki.test.raw begins
ROWS = ["", " = Robert Boulter = \n", "", " Robert Boulter is an English film actor . \n"]  # as the hub has it


def wikitext_of(folder: Path, split: str = "test") -> str:
    (text,) = wikitext.articles(split, folder)[1]
    return text.text


def hub_layout(folder: Path) -> Path:
    """Parquet files as the hub's repository has them, of two editions."""
    for edition, rows in (("wikitext-2-raw-v1", ROWS), ("wikitext-103-raw-v1", ["other \n"])):
        (folder / edition).mkdir(parents=True)
        for part in range(2):
            half = rows[: len(rows) // 2] if part == 0 else rows[len(rows) // 2 :]
            pq.write_table(
                pa.table({"text": pa.array(half, pa.string())}), folder / edition / f"test-0000{part}-of-00002.parquet"
            )
    return folder


def test_wikitext_is_the_raw_file_whatever_it_is_read_from(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for name, text in (("test", RAW), ("valid", "v"), ("train", "t")):
        (raw / f"wiki.{name}.raw").write_text(text)
    assert wikitext_of(raw) == wikitext_of(raw / "wiki.test.raw") == RAW
    assert wikitext_of(raw, "validation") == "v"
    assert wikitext_of(hub_layout(tmp_path / "hub")) == RAW
    (raw / "wiki.test.raw").unlink()
    with pytest.raises(UserError, match="no .raw file of the split 'test', only wiki.train.raw, wiki.valid.raw"):
        wikitext.articles("test", raw)


def test_wikitext_that_is_missing_or_there_twice_is_told_in_one_line(tmp_path):
    (tmp_path / "wiki.test.tokens").write_text("words that are <unk>")
    with pytest.raises(UserError, match=r"no WikiText-2 \(wiki.test.raw, or"):
        wikitext.articles("test", tmp_path)
    for edition in ("wikitext-2-raw", "wikitext-103-raw"):
        (tmp_path / edition).mkdir()
        (tmp_path / edition / "wiki.test.raw").write_text(RAW)
    with pytest.raises(UserError, match="several texts of the split 'test': .*give --data the folder of one"):
        wikitext.articles("test", tmp_path)


def test_the_hub_path_reads_the_pinned_layout(tmp_path, monkeypatch):
    """The real loading code, on a local directory laid out like the hub's edition."""
    (tmp_path / "data").mkdir()
    table = pa.table({"short_book_title": ["t"], "publication_date": [1900], "url": ["u"], "text": ["some words"]})
    pq.write_table(table, tmp_path / "data/test-00000-of-00001-29a571947c0b5ccc.parquet")
    monkeypatch.setattr(pg19, "HUB_ID", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert [(b.title, b.text) for b in pg19.books("test", None)[1]] == [("t", "some words")]


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (pa.array([1, 2]), "holds int64, expected string"),
        (pa.array([b"\xff\xfe", b"x"]), "holds binary, expected string"),
        (pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")), "damaged: a row can't be"),
    ],
    ids=["int", "binary", "not UTF-8"],
)
def test_parquet_whose_text_is_none_is_told_in_one_line(tmp_path, column, says):
    pq.write_table(pa.table({"text": column}), tmp_path / "test.parquet")
    with pytest.raises(UserError, match=f"test.parquet: .*{says}"):
        list(pg19.books("test", tmp_path)[1])


def test_a_suite_never_reads_two_sources_from_the_same_files(tmp_path):
    (tmp_path / "test.txt").write_text("A book.")
    request = RunRequest("course", "builtin:sink_2", str(tmp_path), device="cpu")
    with pytest.raises(UserError, match="reads 'pg19' and 'wikitext': give --data a directory with a folder of each name"):
        request.measure(tmp_path / "results", request.cells(), progress=False)
    check_folders(["pg19", "prose"], tmp_path)  # of one source, any directory will do


def test_one_directory_may_hold_several_sources(tmp_path):
    """Each is read from its own folder, and never from that of another."""
    (tmp_path / "wikitext").mkdir()
    (tmp_path / "wikitext/wiki.test.raw").write_text(" An article \n")
    (tmp_path / "book.txt").write_text("A book.")
    _, articles = texts("wikitext", "test", None, 0, 1, tmp_path)
    assert [text.text for text in articles] == [" An article \n"]
    with pytest.raises(UserError, match="has a folder 'wikitext', but none 'pg19'"):
        texts("pg19", "test", None, 0, 1, tmp_path)
    (tmp_path / "pg19").mkdir()
    (tmp_path / "pg19/one.txt").write_text("Another book.")
    _, books = texts("pg19", "test", None, 0, 1, tmp_path)
    assert [text.text for text in books] == ["Another book."]
