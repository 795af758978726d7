"""TF32, which GPU images may allow by environment, is turned off for a run, and records say so."""

import contextlib
import json

import pytest
import torch

from kvbench.harness.core.device import allows_tf32
from kvbench.harness.models.load import load_model
from kvbench.harness.run import machine
from kvbench.harness.run.request import RunRequest

CUDA = torch.device("cuda")


@pytest.fixture
def allowed():
    """Allow TF32, like an image that sets TORCH_ALLOW_TF32_CUBLAS_OVERRIDE."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def test_loading_a_model_onto_a_gpu_turns_it_off(allowed, model_dir):
    assert allows_tf32(CUDA)
    with contextlib.suppress(RuntimeError, AssertionError):  # this machine may have no CUDA
        load_model(model_dir, "float32", CUDA)
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    assert allows_tf32(CUDA) is False


@pytest.mark.slow("measures suites")
@pytest.mark.parametrize("state", [None, True, False])
def test_the_record_says_whether_it_is_allowed(tmp_path, monkeypatch, state):
    (tmp_path / "s.yaml").write_text(
        'suite: s\nversion: 1\nmodel: {id: "builtin:sink_1"}\ntask: {name: perplexity, data: prose, tokens: 40}\n'
        "policies: [{name: window, capacity: 8}]\n"
    )
    monkeypatch.setattr(machine, "allows_tf32", lambda device: state, raising=False)
    request = RunRequest(str(tmp_path / "s.yaml"), threads=1, device="cpu")
    (record,) = request.measure(tmp_path / "results", request.cells(), progress=False)
    (file,) = (tmp_path / "results").rglob("*.json")
    facts = json.loads(file.read_text())["facts"]
    assert record.facts.tf32 is state
    assert facts.get("tf32", "absent") == ("absent" if state is None else state)
