"""Fixtures that tests share. Their helpers are in `helpers.py`, which imports PyTorch."""

import atexit
import dataclasses
import gc
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # huggingface_hub reads it when it is imported

import pytest
from hypothesis import settings

SHARED = Path(__file__).parents[2] / "shared"
LM_EVAL_FOLDERS = "arc hellaswag lambada openbookqa piqa winogrande longbench ruler gsm8k minerva_math aime"  # of our suites

settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Import PyTorch where tests run, and not in the process that hands them to others, which would take seconds to start."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import helpers  # noqa: F401


def pytest_sessionstart() -> None:
    gc.disable()  # the modules and cases that are made until all are collected stay


def pytest_collection_finish() -> None:
    """Collections look no more at what is there by now. A run would change that with each model: it takes most of a second."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    gc.freeze = gc.unfreeze = lambda: None


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("needs the models and books kept beside the repository, and they are not there")
    return SHARED


@pytest.fixture(scope="session")
def triton() -> None:
    """Skip without Triton. Its interpreter prepares the language once per launch and module, not for every call of a function."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
    launch, prepare, prepared = interpreter.GridExecutor.__call__, interpreter._patch_lang, {}

    def launched(*args: Any, **kwargs: Any) -> None:
        prepared.clear()
        launch(*args, **kwargs)

    def once(function: Any) -> Any:
        if function.__module__ not in prepared:
            prepared[function.__module__] = prepare(function)
        return prepared[function.__module__]

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launched, once
    builder = interpreter.interpreter_builder  # computes whether integers overflow, and never says it
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@pytest.fixture
def bfloat16_as_on_a_gpu(triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter holds bfloat16 as integers: it multiplies these, and cuts float32 off where a GPU rounds."""
    import numpy as np
    import torch
    from helpers import DEVICE
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if DEVICE.type != "cpu":
        return
    convert = InterpreterBuilder.cast_impl

    def cast(self, x, to):
        if x.dtype.scalar == float32 and to.scalar == bfloat16:
            rounded = torch.tensor(x.data).bfloat16().view(torch.int16).numpy()
            return TensorHandle(rounded.view(np.uint16), bfloat16)
        return convert(self, x, to)

    def wide(x):
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == bfloat16 else x.data.astype(np.float32)

    def dot(self, a, b, c, *how):
        return TensorHandle(np.matmul(wide(a), wide(b)) + c.data, c.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte-level tokenizer, as a folder a user could name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from kvbench.harness.models.families import tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    tiny_model("llama", vocab_size=257, max_position_embeddings=64, bos_token_id=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def machine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with the tokenizer of programs and traces, as a folder a user could name."""
    from kvbench.harness.data.register_machine import WORDS
    from kvbench.harness.models.families import tiny_model
    from kvbench.lab.pretrain.tokenizer import of_words, wrapped

    folder = tmp_path_factory.mktemp("models") / "tiny-machine"
    tokenizer = wrapped(of_words(WORDS), 1)
    tokenizer.save_pretrained(folder)
    tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512, bos_token_id=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two books of generated text."""
    folder = tmp_path_factory.mktemp("books")
    for book in range(2):
        lines = [f"Line {i} of book {book}: the miller's {i % 7} sons, très {i * i % 11} naïve.\n" for i in range(120)]
        (folder / f"book{book}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, in which data sets lie under their ids, and nothing else is within reach."""
    import datasets
    import lm_eval.tasks

    from kvbench.harness.lm_eval import catalogue

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folders = [Path(lm_eval.tasks.__file__).parent / name for name in LM_EVAL_FOLDERS.split()]

    def manager(include, metadata, defaults):  # reading all of lm-eval's tasks takes long
        return lm_eval.tasks.TaskManager(include_path=folders, include_defaults=False, metadata=dict(metadata))

    monkeypatch.setattr(catalogue, "_manager", manager)
    return tmp_path
