"""The attention task on vision transformers: weights, outliers among patches, and images as a user gives them."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from helpers import bench_in
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel
from watched import Whole

from kvbench.harness.core.errors import UserError
from kvbench.harness.engine import watch as watching
from kvbench.harness.engine.own_attention import attention_by
from kvbench.harness.engine.watch import check, watch
from kvbench.harness.records import RecordStore
from kvbench.harness.report.gate_figures import figures, rule_of
from kvbench.lab.attention.figures import patch_figures
from kvbench.lab.attention.images import in_directory, shapes
from kvbench.lab.attention.notes import Notes
from kvbench.lab.attention.vision import TokenLayout, load_image_reader

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.2,
}
OUTLIER, OUTLIER_ROW, OUTLIER_COLUMN = 6, 1, 2  # a patch of the grid of 4 x 4


def vision_model(family: str, **config: Any) -> PreTrainedModel:
    """A random vision transformer with 4 x 4 patches."""
    torch.manual_seed(0)
    return AutoModel.from_config(CONFIG_MAPPING[family](**{**SIZES, **config})).float().eval()


def with_outlier(layer: int, size: float = 900.0) -> PreTrainedModel:
    """A DINOv2 with 4 registers in which one patch, the same of every image, becomes an outlier in one layer.

    Its position embedding alone has a large number in dim 0. One unit of that layer's MLP looks for it and writes a large number
    into dim 9.
    """
    hf: Any = vision_model("dinov2_with_registers", num_register_tokens=4)
    with torch.no_grad():
        embeddings = hf.embeddings
        embeddings.patch_embeddings.projection.weight[0], embeddings.patch_embeddings.projection.bias[0] = 0, 0
        embeddings.position_embeddings[..., 0] = 0
        embeddings.position_embeddings[0, 1 + OUTLIER, 0] = 30
        embeddings.cls_token[..., 0] = 0
        mlp = hf.encoder.layer[layer].mlp
        mlp.fc1.weight[0], mlp.fc1.bias[0] = 0, -10
        mlp.fc1.weight[0, 0] = 5
        mlp.fc2.weight[:, 0] = 0
        mlp.fc2.weight[9, 0] = size
    return hf


SUITE = (
    "suite: look\nversion: 1\ndescription: d\nmodel: {{id: '{folder}'}}\n"
    "task: {{name: attention, {options}}}\npolicies: [{policy}]\n"
)


def pixels(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "family", ["vit", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "clip_vision_model", "siglip_vision_model"]
)
def test_weights_chunk_by_chunk_are_the_models_own(family, monkeypatch):
    hf, seen, images = vision_model(family).double(), Whole(), pixels().double()
    monkeypatch.setattr(watching, "_MAX_SCORES", 2 * 4 * 5 * 16)  # a few queries at once
    check(hf, pixel_values=images)
    watch(hf, seen, pixel_values=images)
    with attention_by(hf, "eager"), torch.inference_mode():
        own = hf(pixel_values=images, output_attentions=True).attentions
    for layer, expected in enumerate(own):
        weights = torch.cat([c.weights for c in seen.chunks[layer]], 2)
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0, check_dtype=False)
    assert len(seen.chunks[0]) > 2
    assert not any(c.causal for of_layer in seen.chunks for c in of_layer)


def noted_of(hf, layout: TokenLayout, images: Tensor) -> dict[str, np.ndarray]:
    notes = Notes(layout.tokens, 4)
    watch(hf, notes, pixel_values=images)
    return notes.by_token() | {"grid": np.array([layout.rows, layout.columns, layout.special, layout.registers])}


@pytest.mark.parametrize("layer", [0, 1])
def test_a_patch_made_an_outlier_in_a_layer_is_found_there(layer):
    hf, layout = with_outlier(layer), TokenLayout(4, 4, 5, 4)
    found = patch_figures(noted_of(hf, layout, pixels()), 150)
    assert [x["outliers"] for x in found["layers"]] == [1 / 16 if i >= layer else 0 for i in range(2)]
    assert found["over_cutoff"] == found["outliers"] == 1 / 16
    assert [(x["row"], x["column"], x["times"]) for x in found["positions"]] == [(OUTLIER_ROW, OUTLIER_COLUMN, 2)]
    assert found["positions"][0]["norm"] == found["layers"][-1]["norm_largest"] > 700
    assert patch_figures(noted_of(hf, layout, pixels()), 1e6)["over_cutoff"] == 0


def test_norms_and_attention_are_those_of_their_definitions():
    hf, layout = with_outlier(0), TokenLayout(4, 4, 5, 4)
    found = patch_figures(noted_of(hf, layout, pixels()), 150)
    with attention_by(hf, "eager"), torch.inference_mode():
        out = hf(pixel_values=pixels(), output_attentions=True, output_hidden_states=True)
    patches = out.hidden_states[1][:, 5:].norm(dim=-1).numpy()
    assert found["layers"][0]["norm_median"] == pytest.approx(np.median(patches), rel=1e-5)
    received = out.attentions[1].mean((0, 1, 2))
    others = [5 + i for i in range(16) if i != OUTLIER]
    assert found["layers"][1]["to_outlier"] == pytest.approx(float(received[5 + OUTLIER]), abs=1e-6)
    assert found["layers"][1]["to_patch"] == pytest.approx(float(received[others].mean()), abs=1e-6)
    assert found["layers"][1]["to_register"] == pytest.approx(float(received[1:5].mean()), abs=1e-6)


def run_suite(tmp_path, folder, options, *more, policy="dense"):
    (tmp_path / "look.yaml").write_text(SUITE.format(folder=folder, options=options, policy=policy))
    return bench_in("run", "look.yaml", "--results", "r", "--threads", 1, *more, cwd=tmp_path)


@pytest.mark.slow("takes seconds")
def test_a_suite_on_shapes_as_a_user_runs_it(tmp_path):
    folder = tmp_path / "dino"
    with_outlier(0).save_pretrained(folder)
    ran = run_suite(tmp_path, folder, "data: shapes, samples: 3, map_tokens: 6")
    assert ran.returncode == 0, ran.stderr
    record = json.loads(next((tmp_path / "r").rglob("dense*.json")).read_text())
    assert record["data"]["source"] == "shapes drawn from seed 0"
    assert "tokens" not in record["cell"]["task"]
    metrics = record["metrics"]
    assert (metrics["samples"], metrics["tokens"], metrics["patches"]["registers"]) == (3, 21, 4)
    assert metrics["patches"]["outliers"] == 1 / 16
    assert {(x["dim"], x["text"]) for x in metrics["massive"]} <= {(9, "patch")}
    checked = bench_in("records", "verify", "r", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout
    assert all(rule_of(r, name) for r in RecordStore(tmp_path / "r").read_all()[0] for name, _ in figures(r))
    assert bench_in("leaderboard", "--results", "r", cwd=tmp_path).returncode == 0
    page = (tmp_path / "r" / "README.md").read_text()
    assert "An image is 4 x 4 patches, with 5 special tokens, 4 of them registers, before them." in page
    assert "Most often they are at row 1, column 2 (3 times)." in page
    again = run_suite(tmp_path, folder, "data: shapes, samples: 3, map_tokens: 6", "--dry-run")
    assert again.returncode == 0, again.stderr
    assert run_suite(tmp_path, folder, "data: shapes, samples: 3", policy="{name: h2o, capacity: 8}").returncode == 2


@pytest.fixture
def photos(tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="Pillow, of the extra 'vision', is not installed")
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for number, name in enumerate(["b.png", "a.JPG", "more/c.jpeg"]):
        pillow.fromarray(shapes(1).load(number)).save(folder / name)
    return folder


def test_images_of_a_directory_are_sorted_and_decoded(photos):
    found = in_directory(photos)
    assert (found.source, found.count) == ("local a.JPG, b.png, c.jpeg", 3)
    np.testing.assert_array_equal(found.load(1), shapes(1).load(0))
    (photos / "b.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="b.png: not a readable image"):
        found.load(1)


@pytest.mark.slow("takes seconds")
def test_a_model_with_its_image_processor_reads_photographs(photos, tmp_path):
    from transformers import BitImageProcessorPil

    folder = tmp_path / "dino"
    with_outlier(0).save_pretrained(folder)
    own = BitImageProcessorPil(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32})
    own.save_pretrained(folder)
    read = load_image_reader(folder)
    image = in_directory(photos).load(0)
    expected = own(images=[image], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(read.pixels([image]), expected)
    ran = run_suite(tmp_path, folder, "data: images, samples: 3", "--data", photos)
    assert ran.returncode == 0, ran.stderr
    short = run_suite(tmp_path, folder, "data: images, samples: 9", "--data", photos)
    assert "has 3 images, not the 9 asked for; set samples lower" in short.stderr
