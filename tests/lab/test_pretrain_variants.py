"""Recipes that differ from `vanilla` in one thing: each computes what its paper says, trains, and is loaded as it was trained."""

import json
import shutil
import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from helpers import DEVICE, adopt, tokens_of
from torch import Tensor, nn

from kvbench.harness.core.errors import RefusedModelError
from kvbench.harness.engine.own_attention import own_attention
from kvbench.harness.models.load import load_model
from kvbench.harness.models.selfcheck import check
from kvbench.lab.attention.measure import load_watched
from kvbench.lab.pretrain import ortho_adam, sigma_reparam, text, tokenizer
from kvbench.lab.pretrain.config import PretrainConfig
from kvbench.lab.pretrain.held_out import HeldOut
from kvbench.lab.pretrain.new_model import new_model
from kvbench.lab.pretrain.train import pretrain

pytestmark = pytest.mark.filterwarnings("ignore")  # accelerate and the Trainer give warnings
CHANGES = {  # in their recipes
    **{name: {"attention": name} for name in ("sink_logits", "sigmoid", "gated", "clipped", "qk_norm")},
    "sigma_reparam": {"sigma_reparam": True},
    "ortho_adam": {"training": {"optimizer": "ortho_adam"}},
}
ATTENTION = [name for name, change in CHANGES.items() if "attention" in change]
HIDDEN, HEADS, KV_HEADS = 16, 4, 2


def config(name: str = "vanilla", steps: int = 2, **training) -> PretrainConfig:
    settings = {"tokens": 70 * 2 * steps, "sample": 70, "batch": 2, "compile": False, "probe_every": 1, "initial": 0.2}
    shape = {"hidden": HIDDEN, "layers": 2, "heads": HEADS, "kv_heads": KV_HEADS, "intermediate": 32, "vocabulary": 1400}
    change = {k: v for k, v in CHANGES.get(name, {}).items() if k != "training"}
    settings |= CHANGES.get(name, {}).get("training", {}) | training
    return PretrainConfig(name=name, text={"pg19": 0, "prose": 1}, shape=shape, training=settings, **change)


def varied(name: str):
    """A model in float64 with parameters that are all random, those that begin at 0 or 1 included, and attention that chooses."""
    model = new_model(config(name)).double().eval()
    generator = torch.Generator().manual_seed(1)
    for x in model.parameters():
        if x.ndim == 1:
            x.data += 0.5 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return model


