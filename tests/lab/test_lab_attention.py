"""The lab's attention task: keys, values and hidden states, sinks at other tokens, policies, and encoders."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import H2O, CacheConfig, SinkWindow, adopt, bench_in, change_config, change_weights, tiny_model
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast, PreTrainedModel
from watched import IDS, TOKENS, Whole, eager_weights

from kvbench.harness.core.errors import UserError
from kvbench.harness.engine import watch as watching
from kvbench.harness.engine.own_attention import attention_by
from kvbench.harness.engine.watch import check, watch
from kvbench.harness.models.load import load_model
from kvbench.harness.records.aggregates import buckets
from kvbench.lab.attention.figures import top_channels
from kvbench.lab.attention.measure import load_watched
from kvbench.lab.attention.notes import Lost, Notes
from kvbench.lab.attention.recorder import read_recorded
from kvbench.policies.knorm import Knorm


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(watching, "_MAX_SCORES", 2 * 4 * 7 * TOKENS)  # 7 queries at once


def test_channels_and_first_tokens_are_those_of_their_definitions():
    """Against loops; two batches of samples add up."""
    hf, whole, vectors = tiny_model("llama").double(), Whole(), []
    whole.see_vectors = lambda layer, *both: vectors.append(both)
    watch(hf, whole, input_ids=IDS)
    album = []
    for sample in range(2):
        notes = Notes(TOKENS, 8)
        watch(hf, notes, input_ids=IDS[sample : sample + 1])
        album.append(notes)
    energies = [sum(notes.energies()[f"{name}_energy"] for notes in album) for name in ("key", "value")]
    for layer, both in enumerate(vectors):
        for at, x in enumerate(both):
            squares = np.array([[(x[:, h, 1:, d] ** 2).sum() for d in range(x.shape[3])] for h in range(x.shape[1])])
            np.testing.assert_allclose(energies[at][layer], squares, rtol=1e-12)
            most = [max(row) / sum(row) for row in squares]  # a sixteenth of 16 channels
            assert top_channels(energies[at][layer]) == pytest.approx(np.mean(most))
        norms = whole.hidden[layer].float().norm(dim=-1)
        for sample, notes in enumerate(album):
            noted = {name: x[0, layer] for name, x in notes.arrays().items() if name.startswith("initial")}
            of_others = float(norms[sample, 4:].mean())
            np.testing.assert_allclose(noted["initial_norm"], [*norms[sample, :4].tolist(), of_others], rtol=1e-5)
            u = (whole.hidden[layer][sample].float() / norms[sample][:, None]).numpy()
            others = range(4, TOKENS)
            cosines = [np.mean([u[first] @ u[t] for t in others]) for first in range(4)]
            cosines.append(np.mean([u[s] @ u[t] for s in others for t in others if s != t]))
            np.testing.assert_allclose(noted["initial_cosine"], cosines, atol=1e-5)


def flagged_llama(token: int):
    """A Llama whose first hidden dim is 30 for one token, 0 for all others, and written by no layer."""
    hf = tiny_model("llama", attention_bias=True)
    with torch.no_grad():
        hf.model.embed_tokens.weight[:, 0] = 0
        hf.model.embed_tokens.weight[token, 0] = 30
        for block in hf.model.layers:
            block.self_attn.o_proj.weight[0], block.mlp.down_proj.weight[0] = 0, 0
            block.self_attn.o_proj.bias[0] = 0
    return hf


def test_a_sink_made_at_token_7_is_found_there():
    hf, ids = flagged_llama(121), IDS.clone()
    ids[:, 7] = 121
    slow = hf.config.head_dim // 2 - 1  # a dim of head 1 that RoPE hardly turns
    with torch.no_grad():
        attention = hf.model.layers[1].self_attn
        attention.q_proj.bias[hf.config.head_dim + slow] = 40
        attention.k_proj.weight[slow] = 0
        attention.k_proj.weight[slow, 0] = 5
    notes = Notes(TOKENS, 16)
    watch(hf, notes, input_ids=ids)
    received = notes.mean_received()
    assert float(received[1, :, 1, 7].min()) > 0.9
    assert {(s, p) for s, p, _ in notes.other_sinks(0.3)} == {(0, 7), (1, 7)}
    assert {share for _, _, share in notes.other_sinks(0.9)} == {1 / 8}


def test_a_massive_activation_is_found_at_its_layer_dim_and_token():
    hf, ids = flagged_llama(121), IDS.clone()
    ids[1, 11] = 121
    with torch.no_grad():
        mlp = hf.model.layers[1].mlp
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight[0] = 0
            linear.weight[0, 0] = 5
        mlp.down_proj.weight[:, 0] = 0
        mlp.down_proj.weight[9, 0] = 1000
    notes = Notes(TOKENS, 16)
    watch(hf, notes, input_ids=ids)
    assert [(layer, sample, position, dim) for layer, sample, position, dim, _ in notes.massive] == [(1, 1, 11, 9)]
    assert notes.massive[0][4] > 1000


def under(policy, capacity: int | None, hf, prompt: int = 0, ids: Tensor = IDS, **config):
    """The notes of a model's attention under a policy, the decoder, and when each token was seen last."""
    notes = Notes(ids.shape[1], 8)
    sunk = check(hf, input_ids=ids)
    read = read_recorded(adopt(hf), CacheConfig(policy, capacity, **config), ids, prompt, notes, sunk)
    return notes, *read


