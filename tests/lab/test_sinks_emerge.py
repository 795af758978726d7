"""Models kept while pretraining: training is the same without them, and their figures become curves over steps."""

from __future__ import annotations

import pytest
from conftest import bench_in
from test_pretrain import trained

from kvbench.harness.records import RecordStore
from kvbench.harness.report.sections import over_steps, section

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow("training")]  # accelerate and the Trainer give warnings
KEPT = ["tiny-step-000000", "tiny-step-000001", "tiny-step-000003", "tiny-step-000006"]
TRAINING = {"tokens": 70 * 2 * 6, "sample": 70, "batch": 2, "compile": False, "probe_every": 2, "checkpoint_every": 4}
PROSE = {"pg19": 0, "prose": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A training that keeps models, stopped and resumed, beside one that keeps none."""
    folder = tmp_path_factory.mktemp("kept")
    _, plain = trained(folder / "plain", None, training=TRAINING, text=PROSE)
    keeping = TRAINING | {"keep": [0, 1], "keep_every": 3}
    trained(folder / "kept", None, steps=2, training=keeping, text=PROSE)
    _, log = trained(folder / "kept", None, training=keeping, text=PROSE)
    return folder, plain, log


def test_keeping_models_does_not_change_training(made):
    folder, plain, log = made
    assert log == plain
    final = [(folder / name / "model/model.safetensors").read_bytes() for name in ("plain", "kept")]
    assert final[0] == final[1]


def test_a_folder_of_models_is_measured_and_drawn_over_steps(made, tmp_path):
    folder, _, _ = made
    settings = ["data=prose", "tokens=64", "samples=2", "capacity=16"]
    command = ["run", "sinks-emerge", "--model", folder / "kept/models", "--results", "results"]
    done = bench_in(*command, *(x for s in settings for x in ("--set", s)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records, problems = RecordStore(tmp_path / "results").read_all()
    assert not problems
    assert sorted({r.cell.model.id for r in records}) == KEPT
    assert len(records) == 3 * len(KEPT)
    _, *table, chart = over_steps("sinks-emerge", records)
    assert [row.split(" | ")[:2] for row in table[2:-1]] == [["| tiny", step] for step in "0136"]
    points = [v for panel in chart.spec["hconcat"] for v in panel["data"]["values"]]
    assert {v["figure"] for v in points} == {"sink heads", "largest activation", "perplexity"}
    wanted = {r.cell.model.id: r.metrics.sink_heads for r in records if r.cell.policy == "dense"}
    assert {f"tiny-step-{v['step']:06d}": v["value"] for v in points if v["figure"] == "sink heads"} == wanted
    assert len([v for v in points if v["figure"] == "perplexity"]) == 2 * len(KEPT)
    assert "## sinks-emerge: over training steps" in section(records[0], records).text
    assert "<svg" in chart.svg("light")
