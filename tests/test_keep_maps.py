"""Keep maps say what is kept, are drawn as they are, and replay to the same numbers."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import record
from helpers import H2O, CacheConfig, Dense, Random, SinkWindow, bench, bench_in, in_blocks, model_of, nll, tokens_of

from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.method import EAGER, FASTEST, TOKEN_BY_TOKEN
from kvbench.harness.records import read
from kvbench.harness.report import keep_map as reading
from kvbench.harness.report.chart import Chart
from kvbench.harness.report.keep_map import Map, evictions, keep_map, read_map
from kvbench.harness.run.keep_map_writer import KeepMapWriter, RecordingDecoder, write_replay
from kvbench.harness.run.request import KeepSteps
from kvbench.policies import Policy
from kvbench.policies.replay import Replay

TOKENS, CAPACITY = 200, 16


def mapped(path: Path, read: CachedDecoder, tokens: torch.Tensor, block: int, asked: str = "all") -> torch.Tensor:
    """Reads tokens in blocks and writes a keep map. -> NLLs."""
    keep_map = KeepMapWriter(path.with_suffix(".partial"), KeepSteps(asked).of(tokens.shape[1]))
    logits = in_blocks(RecordingDecoder(read, keep_map), tokens, block)
    keep_map.finished().replace(path)
    return nll(logits, tokens)


def table_of(path: Path, evicted: Sequence, capacities: Sequence[int]) -> str:
    """Writes a table of evictions."""
    torch.save({"evicted": torch.as_tensor(evicted, dtype=torch.int32), "capacities": list(capacities)}, path)
    return str(path)


def replayed(path: Path, family: str, policy: Policy, tokens: torch.Tensor, seed: int = 0) -> str:
    """Reads tokens under a policy, and writes its table of evictions."""
    model = model_of(family)
    mapped(path.with_suffix(".parquet"), CachedDecoder(model, CacheConfig(policy, CAPACITY, seed=seed)), tokens, 50)
    shapes = [
        {"layers": 1, "heads": s.heads, "key_dim": 16, "value_dim": 16, "sliding_window": s.sliding_window} for s in model.layers
    ]
    write_replay(record(capacity=CAPACITY, facts={"kv_shapes": shapes}), read_map(path.with_suffix(".parquet")), path)
    return str(path)


@pytest.mark.parametrize(
    ("family", "policy", "seed"),
    [("llama", H2O(), 0), ("llama", Random(), 0), ("llama", Random(), 3), ("gemma3_text", H2O(), 0)],
    ids=["h2o", "random", "random, seed 3", "h2o with a layer that has a sliding window of 16 tokens"],
)
def test_a_replayed_map_gives_the_same_tokens_and_numbers(tmp_path, family, policy, seed):
    tokens = tokens_of(TOKENS, seed=seed)
    replay = Replay(replayed(tmp_path / "table.pt", family, policy, tokens, seed))
    for block in (1, 50):
        original = CachedDecoder(model_of(family), CacheConfig(policy, CAPACITY, seed=seed))
        again = CachedDecoder(model_of(family), CacheConfig(replay, CAPACITY, seed=99))
        losses = []
        for part in tokens.split(block, 1):
            losses.append([original(part), again(part)])
            assert again.kept() == original.kept()
        ours, theirs = (nll(torch.cat(logits, 1), tokens) for logits in zip(*losses, strict=True))
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("policy", "block", "method"),
    [(H2O(), 1, EAGER), (H2O(), 64, FASTEST), (H2O(), 100, TOKEN_BY_TOKEN), (SinkWindow(), 100, EAGER), (Dense(), 64, EAGER)],
    ids=lambda x: type(x).__name__ if isinstance(x, Policy) else None,
)
def test_a_map_holds_what_was_kept_and_changes_no_number(tmp_path, policy, block, method):
    """Blocks end before, at and after the chosen steps, and are read in every way. Two streams, whose maps are told apart."""
    config, tokens = CacheConfig(policy, CAPACITY if policy.evicts else None), tokens_of(100, 2)
    losses = mapped(tmp_path / "m.parquet", CachedDecoder(model_of("llama"), config, 2, method), tokens, block, "5,63,64,end")
    plain = CachedDecoder(model_of("llama"), config, 2)
    torch.testing.assert_close(losses, nll(in_blocks(plain, tokens, 100), tokens), atol=1e-4, rtol=0)
    rows = reading.rows(tmp_path / "m.parquet")
    held = {(r["step"], r["layer"], r["stream"], r["head"]): r["positions"] for r in rows}
    assert len(held) == len(rows) == 4 * 2 * 2 * 2
    for step in (5, 63, 64, 99):
        watched = CachedDecoder(model_of("llama"), config, 2)
        watched(tokens[:, : step + 1])
        for layer, of_layer in enumerate(watched.kept()):
            for stream, of_stream in enumerate(of_layer):
                assert [held[step, layer, stream, head] for head in range(2)] == of_stream


HEAD = 'suite: maps\nversion: 1\ncapacity: 16\nmodel: {id: "builtin:sink_1"}\n'
PERPLEXITY, QUESTIONS = "{name: perplexity, data: prose, tokens: 90}", "{name: streameval, lines: 6, query_every: 3, distance: 1}"
SUITES = {  # the first one's cell is one of the others'
    "one.yaml": f"{HEAD}task: {PERPLEXITY}\npolicies: [h2o]\n",
    "more.yaml": f"{HEAD}task: [{PERPLEXITY}, {QUESTIONS[:-1]}, policies: [h2o]}}]\npolicies: [h2o, recompute_window]\n",
    "questions.yaml": f"{HEAD}task: {QUESTIONS}\npolicies: [h2o]\n",
}


def measured(folder: Path, *arguments: object) -> tuple[Path, dict]:
    """Runs cells in a folder. -> the file and the JSON of the perplexity record of a policy with a cache."""
    done = bench_in("run", *arguments, "--walk", "--device", "cpu", "--threads", "1", "--results", "r", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    task_and_policy = [(r["cell"]["task"]["name"], r["cell"]["policy"], r) for r in json.loads(done.stdout)]
    (made,) = [r for task, policy, r in task_and_policy if task == "perplexity" and policy != "recompute_window"]
    (path,) = (folder / "r").rglob(f"*-{made['cell_id'][:8]}-*.json")
    return path.relative_to(folder), made


@pytest.fixture(scope="module")
def measured_once(tmp_path_factory):
    """A folder with one cell that has a map of every step, its record's file and JSON."""
    folder = tmp_path_factory.mktemp("maps")
    for name, text in SUITES.items():
        (folder / name).write_text(text)
    return folder, *measured(folder, "one.yaml", "--trace", "kept=all")


