"""Encoders that are watched: with a head, without it, and with files that are incomplete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

from kvbench.harness.core.errors import UserError
from kvbench.harness.engine.own_attention import attention_by
from kvbench.harness.models.load import load_model
from kvbench.lab.attention.measure import load_watched

CPU = torch.device("cpu")


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


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
