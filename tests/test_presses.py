"""kvpress' presses as contestants. A press of its form stands for kvpress itself (tests/test_kvpress.py)."""

import sys
from dataclasses import replace
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from helpers import CacheConfig, Dense, SinkWindow, decoder, model_of, nll, tokens_of

import kvbench
from kvbench.harness.core.parameters import parameters_of, policy_from
from kvbench.harness.core.source_digests import source_digest
from kvbench.harness.engine.foreigncheck import own_loop
from kvbench.harness.engine.method import EAGER, OwnLoop

KVPRESS = find_spec("kvpress") is not None
PROMPT, LATER = 64, 40
FORM = '''"""A press as kvpress writes them: hooks on every attention module while the context is open, notes on itself."""
import contextlib
from dataclasses import dataclass

class BasePress:
    @contextlib.contextmanager
    def __call__(self, model):
        hooks = [layer.self_attn.register_forward_hook(self.forward_hook, with_kwargs=True) for layer in model.model.layers]
        try:
            yield
        finally:
            self.reset()
            for hook in hooks:
                hook.remove()

    def reset(self):
        pass

    def forward_hook(self, module, args, kwargs, output):
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        if layer.keys.shape[2] == kwargs["hidden_states"].shape[1]:  # the first pass
            layer.keys, layer.values = (self.cut(x) for x in (layer.keys, layer.values))
        return output

@dataclass
class FirstAndNewest(BasePress):
    compression_ratio: float = 0.0
    first: int = 4

    def __post_init__(self):
        assert 0 <= self.compression_ratio < 1, "ratio must be below 1"

    def cut(self, x):
        newest = int(x.shape[2] * (1 - self.compression_ratio)) - self.first
        return x[:, :, [*range(self.first), *range(x.shape[2] - newest, x.shape[2])]]

@dataclass
class Twice(BasePress):
    press: BasePress

    def cut(self, x):
        return self.press.cut(self.press.cut(x))

@dataclass
class Each(BasePress):
    presses: list[BasePress]

    def cut(self, x):
        for press in self.presses:
            x = press.cut(x)
        return x

@dataclass
class DecodingPress(BasePress):
    """Forgets all tokens but the first after every `interval` of them."""
    interval: int = 16

    def __post_init__(self):
        self.steps = 0

    def reset(self):
        self.steps = 0

    def forward_hook(self, module, args, kwargs, output):
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        self.steps += module.layer_idx == 0
        if self.steps == self.interval:
            layer.keys, layer.values = (x[:, :, :1] for x in (layer.keys, layer.values))
            self.steps = 0 if module.layer_idx else self.steps
            module.masked_key_indices = self.steps
        return output
'''


