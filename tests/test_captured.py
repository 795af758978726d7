"""CUDA graphs of decode steps and of chunks of a walk, on a CPU: stand-ins take the place of graphs and of streams."""

from unittest.mock import MagicMock

import pytest
import torch
from factories import needs_triton
from helpers import DEVICE, H2O, CacheConfig, CachedDecoder, Dense, SinkWindow, adopt, model_of, nll, tiny_model, tokens_of
from test_fastcheck import Graph

from kvbench.harness.engine.method import FASTEST, KERNELS, PLAIN_WALK, RAN
from kvbench.harness.kernels import captured, choose, cuda
from kvbench.harness.kernels.captured import PROCESS, CapturedSteps, CudaGraph, replayable
from kvbench.policies import KeyNorm, Policy

on_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="a stand-in where there is no CUDA")


@pytest.fixture(autouse=True)
def unharmed(monkeypatch):
    """A process in which no capture has failed."""
    monkeypatch.setattr(PROCESS, "failed", "")


def decoders(config: CacheConfig, graphs: CapturedSteps) -> tuple[CachedDecoder, CachedDecoder]:
    """A plain decoder, and one whose steps are captured."""
    plain, read = CachedDecoder(model_of("llama"), config), CachedDecoder(model_of("llama"), config)
    read.graphs = graphs
    return plain, read


@on_cpu
@pytest.mark.parametrize(
    "config", [CacheConfig(H2O(), 9), CacheConfig(SinkWindow(2), 9, "stream"), CacheConfig(Dense())], ids=str
)
def test_captured_steps_follow_the_host(config, monkeypatch):
    """Covers filling, eviction, blocks between steps, and growth: one capture per state, the same logits."""
    monkeypatch.setattr(Graph, "of_compiled_code", [])
    plain, read = decoders(config, CapturedSteps(Graph, after=1))
    tokens = tokens_of(600)
    sizes = [1] * 14 + [30] + [1] * 8 + [220] + [1] * 8
    at = 0
    for size in sizes:
        block = tokens[:, at : at + size]
        torch.testing.assert_close(read(block), plain(block))
        at += size
    assert read.kept() == plain.kept()
    # Each state runs eagerly once: filling and full, or the first 256 slots and the next, grown.
    assert len(Graph.of_compiled_code) == 2
    assert read.graphs.replayed == sizes.count(1) - 2
    fork = read.fork([0])
    assert fork.graphs is not read.graphs
    torch.testing.assert_close(fork(tokens[:, :1]), plain(tokens[:, :1]))


@pytest.mark.slow("takes seconds")
@on_cpu
@pytest.mark.parametrize("every", [2, 256])
def test_graphs_are_kept_while_evictions_come_and_go(monkeypatch, every):
    """A thousand steps meet every phase twice, a second thousand captures none, and the phases are few."""
    monkeypatch.setattr(Graph, "of_compiled_code", [])
    _, read = decoders(CacheConfig(SinkWindow(2), 9, evict=every), CapturedSteps(Graph))
    tokens = tokens_of(2000).split(1, 1)
    for token in tokens[:1000]:
        read(token)
    captured_at_first, replayed = len(Graph.of_compiled_code), read.graphs.replayed
    assert 2 <= captured_at_first <= 4
    for token in tokens[1000:]:
        read(token)
    assert (len(Graph.of_compiled_code), read.graphs.replayed) == (captured_at_first, replayed + 1000)


@on_cpu
def test_a_step_after_a_failed_capture_reads_nothing_that_the_capture_made():
    """The stand-in runs the step, as a capture does on the host, and then undoes all that it would not have computed."""
    plain, read = decoders(CacheConfig(H2O(), 6), CapturedSteps(lambda step, tokens: fail(step, tokens), after=1))
    walk = read.walks[0]

    def fail(step, tokens):
        tensors = walk.slots.tensors
        stored = tensors.keys.tensor, tensors.values.tensor, tensors.rank, tensors.position
        kept = [*stored, tensors.free, read._step, *tensors.states.values()]
        before = [x.clone() for x in kept]
        step(tokens)
        for x, old in zip(kept, before, strict=True):
            x.copy_(old)
        rank, own = walk.steady
        for x in (rank, own.factors):
            x.zero_()
        raise RuntimeError("the capture was invalidated\nmore")

    for block in tokens_of(20).split([8, *[1] * 12], 1):
        torch.testing.assert_close(read(block), plain(block))
    assert read.kept() == plain.kept()
    assert (read.graphs.refused, read.graphs.replayed) == ("the capture was invalidated", 0)