def test_a_cache_that_holds_everything_is_full_attention_and_loses_nothing():
    hf = tiny_model("llama").double()
    notes, _, last_seen = under(H2O(window=2), TOKENS, hf)
    full, lost = Notes(TOKENS, 8), Lost(TOKENS, last_seen)
    watch(hf, full, input_ids=IDS)
    watch(hf, lost, input_ids=IDS)
    for name, x in notes.arrays().items():
        np.testing.assert_allclose(x, full.arrays()[name], atol=1e-5, err_msg=name)
    np.testing.assert_allclose(notes.logit_maps(), full.logit_maps(), atol=1e-4)
    assert not lost.of_samples().any()


def test_under_a_policy_attention_is_that_of_a_model_with_evicted_tokens_masked():
    hf, capacity = tiny_model("llama").double(), 12
    notes, _, last_seen = under(SinkWindow(sinks=3), capacity, hf, positions="stream")
    age = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    held = (age >= 0) & ((age < capacity - 3 + 1) | (torch.arange(TOKENS) < 3))
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(~held, -1e9)[None, None]
    own = torch.stack(eager_weights(hf, mask=mask.expand(2, 1, -1, -1)))  # [L, N, Q, T, T]
    received = own.sum(3) / torch.arange(TOKENS, 0, -1)
    torch.testing.assert_close(notes.mean_received(), received, atol=1e-6, rtol=0)
    lost = Lost(TOKENS, last_seen)
    watch(hf, lost, input_ids=IDS)
    dense = torch.stack(eager_weights(hf))
    gone = (dense * ((age >= 0) & ~held)).sum(-1).mean(2)  # [L, N, T]
    expected = torch.stack([gone[..., start:stop].mean(-1) for start, stop in buckets(TOKENS)], -1).transpose(0, 1)
    assert expected[:, :, -1].min() > 0.1
    np.testing.assert_allclose(lost.of_samples(), expected.numpy(), atol=1e-6)


def test_what_a_prompt_leaves_over_is_lost_from_then_on():
    hf, prompt = tiny_model("llama").double(), 24
    _, decoder, last_seen = under(Knorm(), 8, hf, prompt, evict="prompt")
    kept = decoder.kept()
    for layer, of_layer in enumerate(kept):
        for stream, of_stream in enumerate(of_layer):
            for head, positions in enumerate(of_stream):
                last = last_seen[layer][stream, head]
                assert [p for p in range(TOKENS) if last[p] == TOKENS - 1] == positions
                assert all(last[p] == prompt - 1 for p in range(prompt) if p not in positions)


