"""A model whose layers lie on several devices reads like the same model on one.

No test machine has two GPUs, so two facts stand in for them: a model in two parts on the CPU, with Accelerate's hooks between
them, has the same numbers; and with `meta` as the second device, whose tensors no CPU tensor may meet, every tensor of a layer is
where the layer is.
"""

from dataclasses import replace

import pytest
import torch
from every_policy import evicting, instances
from helpers import H2O, CacheConfig, Dense, Model, RecomputeWindow, adopt, in_blocks, tiny_model, tokens_of
from transformers import AutoModelForCausalLM

from kvbench.harness.core.plugins import policy_class
from kvbench.harness.engine.loop import CachedDecoder, decoder
from kvbench.harness.engine.method import EAGER, FASTEST
from kvbench.harness.models import load
from kvbench.harness.models.layers import device_map, dispatch
from kvbench.harness.models.selfcheck import check
from kvbench.policies import Policy
from kvbench.policies.merges import positions_for

CPU, META = torch.device("cpu"), torch.device("meta")
DECIDED_BY_THE_PROMPT = ["adakv", "cake", "d2o", "fastgen", "simlayerkv"]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    return instances(tmp_path_factory.mktemp("files"))


def test_every_device_gets_whole_layers_in_order_and_about_as_many_bytes():
    config = tiny_model("llama", vocab_size=96).config
    config.num_hidden_layers = 8
    places = device_map(config, torch.float32, [torch.device("cuda", at) for at in range(4)], AutoModelForCausalLM)
    of_layers = [places[f"model.layers.{at}"].index for at in range(8)]
    assert of_layers == sorted(of_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    size = {name: sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in places}
    held = [sum(size[name] for name, place in places.items() if place.index == at) for at in range(4)]
    assert sum(held) == sum(p.nbytes for p in model.parameters())
    assert max(held) - min(held) <= 2 * size["model.layers.0"]


@pytest.mark.parametrize("policy", [Dense(), H2O(), RecomputeWindow()], ids=lambda p: type(p).__name__)
def test_a_model_in_parts_has_the_numbers_of_the_whole(policy):
    whole, parts = adopt(tiny_model("llama", vocab_size=96)), tiny_model("llama", vocab_size=96)
    parts = adopt(dispatch(parts, device_map(parts.config, torch.float32, [CPU, CPU], AutoModelForCausalLM)))
    config, tokens = CacheConfig(policy, 8 if policy.evicts else None), tokens_of(40).cpu()
    assert torch.equal(in_blocks(decoder(parts, config), tokens, 7), in_blocks(decoder(whole, config), tokens, 7))
    assert check(parts) < 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("evict", [1, "prompt"])
@pytest.mark.parametrize("name", evicting())
def test_a_model_half_on_a_gpu_and_half_on_the_cpu_has_the_numbers_of_one_on_the_cpu(name, evict, policies):
    policy, cuda = policies[name], torch.device("cuda", 0)
    if policy.outcome and evict == 1:
        pytest.skip("decides at a prompt's end")
    whole, parts = (tiny_model("llama", vocab_size=96).double() for _ in range(2))
    parts = dispatch(parts, device_map(parts.config, torch.float64, [cuda, CPU], AutoModelForCausalLM))
    config, tokens = (
        CacheConfig(policy, None if policy.outcome else 16, positions_for(policy), evict=evict),
        tokens_of(48, 2).cpu(),
    )
    logits, kept = [], []
    for model in (adopt(whole), adopt(parts)):
        read, given = CachedDecoder(model, config, 2), tokens.to(model.device)
        first = [read.read_prompt(given[:, :40], 16)[:, None]] if evict == "prompt" else [read(given[:, :40])]
        logits.append(torch.cat([*first, in_blocks(read, given[:, 40:], 3)], 1).cpu())
        kept.append(read.kept())
    torch.testing.assert_close(logits[0], logits[1], atol=1e-6, rtol=0)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("random", [False, True], ids=["weights", "random weights"])
def test_a_model_is_loaded_in_parts(random, model_dir, monkeypatch):
    """By transformers from its files, by Accelerate where its weights are drawn; and checked like any other."""
    monkeypatch.setattr(load, "devices_for_layers", lambda first, count: [first] * count)
    directory = model_dir / "config.json" if random else model_dir
    whole, parts = (load.load_model(directory, "float32", CPU, random=random, devices=count) for count in (1, 2))
    assert parts.check == whole.check
    tokens, config = tokens_of(40).cpu(), CacheConfig(H2O(), 8)
    assert torch.equal(decoder(parts, config)(tokens), decoder(whole, config)(tokens))


@pytest.mark.parametrize("policy", DECIDED_BY_THE_PROMPT)
def test_budgets_of_a_prompt_see_all_layers_on_one_device(policy, policies):
    """Budgets equal those of a model without hooks."""
    kind = policies[policy]
    config = CacheConfig(kind, None if policy_class(policy).outcome else 16, positions_for(kind), evict="prompt")
    whole, parts = adopt(tiny_model("llama", vocab_size=96)), tiny_model("llama", vocab_size=96)
    parts = adopt(dispatch(parts, device_map(parts.config, torch.float32, [CPU, CPU], AutoModelForCausalLM)))
    reads = [CachedDecoder(model, config, 2) for model in (whole, parts)]
    for read in reads:
        read.read_prompt(tokens_of(40, 2).cpu(), 16)
    assert reads[0].kept() == reads[1].kept()


def half_on_meta(family: str = "llama") -> Model:
    """A model adopted on the CPU, since that reads numbers, whose second layer and head then move to `meta`."""
    model = adopt(tiny_model(family, vocab_size=96))
    places = device_map(model.hf.config, torch.float32, [CPU, META], AutoModelForCausalLM)
    assert {name: places[name].type for name in ("model.layers.0", "model.layers.1")} == {
        "model.layers.0": "cpu",
        "model.layers.1": "meta",
    }
    dispatch(model.hf, places)
    model.hf._hf_hook.io_same_device = False  # numbers don't come back from `meta`
    shape = model.layers[1]
    rotation = shape.rotation
    assert rotation is not None
    rotation.prepare(torch.float32)
    tables = {key: table.to(META) for key, table in rotation._tables.items()}
    moved = replace(rotation, order=rotation.order.to(META), _tables=tables)
    model.layers[1] = replace(shape, rotation=moved, device=META)
    return model


@pytest.mark.parametrize("name", ["dense", *evicting()[::5]])
def test_what_belongs_to_a_layer_is_on_its_device(name, policies):
    """Slots, statistics, ranks, masks and rotary tables. An operation that mixes the devices would raise."""
    policy = Dense() if name == "dense" else policies[name]
    if policy.outcome:
        pytest.skip("decides at a prompt's end, which reads numbers that `meta` has not")
    model = half_on_meta()
    config = CacheConfig(policy, 16 if policy.evicts else None, positions_for(policy))
    for method, sizes in ((EAGER, [5, 1, 11, 1]), (FASTEST, [14, 1, 2])):
        read = CachedDecoder(model, config, 2, method)
        assert {walk.slots.device for walk in read.walks} == {CPU, META}
        for size in sizes:
            logits = read(torch.zeros(2, size, dtype=torch.int64))
            assert (logits.device, logits.shape) == (META, (2, size, 96))
        fork = read.fork([1, 0])
        fork.reserve(10)
        fork(torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.bool))
        assert fork.kv_bytes == read.kv_bytes


def test_recomputed_windows_cross_devices():
    read = decoder(half_on_meta(), CacheConfig(RecomputeWindow(), 8), 2)
    assert read(torch.zeros(2, 12, dtype=torch.int64)).shape == (2, 12, 96)