@pytest.fixture
def one(measured_once, tmp_path, monkeypatch):
    """A copy of it, in the current folder. -> the record's file and JSON."""
    folder, path, made = measured_once
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return path, made


@pytest.mark.slow("measures suites")
def test_a_run_writes_a_map_beside_the_record_and_measures_again_where_it_lacks_one(one, tmp_path):
    shutil.rmtree("r")
    path, plain = measured(tmp_path, "more.yaml")
    assert "keep_map" not in plain["facts"]
    _, made = measured(tmp_path, "more.yaml", "--trace", "kept=10,end")
    assert (made["cell_id"], made["key"]) == (plain["cell_id"], plain["key"])
    assert made["metrics"]["nll"] == pytest.approx(plain["metrics"]["nll"], abs=1e-4)
    fact = made["facts"]["keep_map"]
    kept = read_map(reading.map_file(read(tmp_path / path), (tmp_path / path).parent))
    assert sorted(set(kept.step)) == [10, 90 + len(plain["data"]["prefix"]) - 2], "the last token is never read"
    assert [p.name for p in tmp_path.rglob("*.parquet")] == [fact["file"]], "of one cell: the others have no map"
    assert measured(tmp_path, "one.yaml", "--trace", "kept=10,end")[1] == made, "nothing is measured again"
    measured(tmp_path, "one.yaml", "--fresh")
    assert not list(tmp_path.rglob("*.parquet")), "no record names it any longer"


def two_steps(**changes) -> Map:
    """Return a map in which two layers with two heads each hold both tokens of a stream of two."""
    entries = [(s, k, h, p) for s in range(2) for k in range(2) for h in range(2) for p in range(s + 1)]
    step, layer, head, position = np.array(entries).T
    columns = {"stream": 0 * step, "step": step, "layer": layer, "head": head, "position": position}
    part = changes.pop("where", lambda c: c["step"] >= 0)(columns)
    return keep_map(*(columns[name][part] for name in columns))