def rotated(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE: pairs of dims turned by the angles of the model's tables. [T, D]."""
    cos, sin = (table[0].to(x.dtype) for table in tables)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def plain_weights(name: str, module: nn.Module, head: int, scores: list[float]) -> Tensor:
    """Attention weights of one query, given its scores with the keys it may see, by the formula of the paper."""
    s = torch.tensor(scores, dtype=torch.float64)
    if name == "sink_logits":
        return s.exp() / (s.exp().sum() + module.sinks[head].exp())
    if name == "sigmoid":
        return 1 / (1 + (-s).exp())
    if name == "clipped":
        gamma = -4 / 70  # alpha over the tokens of a sample
        return ((1 - gamma) * s.exp() / s.exp().sum() + gamma).clip(0, 1)
    return s.exp() / s.exp().sum()


def plain_attention(name: str, module: nn.Module, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """The attention block of one layer, head by head and query by query. [T, E] -> [T, E]."""
    dims, group = HIDDEN // HEADS, HEADS // KV_HEADS
    heads = []
    for head in range(HEADS):
        of_query, of_key = (slice(h * dims, (h + 1) * dims) for h in (head, head // group))
        q, k, v = x @ module.q_proj.weight[of_query].T, x @ module.k_proj.weight[of_key].T, x @ module.v_proj.weight[of_key].T
        if name == "qk_norm":
            q, k = (
                y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * n.weight
                for y, n in ((q, module.q_norm), (k, module.k_norm))
            )
        q, k = rotated(q, tables), rotated(k, tables)
        rows = []
        for t in range(len(x)):
            weights = plain_weights(name, module, head, [float(q[t] @ k[s]) / dims**0.5 for s in range(t + 1)])
            rows.append(weights @ v[: t + 1])
        heads.append(torch.stack(rows))
    gate = 1 / (1 + (-x @ module.gate_proj.weight.T).exp()) if name == "gated" else 1
    return (torch.cat(heads, -1) * gate) @ module.o_proj.weight.T


@pytest.mark.parametrize("name", ATTENTION)
def test_its_attention_is_that_of_its_paper(name):
    """Compared with loops over heads and queries, in float64."""
    model, seen = varied(name), []
    attention = model.model.layers[1].self_attn
    attention.register_forward_hook(lambda m, args, kwargs, out: seen.append((kwargs, out[0][0])), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=tokens_of(9).cpu(), use_cache=False)
        ((given, out),) = seen
        x, tables = given["hidden_states"][0], given["position_embeddings"]
        expected, plain = (plain_attention(which, attention, x, tables) for which in (name, "vanilla"))
    torch.testing.assert_close(out, expected, atol=1e-6 if name == "qk_norm" else 1e-10, rtol=0)
    assert (plain - expected).abs().max() > 1e-2


@pytest.fixture(scope="module")
def tokens_file(tmp_path_factory):
    """The tokenizer of all their recipes, because learning it takes longer than two steps."""
    recipe, file = config(), tmp_path_factory.mktemp("tokens") / "tokenizer.json"
    tokenizer.learn(text.for_tokenizer(recipe.text, recipe.seed, None), recipe.shape).save(str(file))
    return file


@pytest.mark.slow("training")
@pytest.mark.parametrize("name", CHANGES)
def test_it_trains_and_is_loaded_as_it_was_trained(name, tokens_file, tmp_path, monkeypatch):
    """The saved model's logits, through transformers and through our attention, are those of the model that was trained."""
    shutil.copy(tokens_file, tmp_path)
    trained = []
    monkeypatch.setattr(HeldOut, "answers", lambda self, model: trained.append(deepcopy(model)) or {})
    directory = pretrain(config(name), tmp_path, None, torch.device("cpu"), lambda line: None)
    log = [json.loads(x) for x in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert len(log) == 2
    assert all(0 < row["attention_to_first"]["largest"] < 1 for row in log)
    model = load_watched(directory, "float32", torch.device("cpu"))
    assert (model.check or 0) <= 1
    stored, tokens = sigma_reparam.plain(trained[-1]), tokens_of(40).cpu()
    for x in stored.parameters():
        x.data = x.half().float()
    with own_attention(model.hf), torch.no_grad():
        loaded = model.hf(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(loaded, stored(input_ids=tokens, use_cache=False).logits, atol=1e-5, rtol=0)
    assert "Llama" in (directory / "README.md").read_text()


@pytest.mark.slow("a process of its own")
def test_the_harness_imports_a_variant_when_it_reads_the_config_of_one(tmp_path):
    varied("sink_logits").save_pretrained(tmp_path)
    code = (
        "import sys\nfrom pathlib import Path\nfrom kvbench.harness.models.load import read_config\n"
        "assert not [name for name in sys.modules if name.startswith('kvbench.lab')]\n"
        f"print(type(read_config(Path({str(tmp_path)!r}))).__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "kvbench.lab.variants.llama", done.stderr


@pytest.mark.parametrize("name", CHANGES)
def test_the_decode_loop_gives_its_logits_or_says_why_it_cannot(name, tmp_path):
    model = varied(name).float().to(DEVICE)
    reason = getattr(model, "undrivable", None)
    if reason is None:
        assert check(adopt(model)) <= 1
        return
    model.save_pretrained(tmp_path)
    with pytest.raises(RefusedModelError, match=reason) as refused:
        load_model(tmp_path, "float32", torch.device("cpu"))
    assert "\n" not in str(refused.value)


def test_sigma_reparametrised_weights_have_the_learned_spectral_norm():
    """After enough power iterations; and what is saved computes the same as what is trained, which it leaves as it was."""
    model, tokens = new_model(config("sigma_reparam")).train(), tokens_of(20).cpu()
    for _ in range(100):
        model(input_ids=tokens, use_cache=False)
    layer = model.eval().model.layers[0].mlp.down_proj
    layer.parametrizations.weight[0].gain.data[:] = 1.7
    assert torch.linalg.matrix_norm(layer.weight, 2).item() == pytest.approx(1.7, rel=1e-3)
    original = layer.parametrizations.weight.original
    torch.testing.assert_close(layer.weight / 1.7, original / torch.linalg.matrix_norm(original, 2), atol=1e-4, rtol=0)
    before = model(input_ids=tokens, use_cache=False).logits
    saved = sigma_reparam.plain(model)
    assert sorted(saved.state_dict()) == sorted(new_model(config()).state_dict())
    torch.testing.assert_close(saved(input_ids=tokens, use_cache=False).logits, before, atol=1e-6, rtol=0)
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, before)


def test_ortho_adam_is_adam_of_the_parameters_in_another_basis():
    """OrthoAdam takes the steps of torch's AdamW on Q x with gradient Q g. In the trivial basis, it equals AdamW."""
    generator = torch.Generator().manual_seed(0)
    start, target = torch.randn(5, 3, generator=generator), torch.randn(5, 3, generator=generator)
    rows, columns = (ortho_adam.random_orthogonal(size, generator) for size in (5, 3))
    torch.testing.assert_close(rows @ rows.T, torch.eye(5), atol=1e-6, rtol=0)
    for bases in ([rows, columns], [torch.eye(5), torch.eye(3)]):
        x, y = nn.Parameter(start.clone()), nn.Parameter(bases[0] @ start @ bases[1].T)
        settings = {"lr": 0.1, "betas": (0.9, 0.98), "weight_decay": 0.1}
        ours, theirs = ortho_adam.OrthoAdam([x], **settings), torch.optim.AdamW([y], **settings)
        ours._bases[x] = bases
        for _ in range(5):
            x.grad = (x.detach() - target) ** 3
            y.grad = bases[0] @ x.grad @ bases[1].T
            ours.step()
            theirs.step()
            torch.testing.assert_close(bases[0] @ x @ bases[1].T, y, atol=1e-5, rtol=0)
