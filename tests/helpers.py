"""Tiny random models, tokens, commands, and the names of the engine that most of its tests use.

Importing this sets PyTorch up. Nothing is downloaded.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

DEVICE = torch.device(os.environ.get("BENCH_TEST_DEVICE", "cpu"))  # `make gpu` runs the equalities on CUDA
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels for CUDA run in Triton's interpreter; read when it is imported

from kvbench.harness.core.device import use_full_float32
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import CachedDecoder, decoder
from kvbench.harness.engine.method import EAGER
from kvbench.harness.engine.model import Model, adopt
from kvbench.harness.models.families import tiny_model
from kvbench.policies.dense import Dense
from kvbench.policies.h2o import H2O
from kvbench.policies.random import Random
from kvbench.policies.recompute_window import RecomputeWindow
from kvbench.policies.sink_window import SinkWindow
from kvbench.policies.snapkv import SnapKV
from kvbench.policies.window import Window

FAMILIES = ["llama", "qwen3", "gpt_neox"]

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # faster for tiny models
use_full_float32(DEVICE)


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


def change_config(folder: Path, **changes: object) -> None:
    """Change entries of a model's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a model's weights. `change` edits the tensors by name in place."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
