"""Pretraining uses the same text and initial weights for all models, and a resumed run is exact to the last digit.

Training is the same without the models that are kept on the way, and figures of those models become curves over steps.
"""

import json
import shutil

import pytest
import torch
from helpers import DEVICE, CacheConfig, Dense, bench_in, decoder, tiny_model, tokens_of
from transformers import AttentionInterface

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.stream import opening
from kvbench.harness.engine import attention
from kvbench.harness.engine.method import EAGER, FASTEST
from kvbench.harness.engine.model import UnsupportedModelError, adopt
from kvbench.harness.engine.own_attention import ZERO_SINK
from kvbench.harness.models.load import load_model, load_tokenizer
from kvbench.harness.models.selfcheck import check
from kvbench.harness.records import RecordStore
from kvbench.harness.report.sections import over_steps, section
from kvbench.lab.pretrain import train
from kvbench.lab.pretrain.config import PretrainConfig, load
from kvbench.lab.pretrain.held_out import attention_to_first
from kvbench.lab.pretrain.train import new_model, pretrain

pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate and the Trainer give warnings
STEPS = 12


def config(**changes) -> PretrainConfig:
    training = {"tokens": 70 * 2 * STEPS, "sample": 70, "batch": 2, "compile": False, "probe_every": 4, "checkpoint_every": 5}
    shape = {"hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 32, "vocabulary": 1400}
    return PretrainConfig(**{"name": "tiny", "training": training, "shape": shape, **changes})


def trained(out, data, steps=None, **changes):
    model = pretrain(config(**changes), out, data, torch.device("cpu"), lambda line: None, steps)
    return model, [json.loads(x) for x in (out / "log.jsonl").read_text().splitlines()]


def test_a_users_recipe_may_be_like_a_packaged_one_or_like_a_file(tmp_path):
    (tmp_path / "base.yaml").write_text("like: sink_1\nname: base\nshape: {layers: 2}\n")
    (tmp_path / "own.yaml").write_text("like: base.yaml\nname: own\nseed: 3\nshape: {heads: 8}\n")
    packaged, own = load("sink_1"), load(str(tmp_path / "own.yaml"), ["training.batch=4"])
    shape = packaged.shape.model_copy(update={"layers": 2, "heads": 8})
    training = packaged.training.model_copy(update={"batch": 4})
    assert own == packaged.model_copy(update={"name": "own", "seed": 3, "shape": shape, "training": training})


def test_a_recipe_that_is_like_itself_or_like_none_is_a_users_mistake(tmp_path):
    for name, base in (("a.yaml", "b.yaml"), ("b.yaml", "a.yaml"), ("c.yaml", "sink_3")):
        (tmp_path / name).write_text(f"like: {base}\n")
    with pytest.raises(UserError, match="is like itself"):
        load(str(tmp_path / "a.yaml"))
    with pytest.raises(UserError, match="sink_3: no such file or reference model, did you mean 'sink_"):
        load(str(tmp_path / "c.yaml"))


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    folder = tmp_path_factory.mktemp("books")
    for i in range(3):
        (folder / f"book{i}.txt").write_text(f"Chapter {i}. The quick brown fox jumps over the lazy dog, {i} times. " * 2000)
    return folder


@pytest.fixture(scope="module")
def whole(books, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole"), books)


@pytest.mark.slow("training")
def test_again_from_the_same_seed_and_stopped_and_resumed_it_is_the_same_to_the_last_digit(whole, books, tmp_path):
    _, again = trained(tmp_path / "again", books)
    assert again == whole[1]
    trained(tmp_path / "stopped", books, steps=7)
    assert not (tmp_path / "stopped" / "model").exists()
    _, resumed = trained(tmp_path / "stopped", books)
    assert resumed == whole[1]
    assert trained(tmp_path / "other", books, seed=1)[1] != whole[1]


@pytest.mark.slow("training")
@pytest.mark.parametrize(
    ("changes", "prefix"), [({}, []), ({"sinks": 1}, [0]), ({"sinks": 2}, [0, 1]), ({"zero_sink": True}, [])]
)
def test_what_was_trained_is_loaded_checked_and_opened_by_its_sinks(changes, prefix, whole, books, tmp_path):
    shutil.copy(whole[0].parent / "tokenizer.json", tmp_path)  # the same for all, and learning it takes longest
    directory, log = whole if not changes else trained(tmp_path, books, **changes)
    model = load_model(directory, "float32", torch.device("cpu"))
    assert model.check <= 1
    assert opening(load_tokenizer(directory)) == prefix
    assert getattr(model.hf.config, "zero_sink", False) == changes.get("zero_sink", False)
    assert log[0]["loss"] == pytest.approx(whole[1][0]["loss"], abs=0.05)  # it is scored on the same text
    text = (directory / "README.md").read_text()
    assert {0: "nothing stands", 1: "one learnable sink token stands", 2: "two learnable sink tokens stand"}[len(prefix)] in text
    assert f"{70 * 2 * STEPS:,} tokens" in text
    assert f"| {log[-1]['attention_to_first']['largest']:.3f} |" in text
    curve = [json.loads(x) for x in (directory / "training.jsonl").read_text().splitlines()]
    assert [(x["tokens"], x["loss"]) for x in curve] == [(x["tokens"], round(x["loss"], 5)) for x in log]
    assert sum("attention_to_first" in x for x in curve) == 3
    assert not any("inv_freq" in name for name, _ in model.hf.named_parameters())


@pytest.mark.slow("training")
def test_a_training_goes_on_from_another_models_weights_under_a_recipe_of_its_own(whole, books, tmp_path):
    shutil.copy(whole[0].parent / "tokenizer.json", tmp_path)
    further = {"start": str(whole[0]), "shape": config().shape.model_copy(update={"rope_theta": 1e6}).model_dump()}
    begins, old = new_model(config(**further)), load_model(whole[0], "float32", torch.device("cpu")).hf.state_dict()
    assert all(torch.equal(weight, old[name]) for name, weight in begins.state_dict().items())
    assert begins.config.rope_parameters["rope_theta"] == 1e6
    model, log = trained(tmp_path, books, **further)
    assert log[0]["loss"] < whole[1][0]["loss"] - 1
    assert load_model(model, "float32", torch.device("cpu")).check <= 1
    assert f"goes on from {whole[0]}" in (model / "README.md").read_text()


def test_a_zero_sink_is_a_logit_of_0_in_the_decode_loop():
    """Compared with a reference attention that has a token of zeros, for all block sizes. Without it the logits differ."""
    hf = tiny_model("llama", vocab_size=96).to(DEVICE)
    hf.config.zero_sink = True
    model = adopt(hf)
    assert check(model) <= 1
    tokens = tokens_of(30)
    hf.set_attn_implementation(ZERO_SINK)
    reference = hf(input_ids=tokens, use_cache=False).logits
    plain = adopt(tiny_model("llama", vocab_size=96).to(DEVICE))
    model = adopt(hf)
    for method in (EAGER, FASTEST):
        read = decoder(model, CacheConfig(Dense()), method=method)
        ours = torch.cat([read(tokens[:, :20]), *(read(t) for t in tokens[:, 20:].split(1, 1))], 1)
        torch.testing.assert_close(ours, reference, atol=2e-4, rtol=0)
    assert (decoder(plain, CacheConfig(Dense()))(tokens) - reference).abs().max() > 1e-2


def test_the_self_check_would_notice_a_missing_zero_sink():
    model = adopt(tiny_model("llama", vocab_size=96, zero_sink=True).to(DEVICE))
    assert check(model) <= 1
    real = attention._attention

    def without(module, *args, **kwargs):
        module.config.zero_sink = False
        try:
            return real(module, *args, **kwargs)
        finally:
            module.config.zero_sink = True

    AttentionInterface.register(attention.NAME, without)
    try:
        with pytest.raises(UnsupportedModelError):
            check(model)
    finally:
        AttentionInterface.register(attention.NAME, real)


def test_attention_to_the_first_token_is_what_eager_attention_gives():
    hf = tiny_model("llama", vocab_size=96)
    tokens = tokens_of(80, 2).cpu()
    hf.set_attn_implementation("eager")
    expected = torch.stack([x[:, :, 64:, 0].mean((0, 2)) for x in hf(input_ids=tokens, output_attentions=True).attentions])
    torch.testing.assert_close(attention_to_first(hf, tokens), expected, atol=1e-5, rtol=0)
    assert hf.config._attn_implementation == "eager"


@pytest.mark.slow("training")
def test_samples_that_processes_draw_are_the_same(whole, books, tmp_path, monkeypatch):
    shutil.copy(whole[0].parent / "tokenizer.json", tmp_path)
    monkeypatch.setattr(train, "_workers", lambda device: 2)
    assert trained(tmp_path, books)[1] == whole[1]


KEPT = ["tiny-step-000000", "tiny-step-000001", "tiny-step-000003", "tiny-step-000006"]
TRAINING = {"tokens": 70 * 2 * 6, "sample": 70, "batch": 2, "compile": False, "probe_every": 2, "checkpoint_every": 4}
PROSE = {"pg19": 0, "prose": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A training that keeps models, stopped and resumed, beside one that keeps none."""
    folder = tmp_path_factory.mktemp("kept")
    _, plain = trained(folder / "plain", None, training=TRAINING, text=PROSE)
    keeping = TRAINING | {"keep": [0, 1], "keep_every": 3}
    trained(folder / "kept", None, steps=2, training=keeping, text=PROSE)
    _, log = trained(folder / "kept", None, training=keeping, text=PROSE)
    return folder, plain, log


@pytest.mark.slow("training")
def test_keeping_models_does_not_change_training(made):
    folder, plain, log = made
    assert log == plain
    final = [(folder / name / "model/model.safetensors").read_bytes() for name in ("plain", "kept")]
    assert final[0] == final[1]


@pytest.mark.slow("training")
def test_a_folder_of_models_is_measured_and_drawn_over_steps(made, tmp_path):
    folder, _, _ = made
    settings = ["data=prose", "tokens=64", "samples=2", "capacity=16"]
    command = ["run", "sinks-emerge", "--model", folder / "kept/models", "--results", "results"]
    done = bench_in(*command, *(x for s in settings for x in ("--set", s)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records, problems = RecordStore(tmp_path / "results").read_all()
    assert not problems
    assert sorted({r.cell.model.id for r in records}) == KEPT
    assert len(records) == 3 * len(KEPT)
    _, *table, chart = over_steps("sinks-emerge", records)
    assert [row.split(" | ")[:2] for row in table[2:-1]] == [["| tiny", step] for step in "0136"]
    points = [v for panel in chart.spec["hconcat"] for v in panel["data"]["values"]]
    assert {v["figure"] for v in points} == {"sink heads", "largest activation", "perplexity"}
    wanted = {r.cell.model.id: r.metrics.sink_heads for r in records if r.cell.policy == "dense"}
    assert {f"tiny-step-{v['step']:06d}": v["value"] for v in points if v["figure"] == "sink heads"} == wanted
    assert len([v for v in points if v["figure"] == "perplexity"]) == 2 * len(KEPT)
    assert "## sinks-emerge: over training steps" in section(records[0], records).text
    assert "<svg" in chart.svg("light")
