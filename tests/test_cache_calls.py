"""Calls that carry a `kvbench.Cache`: beside others of the same model, one after the other, and with any keyword."""

import copy
import io
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import pytest
import torch
from every_policy import instances
from test_generate import plain, refused, tokens_of
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria, TemperatureLogitsWarper

import kvbench
from kvbench.harness.models.families import tiny_model
from kvbench.harness.models.selfcheck import check
from kvbench.policies.merges import positions_for
from kvbench.policies.sink_window import SinkWindow

GREEDY = {"do_sample": False, "max_new_tokens": 6}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_texts_side_by_side_in_threads_are_those_one_by_one(family):
    """Covers two caches, the model by itself, another model of the family, and a model that is being checked."""
    model, other = plain(family), copy.deepcopy(plain(family))
    prompts, options = [tokens_of(30, seed=seed) for seed in range(4)], {"do_sample": False, "max_new_tokens": 30}
    expected = [model.generate(prompt, **options) for prompt in prompts]
    trained = [p.requires_grad for p in model.parameters()]

    def written(number: int) -> torch.Tensor:
        kept = {"past_key_values": kvbench.Cache(model, "dense")} if number < 2 else {}
        return (other if number == 3 else model).generate(prompts[number], **kept, **options)

    def checked(number: int) -> bool:
        alone = model(prompts[number], labels=prompts[number]).loss
        return alone.requires_grad and model.config._attn_implementation == other.config._attn_implementation

    for _ in range(2):
        with ThreadPoolExecutor(5) as pool:
            states = pool.map(checked, repeat(2, 20))
            texts = list(pool.map(written, range(4)))
            assert all(states)
        assert all(torch.equal(a, b) for a, b in zip(texts, expected, strict=True))
    assert [p.requires_grad for p in model.parameters()] == trained == [True] * len(trained)