def test_each_rectangle_has_the_shade_of_its_share_of_heads():
    rows = [(0, 0, 0, 0, 0), (0, 0, 0, 1, 0), (0, 1, 0, 0, 0), (0, 1, 0, 1, 1)]  # stream, step, layer, head, position
    drawn = Chart("map", "", reading.specification(keep_map(*np.array(rows).T), "")).svg("light")
    shades = re.findall(r"after step: (\d); position: (\d); high: (\d);[^%]* (\d+)%.*?fill=\"rgb\((.*?)\)", drawn)
    held = [shade for shade in shades if shade[3] != "0"]
    assert held == [("0", "0", "1", "100", "8, 48, 107"), ("1", "0", "2", "50", "79, 158, 202")]
    assert [shade[:3] for shade in shades if shade[3] == "0"] == [("0", "0", "1"), ("1", "0", "2")], "tokens that were read"


def test_maps_that_replay_could_not_keep_are_refused(tmp_path):
    assert evictions(two_steps()).tolist() == [[[2, 2]] * 2] * 2
    with pytest.raises(UserError, match="only a map of every step"):
        evictions(two_steps(where=lambda c: c["step"] == 1))
    with pytest.raises(UserError, match="the same number of KV heads in every layer"):
        evictions(two_steps(where=lambda c: (c["layer"] == 0) | (c["head"] == 0)))
    uneven = two_steps(where=lambda c: (c["head"] == 0) | (c["position"] == c["step"]))  # the second head keeps one token
    for layer_budgets in (uneven, two_steps(where=lambda c: (c["layer"] == 0) | (c["position"] == c["step"]))):
        with pytest.raises(UserError, match="keep different numbers of tokens"):
            write_replay(record(capacity=2), layer_budgets, tmp_path / "t.pt")
    with pytest.raises(UserError, match="only a map of one stream"):
        write_replay(
            record(capacity=2), keep_map(*(two_steps()[name] + 1 for name in two_steps().dtype.names)), tmp_path / "t.pt"
        )
    assert not (tmp_path / "t.pt").exists()


def test_a_file_that_is_no_table_of_this_cell_is_refused(tmp_path):
    file = table_of(tmp_path / "t.pt", [[[3, 1, 2]] * 2] * 2, [2])
    bound = Replay(file).bind(2)
    assert bound == Replay(file, bound.sha256).bind(2)
    (tmp_path / "no.pt").write_bytes(b"no")
    for policy, problem in [
        (Replay(file), "was taken at capacity 2, not 3"),
        (Replay(str(tmp_path / "none.pt")), r"none\.pt can't be read \(No such file or directory\)"),
        (Replay(str(tmp_path / "no.pt")), "is no table of evictions"),
        (Replay(file, "0" * 64), r"has changed: its sha256 is \w{8}\.\.\., not 00000000"),
    ]:
        with pytest.raises(ValueError, match=problem):
            policy.bind(3)
    read = CachedDecoder(model_of("llama"), CacheConfig(Replay(table_of(tmp_path / "u.pt", [[[3, 1, 2]] * 2] * 3, [2])), 2))
    with pytest.raises(ValueError, match="was taken from a model with 3 layers of 2 KV heads, not 2 layers of 2 KV heads"):
        read(tokens_of(4))


@pytest.mark.slow("measures suites")
def test_a_run_under_replay_gives_the_same_nlls(capsys, one):
    path, made = one
    assert bench(capsys, "show", "kept", path, "--replay", "table.pt")[:2] == (0, "table.pt\n")
    other_path, other = measured(Path(), "one.yaml", "--policy", "{name: replay, file: table.pt}")
    assert len(other["cell"]["parameters"]["sha256"]) == 64
    ours, theirs = (np.load(p.parent / r["trace"]["file"]) for p, r in ((path, made), (other_path, other)))
    np.testing.assert_allclose(theirs, ours, atol=1e-4)
    code, _, err = bench(capsys, "show", "kept", other_path)
    said = f"{other_path.stem}: has no keep map: measure it again with 'bench run {other['cell_id'][:8]} --trace kept'"
    assert (code, err) == (2, f"bench: {said}\n")


def test_past_the_end_of_its_map_the_oldest_token_goes(tmp_path):
    read = CachedDecoder(model_of("llama"), CacheConfig(Replay(table_of(tmp_path / "t.pt", [[[4, 2, 4, 3]] * 2] * 2, [2])), 2))
    read(tokens_of(4))
    assert read.kept() == [[[[0, 2]] * 2]] * 2
    for step, expected in ((4, [2, 4]), (5, [4, 5]), (6, [5, 6])):
        read(tokens_of(1, seed=step))
        assert read.kept() == [[[expected] * 2]] * 2
