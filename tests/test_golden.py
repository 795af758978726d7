"""Golden numbers. Change them only together with NUMERICS_VERSION."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import in_blocks, model_of, nll, tokens_of
from factories import default_policies

from kvbench.harness.core.plugins import is_ours, policy_class
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.loop import decoder
from kvbench.harness.records import NUMERICS_VERSION

GOLDEN = Path(__file__).with_name("golden.json")
OURS = [name for name in default_policies() if is_ours(policy_class(name))]  # not those of plug-ins


def measured(policy: str) -> list[float]:
    made = policy_class(policy)()
    config = CacheConfig(made, 12 if made.evicts else None, seed=1)
    tokens = tokens_of(48)
    return [round(float(x), 5) for x in nll(in_blocks(decoder(model_of("llama"), config), tokens, 16), tokens)[0]]


@pytest.mark.parametrize("policy", OURS)
def test_golden_nlls_have_not_moved(policy):
    """If numbers change on purpose, raise NUMERICS_VERSION and run `python tests/test_golden.py`."""
    golden = json.loads(GOLDEN.read_text())
    assert golden["numerics_version"] == NUMERICS_VERSION
    assert policy in golden["nll"], f"no golden numbers of {policy}: run `python tests/test_golden.py`"
    np.testing.assert_allclose(measured(policy), golden["nll"][policy], atol=2e-4)


if __name__ == "__main__":
    numbers = {policy: measured(policy) for policy in OURS}
    GOLDEN.write_text(json.dumps({"numerics_version": NUMERICS_VERSION, "nll": numbers}) + "\n")