@pytest.mark.slow("takes seconds")
def test_the_task_as_a_user_runs_it(tmp_path: Path):
    suite = tmp_path / "look.yaml"
    suite.write_text(
        "suite: look\nversion: 1\ndescription: d\nmodel:\n  - {id: 'builtin:sink_1'}\n  - {id: 'builtin:zero_sink'}\n"
        "task: {name: attention, data: prose, samples: 24, tokens: 64}\ncapacity: 24\npolicies: [dense, h2o]\n"
    )
    ran = bench_in("run", suite, "--results", "r", "--threads", 1, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    found = {}
    for path in (tmp_path / "r").rglob("*.json"):
        record = json.loads(path.read_text())
        found[record["cell"]["model"]["id"], record["cell"]["policy"]] = record["metrics"]
    assert max(map(max, found["builtin:sink_1", "dense"]["first_by_head"])) > 0.5  # 0.62 at the end of its training
    assert found["builtin:sink_1", "dense"]["sink_heads"] > 0.1  # two of 16 heads
    assert found["builtin:zero_sink", "dense"]["rest"] > 0.1
    low, high = found["builtin:sink_1", "h2o"]["lost_interval"]
    assert 0 < low < found["builtin:sink_1", "h2o"]["lost"] < high
    checked = bench_in("records", "verify", "r", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow("takes seconds")
def test_an_encoder_is_looked_at_and_its_cache_is_not(tmp_path: Path):
    """Its samples end in [SEP], which is a sink here because every query of head 0 in layer 1 is made to look for it."""
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    folder = tmp_path / "encoder"
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    bert = BertForMaskedLM(BertConfig(vocab_size=len(words), initializer_range=0.2, **sizes)).eval()
    with torch.no_grad():
        attention, embeddings = bert.bert.encoder.layer[0].attention.self, bert.bert.embeddings
        found = embeddings(torch.tensor([[2, 7, 8, 3]]))[0, 3]
        attention.query.weight[:16], attention.query.bias[:16] = 0, 0
        attention.query.bias[0] = 30
        attention.key.weight[:16], attention.key.bias[:16] = 0, 0
        attention.key.weight[0] = found / found.norm()
    bert.save_pretrained(folder)
    suite = tmp_path / "look.yaml"
    suite.write_text(
        f"suite: look\nversion: 1\ndescription: d\nmodel: {{id: '{folder}'}}\n"
        "task: {name: attention, data: prose, samples: 4, tokens: 24, epsilon: 0.5}\ncapacity: 8\npolicies: [h2o]\n"
    )
    refused = bench_in("run", suite, "--results", "r", "--threads", 1, cwd=tmp_path)
    assert refused.returncode == 2
    assert "can be looked at, but the loop can't drive it, so only dense has figures" in refused.stderr
    ran = bench_in("run", suite, "--results", "r", "--threads", 1, "--policy", "dense", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    sinks = json.loads(next((tmp_path / "r").rglob("dense*.json")).read_text())["metrics"]["sinks"]
    assert [(x["text"], x["position"], x["times"]) for x in sinks] == [("[SEP]", 23, 4)]


CPU = torch.device("cpu")


def encoders(tmp_path: Path) -> dict[str, Path]:
    """Return folders of an encoder: with its head, without a head, and without a head although the config names its class."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    torch.manual_seed(0)
    bert = BertForMaskedLM(BertConfig(vocab_size=128, initializer_range=0.2, **sizes)).eval()
    models: dict[str, PreTrainedModel] = {"whole": bert, "body": bert.bert, "body_of_masked": bert.bert}
    for name, hf in models.items():
        hf.save_pretrained(tmp_path / name)
    change_config(tmp_path / "body_of_masked", architectures=["BertForMaskedLM"])
    return {name: tmp_path / name for name in models}


def weights_of_attention(folder: Path) -> torch.Tensor:
    """[L, B, Q, T, T]."""
    body = load_watched(folder, "float32", CPU).hf.base_model
    with attention_by(body, "eager"), torch.inference_mode():
        return torch.stack(body(input_ids=torch.arange(3, 43).reshape(2, 20), output_attentions=True).attentions)


def test_an_encoder_needs_no_head_for_its_attention(tmp_path):
    folders = encoders(tmp_path)
    whole = weights_of_attention(folders.pop("whole"))
    assert whole.std(-1).min() > 0
    for folder in folders.values():
        assert torch.equal(weights_of_attention(folder), whole)
        with pytest.raises(UserError, match=r"6 missing \(cls\.predictions\..*\); the task attention can do without a head$"):
            load_model(folder, "float32", CPU)


@pytest.mark.parametrize(("name", "prefix"), [("whole", "bert."), ("body", ""), ("body_of_masked", "")])
def test_an_encoder_needs_its_other_weights(name, prefix, tmp_path):
    folder = encoders(tmp_path)[name]
    key = "encoder.layer.1.attention.self.key.weight"
    change_weights(folder, lambda tensors: tensors.pop(prefix + key))
    with pytest.raises(UserError, match=rf"tensors: 1 missing \((bert\.)?{key}\)$"):
        weights_of_attention(folder)
    change_config(folder, num_hidden_layers=1)
    with pytest.raises(UserError, match=r"tensors: 15 unexpected \((bert\.)?encoder\.layer\.1\."):
        weights_of_attention(folder)


def test_a_head_that_is_left_over_is_not_looked_at(tmp_path):
    """The files of BERT have a head for a task of its training beside the one that its config names, and a pooler."""
    folder = encoders(tmp_path)["whole"]
    whole, extra = weights_of_attention(folder), ("cls.seq_relationship.weight", "bert.pooler.dense.weight")
    change_weights(folder, lambda tensors: tensors.update({name: torch.ones(2, 64) for name in extra}))
    assert torch.equal(weights_of_attention(folder), whole)