def test_a_self_check_shrinks_no_window_of_the_model(monkeypatch):
    """Nor does anybody else see its probes, its attention or its frozen RoPE tables."""
    model = tiny_model("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
    windowed = tiny_model("gemma2")
    prompt = tokens_of(80)

    def state(hf):
        return [(m.sliding_window, getattr(m, "rope_type", None)) for m in hf.modules() if hasattr(m, "sliding_window")]

    expected = model(prompt).logits
    kept = kvbench.Cache(model, "dense", rope_length=512)
    assert torch.equal(model(prompt).logits, expected)
    assert [m.rope_type for m in model.modules() if hasattr(m, "rope_type")] == ["dynamic"]
    assert kept.report()["seen"] == 0
    before, states = state(windowed), []

    def noted(hf, rope_length=None):
        hook = windowed.register_forward_pre_hook(lambda *_: states.append(state(windowed)))
        try:
            return check(hf, rope_length)
        finally:
            hook.remove()

    monkeypatch.setattr("kvbench.harness.run.route.check", noted)
    kvbench.Cache(windowed, "dense")
    assert before
    assert states == [before] * len(states) != []


def read(name: str = "h2o", capacity: int | None = 16, count: int = 20, **options) -> kvbench.Cache:
    kept = kvbench.Cache(plain(), name, capacity, **options)
    plain()(tokens_of(count), past_key_values=kept, logits_to_keep=1)
    return kept


@pytest.mark.parametrize(("name", "capacity", "options"), [("dense", None, {}), ("snapkv", 16, {"evict": "prompt"})])
def test_a_call_that_does_not_go_on_is_refused_and_forgets_nothing(name, capacity, options):
    model, kept = plain(), read(name, capacity, **options)
    prompt = tokens_of(20)

    def generate(inputs, **others):
        return lambda: model.generate(inputs, past_key_values=kept, **others, **GREEDY)

    again = "has read 20 tokens of each text.*cache.reset()"
    refused(again, generate(prompt), generate(prompt, attention_mask=torch.ones_like(prompt)))
    refused(again, generate(prompt[:, :12]), generate(prompt[:, :11]))
    refused(again, lambda: model(prompt, attention_mask=torch.ones_like(prompt), past_key_values=kept))
    refused(again, lambda: model(prompt, attention_mask=torch.ones(1, 50), past_key_values=kept))
    refused(r"2 came: cache.reset\(\)", generate(tokens_of(30, 2)), lambda: model(tokens_of(1, 2), past_key_values=kept))
    shapes = [prompt[:, :0], prompt[:0], prompt[0], prompt.float(), prompt.bool(), prompt.byte()]
    refused("input_ids: expected whole numbers", *(lambda ids=ids: model(ids, past_key_values=kept) for ids in shapes))
    refused("for 1 texts", lambda: model(prompt[:, :1], attention_mask=torch.ones(2, 21), past_key_values=kept))
    refused("logits_to_keep", lambda: model(prompt[:, :1], past_key_values=kept, logits_to_keep=-2))
    more, holes = prompt[:, :3], torch.tensor([[0] * 10 + [1] * 13])
    places = [torch.tensor(x) for x in ([20, 1, 22], [[3, 21, 22]], [[20, 21]], [[[20, 21, 22]], [[0, 1, 22]]])]
    refused("other position_ids than 20 to 22", *(lambda p=p: model(more, position_ids=p, past_key_values=kept) for p in places))
    refused("other padding before them", lambda: model(more, attention_mask=holes, past_key_values=kept))
    for argument in ("input_ids", "attention_mask", "position_ids"):
        given = {"input_ids": more, argument: more.tolist()}
        refused(f"{argument}: expected a tensor, not a list", lambda given=given: model(**given, past_key_values=kept))
    assert kept.report()["seen"] == 20
    longer = torch.cat([prompt, tokens_of(3, seed=1)], 1)
    if name == "dense":
        assert torch.equal(model.generate(longer, past_key_values=kept, **GREEDY), model.generate(longer, **GREEDY))
    kept.reset()
    model.generate(prompt, past_key_values=kept, **GREEDY)


def test_padded_texts_go_on_with_or_without_padding_in_their_positions():
    model, padding = plain(), torch.tensor([[0] * 4 + [1] * 16, [1] * 20])
    prompt, more = tokens_of(20, 2), tokens_of(3, 2, seed=1)
    mask = torch.cat([padding, torch.ones_like(more)], 1)
    for positions in (torch.arange(20, 23)[None], torch.tensor([[16, 17, 18], [20, 21, 22]])):
        kept = kvbench.Cache(model, "dense")
        model(prompt, attention_mask=padding, past_key_values=kept)
        refused(
            "has read 20",
            lambda kept=kept: model(more, attention_mask=mask, position_ids=torch.zeros(2, 3), past_key_values=kept),
        )
        model(more, attention_mask=mask, position_ids=positions, past_key_values=kept)
        assert kept.report()["seen"] == 23


ALIKE = {
    "logits processor": {"logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.7)])},
    "stopping criteria": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(23)])},
    "sampled": {"do_sample": True, "num_return_sequences": 3, "top_p": 0.9, "min_p": 0.01},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2},
    "bans": {"bad_words_ids": [[5]], "suppress_tokens": [6], "begin_suppress_tokens": [7], "sequence_bias": {(8,): -3.0}},
    "ends": {"min_new_tokens": 3, "eos_token_id": 7, "exponential_decay_length_penalty": (2, 1.1), "max_time": 60.0},
    "guidance": {"guidance_scale": 1.5, "negative_prompt_ids": tokens_of(20, seed=1)},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda *_: list(range(20))},
    "outputs": {"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
    "positions": {"position_ids": torch.arange(20)[None], "attention_mask": torch.ones(1, 20, dtype=torch.int64)},
    "chunks": {"prefill_chunk_size": 7},
    "logits": {"logits_to_keep": 5},
}
NOT_ALIKE = {
    "can't take tokens back": [{"prompt_lookup_num_tokens": 2}, {"assistant_early_exit": 1}],
    "leave out output_attentions": [{"output_attentions": True}],
    "leave out output_hidden_states": [{"output_hidden_states": True}],
    "pass use_cache=True": [{"use_cache": False}],
}


def test_keywords_of_generate_do_what_they_do_with_a_dynamic_cache():
    model, prompt = plain(), tokens_of(20)

    def written(kept, options) -> torch.Tensor:
        torch.manual_seed(0)
        out = model.generate(prompt, past_key_values=kept, **GREEDY | options)
        return out if torch.is_tensor(out) else out.sequences

    for options in ALIKE.values():
        own = written(DynamicCache(config=model.config), options)
        assert torch.equal(written(kvbench.Cache(model), options), own), options
    for reason, several in NOT_ALIKE.items():
        for options in several:
            written(DynamicCache(config=model.config), options)
            refused(reason, lambda options=options: written(kvbench.Cache(model), options))


