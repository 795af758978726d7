"""The divergence task computes the KL divergence of its definition, and its figures follow from the trace."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from factories import cell_record
from helpers import EAGER, H2O, CacheConfig, Dense, RecomputeWindow, SinkWindow, Window, decoder, in_blocks, model_of, tokens_of

from kvbench.harness.core.intervals import interval
from kvbench.harness.report.compare import differences
from kvbench.harness.tasks.divergence import COMPARED, Divergence, DivergenceOptions, figures
from kvbench.harness.tasks.task import Job

SAMPLES, TOKENS = 3, 40
IDS = tokens_of(TOKENS, SAMPLES, seed=5)
DATA = SimpleNamespace(tokens=SAMPLES * TOKENS, batch=lambda start, stop: IDS[start:stop].cpu())


def measured(policy, capacity, tmp_path, block=200, prompt=None, evict=1):
    """Figures and trace of a cell."""
    options = DivergenceOptions(samples=SAMPLES, tokens=TOKENS, prompt=prompt)
    config = CacheConfig(policy, capacity, evict=evict)
    job = Job(model_of("llama"), config, DATA, block, EAGER, tmp_path / "x.npy", lambda *_: None)
    return Divergence.run(options, job), np.load(tmp_path / "x.npy")


def whole_logits(policy, capacity):
    """Logits of all samples, each read alone. [N, T, V] float64."""
    config = CacheConfig(policy, capacity)
    return torch.cat([in_blocks(decoder(model_of("llama"), config, 1, EAGER), ids[None], 7) for ids in IDS]).double()


@pytest.mark.parametrize("block", [200, 40, 9])
@pytest.mark.parametrize("policy", [Window(), SinkWindow(2), H2O(), RecomputeWindow()], ids=lambda p: type(p).__name__)
def test_kl_is_torchs_of_two_runs_with_all_logits(policy, block, tmp_path):
    """kl_div(input, target) is KL(target || input): dense is the target. It is far from the other direction."""
    metrics, trace = measured(policy, 8, tmp_path, block)
    dense, ours = whole_logits(Dense(), None)[:, :-1], whole_logits(policy, 8)[:, :-1]
    p, q = dense.log_softmax(-1), ours.log_softmax(-1)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).cpu().numpy()
    swapped = torch.nn.functional.kl_div(p, q, log_target=True, reduction="none").sum(-1).cpu().numpy()
    np.testing.assert_allclose(trace["kl"], expected, atol=1e-4, rtol=1e-4)
    assert metrics.kl == pytest.approx(expected.mean(), abs=1e-5)
    assert abs(swapped.mean() - expected.mean()) > 100 * abs(metrics.kl - expected.mean()), "the direction shows"
    agrees = (dense.argmax(-1) == ours.argmax(-1)).cpu().numpy()
    assert metrics.agreement == pytest.approx(agrees.mean(), abs=1.5 / agrees.size)
    targets = IDS[:, 1:, None]
    change = (p.gather(-1, targets) - q.gather(-1, targets)).mean()
    assert metrics.nll_change == pytest.approx(float(change), abs=1e-5)
    assert metrics.nll == pytest.approx(float(-q.gather(-1, targets).mean()), abs=1e-5)


@pytest.mark.parametrize("policy", [Dense(), Window(), H2O(), RecomputeWindow()], ids=lambda p: type(p).__name__)
def test_what_never_evicts_does_not_diverge_and_what_does_only_afterwards(policy, tmp_path):
    metrics, trace = measured(policy, TOKENS if policy.evicts else None, tmp_path)
    assert trace["kl"].max() < 1e-8
    assert (metrics.agreement, metrics.nll_change) == (1.0, pytest.approx(0, abs=1e-6))
    if not policy.evicts:
        return
    _, trace = measured(policy, 8, tmp_path)
    assert trace["kl"][:, :9].max() < 1e-8, "a step attends to capacity + 1 tokens"
    assert trace["kl"][:, 9:].mean() > 1e-2


@pytest.mark.parametrize("evict", [1, "prompt"])
def test_after_a_prompt_only_what_follows_is_compared(evict, tmp_path):
    metrics, trace = measured(H2O(), 8, tmp_path, prompt=20, evict=evict)
    assert trace.shape == (SAMPLES, TOKENS - 20)
    assert [(part.from_, part.to) for part in metrics.by_position] == [(0, 32), (32, 40)]
    if evict == "prompt":
        assert trace["kl"][:, 0].max() < 1e-8, "the first comes of the prompt itself"
    else:
        np.testing.assert_allclose(trace["kl"], measured(H2O(), 8, tmp_path)[1]["kl"][:, 19:], atol=1e-4)


def drawn(shift: float, samples=130, seed=0):
    """Draw comparisons of predictions in samples of 256 tokens."""
    draw = np.random.default_rng(seed)
    compared = np.zeros((samples, 255), COMPARED)
    compared["kl"] = draw.exponential(0.02, compared.shape) + shift
    compared["agrees"] = draw.random(compared.shape) < 0.95
    compared["dense_nll"] = draw.gamma(2, 1, compared.shape)
    compared["nll"] = compared["dense_nll"] + draw.normal(shift, 0.3, compared.shape)
    return compared


def made(compared, **changes):
    task = {"name": "divergence", "samples": len(compared), "tokens": 256}
    return cell_record(figures(compared, 256) | {"kv_bytes": 640}, task=task, data={"ids_sha256": "x", "tokens": 1}, **changes)


def test_intervals_are_over_blocks_as_those_of_nll():
    compared = drawn(0.01)
    m = made(compared).metrics
    blocks = compared["kl"].astype(np.float64).sum(1)
    expected = interval(blocks, np.full(130, 255.0), 255, 0)
    assert m.kl_interval == pytest.approx([expected.low, expected.high])
    assert m.kl == pytest.approx(compared["kl"].mean(dtype=np.float64))
    assert m.agreement_interval[0] < m.agreement < m.agreement_interval[1] <= 1
    assert m.nll_change_interval[0] < m.nll_change < m.nll_change_interval[1]
    assert made(drawn(0.01, samples=100)).metrics.kl_interval is None, "25,500 tokens are too few"


def test_two_policies_are_compared_sample_by_sample():
    a, b = made(drawn(0.01)), made(drawn(0.02), policy="window")
    kl, agreement, *_ = differences(a, b)
    assert (kl.metric, kl.change, kl.verdict) == ("kl", pytest.approx(0.01, abs=1e-6), "worse")
    assert kl.high - kl.low < 1e-4, "the same draws cancel"
    assert (agreement.metric, agreement.verdict) == ("agreement", "same")
    assert differences(a, made(drawn(0.02, samples=129)))[0].verdict == "can't tell"


def test_by_position_is_the_position_of_the_token_that_is_predicted():
    compared = drawn(0)
    first, *_, last = made(compared).metrics.by_position
    assert (first.from_, first.to, last.from_, last.to) == (0, 32, 128, 256)
    assert first.kl == pytest.approx(compared["kl"][:, :31].mean(dtype=np.float64))  # no token is predicted at 0
    assert last.agreement == pytest.approx(compared["agrees"][:, 127:].mean())
