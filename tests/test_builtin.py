"""The built-in models are small, checked, described, and the same everywhere."""

import json
from pathlib import Path

import pytest
import torch

from kvbench.harness.data.prose import Prose
from kvbench.harness.data.stream import opening
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.models.hub import builtins, model_directory
from kvbench.harness.models.load import load_model, load_tokenizer
from kvbench.lab.pretrain.config import load
from kvbench.policies.dense import Dense

LOGITS = Path(__file__).with_name("builtin_logits.json")
_TOKENS = 64
_SHOWN = 16  # logits kept of every eighth token


def logits(name: str) -> list[list[float]]:
    """Logits on the beginning of the generated prose, in float32 on the CPU."""
    directory = model_directory(f"builtin:{name}", None, False)
    read = decoder(load_model(directory, "float32", torch.device("cpu")), CacheConfig(Dense()))
    ids = load_tokenizer(directory)(Prose(0).text(600), add_special_tokens=True)["input_ids"][:_TOKENS]
    found = read(torch.tensor([ids]))[0]
    return [[round(float(x), 6) for x in row[:: len(row) // _SHOWN][:_SHOWN]] for row in found[7::8]]


@pytest.mark.parametrize("name", builtins())
def test_a_built_in_model_is_small_checked_and_has_a_card(name):
    directory = model_directory(f"builtin:{name}", None, False)
    assert (directory / "model.safetensors").stat().st_size <= 12 * 2**20
    model = load_model(directory, "float32", torch.device("cpu"))
    assert model.check <= 1
    wanted = load(name)
    assert opening(load_tokenizer(directory)) == list(range(wanted.sinks))
    assert getattr(model.hf.config, "zero_sink", False) == wanted.zero_sink
    seen = wanted.steps * wanted.training.batch * wanted.training.sample
    assert f"{seen:,} tokens" in (directory / "README.md").read_text()
    last = json.loads((directory / "training.jsonl").read_text().splitlines()[-1])
    assert last["tokens"] == seen


@pytest.mark.parametrize("name", builtins())
def test_its_logits_are_those_of_the_day_it_was_made(name):
    """This holds for every supported torch, on the CPU in float32. After a new pretraining: `python tests/test_builtin.py`."""
    stored = json.loads(LOGITS.read_text())
    torch.testing.assert_close(torch.tensor(logits(name)), torch.tensor(stored["logits"][name]), atol=1e-4, rtol=0)


if __name__ == "__main__":
    found = {name: logits(name) for name in builtins()}
    LOGITS.write_text(json.dumps({"made_with": torch.__version__, "logits": found}) + "\n")
