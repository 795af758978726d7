"""Golden numbers. Change them only together with NUMERICS_VERSION; `python tests/test_golden.py` adds those that are missing."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from every_policy import evicting, instances
from factories import default_policies
from helpers import decoder, in_blocks, model_of, nll, tokens_of

from kvbench.harness.core.plugins import is_ours, policy_class
from kvbench.harness.engine.decoder import CacheConfig, Evict
from kvbench.harness.records import NUMERICS_VERSION
from kvbench.policies.merges import positions_for

pytestmark = pytest.mark.fast


GOLDEN = Path(__file__).with_name("golden.json")
MOMENTS: dict[str, Evict] = {"": 1, " every 5": 5, " prompt": "prompt"}
LENGTH, PROMPT = 48, 24
OTHERS = [name for name in default_policies() if is_ours(policy_class(name)) and name not in evicting()]
ROWS = OTHERS + [
    name + moment for name in evicting() for moment in MOMENTS if not policy_class(name).outcome or "prompt" in moment
]


def measured(row: str, folder: Path) -> list[float]:
    """NLLs of a policy, and the moment of eviction if it is not every step; after a prompt, of what follows it."""
    name, _, moment = row.partition(" ")
    evict = MOMENTS[row.removeprefix(name)]
    policy = instances(folder, [name])[name]
    capacity = 12 if policy.evicts and not policy.outcome else None
    config = CacheConfig(policy, capacity, positions_for(policy), seed=1, evict=evict)
    read, tokens, logits = decoder(model_of("llama"), config), tokens_of(LENGTH), []
    if moment == "prompt":
        logits, tokens = [read.read_prompt(tokens[:, :PROMPT], 16)[:, None]], tokens[:, PROMPT - 1 :]
    blocks = in_blocks(read, tokens[:, len(logits) :], 16)
    return [round(float(x), 5) for x in nll(torch.cat([*logits, blocks], 1), tokens)[0]]


@pytest.mark.parametrize("row", ROWS)
def test_golden_nlls_have_not_moved(row, tmp_path):
    """If numbers change on purpose, raise NUMERICS_VERSION and run `python tests/test_golden.py`."""
    golden = json.loads(GOLDEN.read_text())
    assert golden["numerics_version"] == NUMERICS_VERSION
    if row not in golden["nll"]:
        pytest.skip(f"no golden numbers of {row}: run `python tests/test_golden.py`")
    np.testing.assert_allclose(measured(row, tmp_path), golden["nll"][row], atol=2e-4)


def test_there_are_no_numbers_of_what_is_gone():
    assert set(json.loads(GOLDEN.read_text())["nll"]) <= set(ROWS)


if __name__ == "__main__":  # rows of this version stay as they are
    golden = json.loads(GOLDEN.read_text())
    old = golden["nll"] if golden["numerics_version"] == NUMERICS_VERSION else {}
    with tempfile.TemporaryDirectory() as temporary:
        numbers = {row: measured(row, Path(temporary)) for row in ROWS}
    moved = [row for row in ROWS if row in old and not np.allclose(numbers[row], old[row], rtol=0, atol=2e-4)]
    if moved:
        sys.exit(f"{', '.join(moved)}: the numbers have moved; raise NUMERICS_VERSION")
    GOLDEN.write_text(json.dumps({"numerics_version": NUMERICS_VERSION, "nll": numbers | old}) + "\n")