class Wrapper(torch.nn.Module):
    """Wrapper like PEFT's."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def generate(self, *args, **kwargs):
        return self.base_model.generate(*args, **kwargs)


def compiled(part: str):
    model = copy.deepcopy(plain())
    if part == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    return torch.compile(model, backend="eager") if part == "around" else model


WRAPPED = {"wrapper": lambda: Wrapper(plain()).eval()}
WRAPPED |= {part: lambda part=part: compiled(part) for part in ("around", "forward")}


@pytest.mark.parametrize("evict", ["step", "prompt", {"every": 4}, {"pages": 4}], ids=str)
def test_every_policy_opens_however_it_evicts(evict, tmp_path):
    """Or is refused because it decides at a prompt's end, or because its heads keep numbers of their own and pages go."""
    for name, policy in instances(tmp_path).items():
        try:
            kept = kvbench.Cache(plain(), policy, None if policy.outcome else 32, positions=positions_for(policy), evict=evict)
        except kvbench.UserError as error:
            reason = "needs evict: prompt" if policy.outcome else "its heads keep different numbers of tokens, and whole pages"
            assert reason in str(error), name
            assert policy.outcome or (isinstance(evict, dict) and "pages" in evict), name
        else:
            assert kept.report()["policy"] == name


def test_a_policy_that_reads_output_projections_gets_them_through_a_cache():
    for name, options in (
        ("criticalkv", {}),
        ("adakv", {"score": "criticalkv"}),
        ("adakv", {"score": "criticalkv", "evict": "prompt"}),
    ):
        kept = kvbench.Cache(plain(), name, 24, **options)
        plain().generate(tokens_of(40), past_key_values=kept, **GREEDY)
        assert kept.report()["kept"] == 24 + 5 * (options.get("evict") == "prompt")


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_model_writes_what_it_writes_by_itself(name):
    prompt, wrapped = tokens_of(20), WRAPPED[name]()
    kept, expected = kvbench.Cache(wrapped), plain().generate(prompt, **GREEDY)
    assert torch.equal(wrapped.generate(prompt, past_key_values=kept, **GREEDY), expected)
    assert torch.equal(wrapped.generate(prompt, **GREEDY), expected)
    training = wrapped.train()
    refused(
        "in training mode", lambda: kvbench.Cache(training), lambda: training.generate(prompt, past_key_values=kept, **GREEDY)
    )
    wrapped.eval()


def test_a_model_that_is_compiled_after_its_cache_is_refused():
    model = copy.deepcopy(plain())
    kept = kvbench.Cache(model)
    model.forward = torch.compile(model.forward, backend="eager")
    refused("compiled after its first", lambda: model.generate(tokens_of(20), past_key_values=kept, **GREEDY))


def test_a_cache_is_copied_in_memory_and_not_saved():
    kept, more = read(), tokens_of(3, seed=1)
    copies = [kept.fork(), copy.copy(kept), copy.deepcopy(kept)]
    logits = [plain()(more, past_key_values=one).logits for one in copies]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert [kept.report()["seen"], *(one.report()["seen"] for one in copies)] == [20, 23, 23, 23]
    refused(r"cache.fork\(\)", lambda: pickle.dumps(kept), lambda: torch.save(kept, io.BytesIO()))


@pytest.mark.parametrize("value", [16.5, "16", True, -3, 10**21], ids=str)
def test_numbers_that_are_none_are_refused_in_one_line(value):
    model = plain()
    refused("capacity: expected a whole number", lambda: kvbench.Cache(model, "h2o", value))
    refused("limit: expected a whole number", lambda: kvbench.Cache(model, "h2o", 16, positions="clamped", limit=value))
    refused("rope_length: expected a whole number", lambda: kvbench.Cache(model, "h2o", 16, rope_length=value))
    refused("every is a number|its slots take", lambda: kvbench.Cache(model, "h2o", 16, evict={"every": value}))
    refused("gamma: Input should be a finite number", lambda: kvbench.Cache(model, "cake", 16, gamma=math.inf))
    if value != -3:
        refused("seed: expected a whole number", lambda: kvbench.Cache(model, "h2o", 16, seed=value))
        refused("sinks", lambda: kvbench.Cache(model, "sink_window", 16, sinks=value))
        refused("sinks", lambda: kvbench.Cache(model, SinkWindow(sinks=value), 16))
        refused("window", lambda: kvbench.Cache(model, "adakv", 16, score={"name": "h2o", "window": value}))
    assert kvbench.Cache(model, "h2o", torch.tensor(16)).report()["capacity"] == 16