def test_after_a_failed_capture_the_process_captures_no_more():
    """A decoder with a graph goes on replaying it, and others say why they have none."""

    def refuse(step, tokens):
        raise RuntimeError("out of memory")

    config = CacheConfig(H2O(), 6)
    plain, early = decoders(config, CapturedSteps(Graph, after=1))
    _, fails = decoders(config, CapturedSteps(refuse, after=1))
    _, late = decoders(config, CapturedSteps(Graph, after=1))
    tokens = tokens_of(20).split(1, 1)
    for read in (plain, early, fails):
        read(torch.cat(tokens[:8], 1))
    for token in tokens[8:12]:
        torch.testing.assert_close(early(token), plain(token))
        fails(token)
    assert PROCESS.failed == "out of memory"
    for token in tokens[12:]:
        torch.testing.assert_close(early(token), plain(token))
        late(token)
    assert early.graphs.replayed == 11
    assert late.graphs.replayed == 0
    assert late.graphs.refused == "an earlier capture failed: out of memory"


@on_cpu
@pytest.mark.parametrize("fails_at", ["end", "step"])
def test_the_stream_is_restored_after_a_failed_capture(monkeypatch, fails_at):
    """A capture has a stream of its own, which is left, and the error is that of the capture."""
    cuda = MagicMock()
    cuda.stream.return_value.__exit__.return_value = False
    cuda.CUDAGraph.return_value.capture_end.side_effect = [None, RuntimeError("previous error")]  # of the pool's graph, of ours
    monkeypatch.setattr(torch, "cuda", cuda)
    for cached in (captured._stream, captured._pool):
        monkeypatch.setattr(captured, cached.__name__, cached.__wrapped__)

    def step(tokens):
        entered, left = cuda.stream.return_value.__enter__.call_count, cuda.stream.return_value.__exit__.call_count
        assert entered == left + 1
        if fails_at == "step":
            raise RuntimeError("a layer waits")
        return tokens

    with pytest.raises(RuntimeError, match="a layer waits" if fails_at == "step" else "previous error"):
        CudaGraph(step, torch.zeros(1, 1))
    assert cuda.stream.return_value.__exit__.call_count == 2
    assert cuda.CUDAGraph.return_value.capture_end.call_count == 2, "also after a failed step"
    cuda.set_stream.assert_not_called()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device: captured steps")
@pytest.mark.parametrize("config", [CacheConfig(H2O(), 9), CacheConfig(SinkWindow(2), 9), CacheConfig(Dense())], ids=str)
def test_captured_on_cuda(config):
    model, tokens = model_of("llama"), tokens_of(400)
    fast, plain = CachedDecoder(model, config, method=FASTEST), CachedDecoder(model, config, method=PLAIN_WALK)
    fast.graphs = CapturedSteps(after=1)
    for size in [1] * 14 + [30] + [1] * 8 + [220] + [1] * 8:
        block, tokens = tokens[:, :size], tokens[:, size:]
        torch.testing.assert_close(fast(block), plain(block), atol=2e-4, rtol=0)
    assert fast.graphs.refused == ""
    assert fast.graphs.replayed > 20
    assert fast.kept() == plain.kept()


class OnCuda:
    """Tokens that say they are on CUDA."""

    device = torch.device("cuda")