@pytest.fixture
def form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the name of kvpress, which needs these transformers."""
    if KVPRESS:
        pytest.skip("kvpress itself is installed")
    (tmp_path / "kvpress" / "presses").mkdir(parents=True)
    (tmp_path / "kvpress" / "__init__.py").write_text("from kvpress.presses.base_press import *\n")
    (tmp_path / "kvpress" / "presses" / "base_press.py").write_text(FORM)
    needs(tmp_path, f"<={transformers.__version__}")
    monkeypatch.syspath_prepend(tmp_path)
    invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "kvpress"]:
        del sys.modules[name]


def needs(folder: Path, versions: str) -> None:
    (folder / "kvpress-9.dist-info").mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: kvpress\nVersion: 9\nRequires-Dist: transformers{versions}\n"
    (folder / "kvpress-9.dist-info" / "METADATA").write_text(metadata)
    (folder / "kvpress-9.dist-info" / "top_level.txt").write_text("kvpress\n")


def config(name: str, **parameters: object) -> CacheConfig:
    return CacheConfig(policy_from(f"kvpress:{name}", parameters), positions="stream")


def after_prompt(wanted: CacheConfig, tokens: torch.Tensor, attention: str = "") -> torch.Tensor:
    """NLLs of what follows the prompt, token by token."""
    read = decoder(model_of("llama"), wanted, len(tokens), replace(EAGER, own_loop=OwnLoop(attention)))
    logits = [read.read_prompt(tokens[:, :PROMPT], PROMPT)[:, None]]
    logits += [read(tokens[:, t : t + 1]) for t in range(PROMPT, PROMPT + LATER)]
    return nll(torch.cat(logits, 1), tokens[:, PROMPT - 1 :])


SINKS = CacheConfig(SinkWindow(sinks=4), 16, "stream", evict="prompt")
FIRST = {"compression_ratio": 0.75}
HALF = {"name": "kvpress:FirstAndNewest", "compression_ratio": 0.5}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("FirstAndNewest", FIRST), ("Twice", {"press": HALF}), ("Each", {"presses": (HALF, HALF)})],
)
def test_a_press_cuts_a_prompt_as_the_policy_that_keeps_the_same(form, name, parameters):
    tokens = tokens_of(PROMPT + LATER, 2)
    found, expected = after_prompt(config(name, **parameters), tokens), after_prompt(SINKS, tokens)
    assert (found - expected).abs().max() < 3e-4
    assert abs(found.mean() - expected.mean()) < 1e-5


def test_the_check_tells_a_length_that_is_wrong_and_reads_token_by_token(form):
    check = own_loop(model_of("llama"), config("FirstAndNewest", **FIRST))
    assert (check.loop.blocks, check.wrong_length) == (0, "get_seq_length says 64 after 256 tokens")


def test_what_a_press_notes_is_its_decoder_s_alone(form):
    """Two decoders in turn, and a cache without a press between them, on one model."""
    tokens, wanted = tokens_of(40), config("DecodingPress", interval=8)
    alone = decoder(model_of("llama"), wanted, 1, EAGER)
    expected = torch.cat([alone(tokens[:, t : t + 1]) for t in range(40)], 1)
    dense = decoder(model_of("llama"), CacheConfig(Dense()))(tokens)
    one, other = (decoder(model_of("llama"), wanted, 1, EAGER) for _ in range(2))
    plain = decoder(model_of("llama"), CacheConfig(policy_from("hf:DynamicCache", {}), positions="stream"))
    found = []
    for t in range(40):
        found.append(one(tokens[:, t : t + 1]))
        if t % 3 == 0:
            other(tokens[:, t : t + 1])
        assert (plain(tokens[:, t : t + 1])[:, 0] - dense[:, t]).abs().max() < 1e-3
    assert torch.equal(torch.cat(found, 1), expected)
    assert (expected - dense).abs().max() > 1e-2, "nothing was evicted"
    assert not any(hasattr(module, "masked_key_indices") for module in model_of("llama").hf.modules())


def test_a_fork_takes_the_notes_along(form):
    tokens, wanted = tokens_of(40), config("DecodingPress", interval=8)
    read = decoder(model_of("llama"), wanted, 1, EAGER)
    for t in range(13):
        read(tokens[:, t : t + 1])
    fork = read.fork([0])
    both = [torch.cat([r(tokens[:, t : t + 1]) for t in range(13, 40)], 1) for r in (read, fork)]
    assert torch.equal(*both)


def test_an_audit_of_a_press(form):
    """What a press does is checked with the positions that kvpress' pipeline passes."""
    result = kvbench.audit(policy_from("kvpress:FirstAndNewest", FIRST), model_of("llama").hf)
    verdicts = {check.name: check.verdict for check in result.checks}
    assert {check.name for check in result.failed} == {"length"}, f"{result}"
    assert verdicts["eviction"] == verdicts["positions"] == verdicts["second_turn"] == verdicts["memory"] == "pass"


def test_its_record_names_versions_presses_inside_and_sources(form, tmp_path):
    wanted = config("Each", presses=(HALF, HALF)).policy
    assert parameters_of(wanted) == {"attention": None, "presses": [HALF | {"attention": None}] * 2}
    assert wanted.code == f"kvpress 9, transformers {transformers.__version__}"
    (tmp_path / "mine.py").write_text("from kvpress import FirstAndNewest\n\nclass Mine(FirstAndNewest):\n    pass\n")
    own = [policy_from("kvpress:Twice", {"press": {"name": f"{tmp_path / 'mine.py'}:Mine", "first": n}}) for n in (1, 2)]
    assert parameters_of(own[0], recorded=True)["press"] == {"name": "mine.py:Mine", "attention": None, "first": 1}
    outside = policy_from("kvpress:Twice", {"press": HALF})
    assert source_digest(own[0]) == source_digest(own[1]) != source_digest(outside)
