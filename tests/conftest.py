"""Tiny random models, tokens and model folders that tests share. Nothing is downloaded."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # huggingface_hub reads it when it is imported

import pytest
import torch
import transformers
from hypothesis import settings

DEVICE = torch.device(os.environ.get("BENCH_TEST_DEVICE", "cpu"))  # `make gpu` runs the equalities on CUDA
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels for CUDA run in Triton's interpreter; read when it is imported

from kvbench.harness.core.device import use_full_float32  # noqa: E402
from kvbench.harness.engine.model import Model, adopt  # noqa: E402
from kvbench.harness.models.families import tiny_model  # noqa: E402

SHARED = Path(__file__).parents[2] / "shared"
LM_EVAL_FOLDERS = "arc hellaswag lambada openbookqa piqa winogrande longbench ruler gsm8k minerva_math aime"  # of our suites
FAMILIES = ["llama", "qwen3", "gpt_neox"]

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # faster for tiny models
use_full_float32(DEVICE)
settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")


def pytest_sessionstart() -> None:
    gc.disable()  # the modules and cases that are made until all are collected stay


def pytest_collection_finish() -> None:
    """Collections look no more at what is there by now. A run would change that with each model: it takes most of a second."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    gc.freeze = gc.unfreeze = lambda: None


@cache
def model_of(family: str, dtype: torch.dtype = torch.float32) -> Model:
    """A tiny random model, adopted."""
    return adopt(tiny_model(family, vocab_size=96).to(DEVICE, dtype))


def tokens_of(length: int, streams: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(96, (streams, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def in_blocks(read, tokens: torch.Tensor, size: int) -> torch.Tensor:
    """All logits of a stream that is read in blocks."""
    return torch.cat([read(block) for block in tokens.split(size, 1)], 1)


def nll(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """NLL of every token but the first. [B, T - 1]."""
    return -logits[:, :-1].double().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


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


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte-level tokenizer, as a folder a user could name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

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


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def bench_in(*args: object, cwd: Path) -> Done:
    """Runs the command in this process, because a new one takes seconds to start."""
    from kvbench.harness.cli import main

    out, err = io.StringIO(), io.StringIO()
    before, argv, threads = Path.cwd(), sys.argv, torch.get_num_threads()
    os.chdir(cwd)
    sys.argv = ["bench", *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
            main()
    finally:
        os.chdir(before)
        sys.argv = argv
        torch.set_num_threads(threads)
    return Done(int(left.value.code or 0), out.getvalue(), err.getvalue())


def bench(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Runs the command in this process and folder. -> exit code, stdout, stderr."""
    done = bench_in(*args, cwd=Path.cwd())
    capsys.readouterr()  # discards earlier output
    return done.returncode, done.stdout, done.stderr


def bench_process(*args: object, cwd: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command in a new process."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "COLUMNS": "200"}
    command = [sys.executable, "-m", "kvbench", *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, **how)