@pytest.mark.parametrize("why", ["", "a step waits"])
def test_what_waits_in_the_dry_run_is_never_captured(monkeypatch, why):
    calls = []
    monkeypatch.setattr(captured, "dry_run", lambda step, tokens: calls.append("dry run") or (step(tokens), why))
    graphs = CapturedSteps(lambda step, tokens: calls.append("capture") or step, after=3)
    for _ in range(6):
        graphs("slots", "phase", None, lambda tokens: calls.append("step"), OnCuda())
    assert calls.count("step") == 6
    eager = ["step", "step", "dry run", "step"]
    assert calls == [*eager, *(["step"] * 3 if why else ["capture", "step", "step", "step"])]
    assert (graphs.refused, graphs.replayed, PROCESS.failed) == (why, 0 if why else 3, "")


@pytest.fixture
def captures(monkeypatch) -> list[int]:
    """Walks are replayed in chunks of four tokens. Notes each capture."""
    made: list[int] = []
    monkeypatch.setitem(choose._MODULES, DEVICE.type, cuda)
    monkeypatch.setattr(cuda, "_GRAPH_DEVICES", {DEVICE.type})
    monkeypatch.setattr(cuda, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(cuda, "replayable", lambda launches, device: made.append(1) or launches)
    return made


class OldNorms(Policy):
    """A policy of a statistic that is computed when a token is written."""

    statistics = (KeyNorm(),)

    def importance(self, view):
        return view.state(self.statistics[0]).masked_fill(view.age < 2, torch.inf)


@pytest.mark.slow("Triton's interpreter")
@needs_triton
@pytest.mark.parametrize("policy", [H2O(), OldNorms()], ids=lambda p: type(p).__name__)
def test_a_walk_in_graphs_is_the_plain_one(captures, policy):
    """Blocks longer than the one before and shorter, in whole chunks or not; a fork; filling, full and between."""
    model, tokens = adopt(tiny_model("llama", num_hidden_layers=1).to(DEVICE)), tokens_of(33, 2)
    config = CacheConfig(policy, 7)
    fast, plain = CachedDecoder(model, config, 2, KERNELS), CachedDecoder(model, config, 2, PLAIN_WALK)
    before = RAN["walk in graphs"]
    ours, theirs = (torch.cat([read(x) for x in tokens.split([10, 13, 1, 9], 1)], 1) for read in (fast, plain))
    torch.testing.assert_close(nll(ours, tokens), nll(theirs, tokens), atol=1e-4, rtol=0)
    assert fast.kept() == plain.kept()
    assert RAN["walk in graphs"] - before >= 4
    one_stream, twin = fast.fork([1]), plain.fork([1])
    for block in tokens[:1, :10].split([5, 5], 1):
        torch.testing.assert_close(one_stream(block), twin(block), atol=2e-4, rtol=0)
    torch.testing.assert_close(fast(tokens[:, :6]), plain(tokens[:, :6]), atol=2e-4, rtol=0)
    assert fast.kept() == plain.kept()
    assert one_stream.kept() == twin.kept()
    assert len(captures) <= 4


@pytest.mark.slow("Triton's interpreter")
@needs_triton
def test_a_walk_whose_launches_can_not_be_captured_goes_on(captures, monkeypatch):
    monkeypatch.setattr(cuda, "replayable", lambda launches, device: None)
    model, tokens = adopt(tiny_model("llama", num_hidden_layers=1).to(DEVICE)), tokens_of(14)
    fast, plain = CachedDecoder(model, CacheConfig(H2O(), 5), 1, KERNELS), CachedDecoder(model, CacheConfig(H2O(), 5))
    before = RAN["walk in graphs"]
    torch.testing.assert_close(fast(tokens), plain(tokens), atol=2e-4, rtol=0)
    assert fast.kept() == plain.kept()
    assert RAN["walk in graphs"] == before


@pytest.mark.slow("Triton's interpreter")
def test_launches_that_can_not_be_captured_are_made_one_by_one(monkeypatch):
    """And nothing is captured in this process from then on."""
    monkeypatch.setattr(PROCESS, "failed", "")

    def refuses(work, device):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(captured, "recorded", refuses)
    assert replayable(lambda: None, DEVICE) is None
    assert PROCESS.failed == "operation not permitted when stream is capturing"
    monkeypatch.setattr(captured, "recorded", lambda work, device: pytest.fail("another capture"))
    assert replayable(lambda: None, DEVICE) is None
