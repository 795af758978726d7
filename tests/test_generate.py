"""`model.generate` with a `kvbench.Cache`: what it writes is what our own loop writes, and the model stays as it was."""

import copy
import gc
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import H2O, CacheConfig, Random, adopt, decoder, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer

import kvbench
from kvbench.harness.core.parameters import policy_from
from kvbench.harness.models.hub import model_directory
from kvbench.harness.suite.axes import evict_from, kv_from

ROOT = Path(__file__).parents[1]
FAMILIES = ["llama", "qwen3", "gpt_neox", "gemma2"]
CONFIGS = {  # a policy, a capacity, and when it evicts
    "dense": ("dense", None, "step"),
    "sink_window": ("sink_window", 24, "step"),
    "h2o": ("h2o", 24, "step"),
    "tova": ("tova", 24, "step"),
    "snapkv prompt": ("snapkv", 24, "prompt"),
    "h2o every 16": ("h2o", 24, {"every": 16}),
    "h2o pages": ("h2o", 24, {"pages": 8, "by": "per_head"}),
    "random, prompt kept": (Random(keep_prompt=True), 44, "step"),  # asks where a prompt ends
}
NEW = 40  # tokens


def tokens_of(length: int, streams: int = 1, seed: int = 0) -> torch.Tensor:
    """Random tokens, none of them the one for padding, which `generate` takes for padding in a prompt, too."""
    return torch.randint(3, 96, (streams, length), generator=torch.Generator().manual_seed(seed))


GREEDY = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}


@cache
def _plain(family: str):
    model = tiny_model(family, vocab_size=96, eos_token_id=None)
    if family == "gemma2":
        model.set_attn_implementation("eager")  # transformers' sdpa leaves out its softcap
    return model


def plain(family: str = "llama"):
    """A model as users have it: nobody has adopted it. One for each family, however it is asked for."""
    return _plain(family)


@cache
def ours(family: str = "llama"):
    return adopt(tiny_model(family, vocab_size=96, eos_token_id=None))


def cache_of(name: str, family: str = "llama", **others):
    policy, capacity, evict = CONFIGS[name]
    return kvbench.Cache(plain(family), policy, capacity, evict=evict, **others)


def config_of(name: str, **others) -> CacheConfig:
    policy, capacity, evict = CONFIGS[name]
    return CacheConfig(
        policy_from(policy, {}) if isinstance(policy, str) else policy, capacity, evict=evict_from(evict), **others
    )


def logits_along(name: str, sequence: torch.Tensor, prompt: int, family="llama", **others) -> torch.Tensor:
    """Logits of our own loop after the prompt and each token but the last of a sequence. [1, T, V]."""
    read = decoder(ours(family), config_of(name, **others))
    out = [read.read_prompt(sequence[:, :prompt], 4096)[:, None]]
    out += [read(token) for token in sequence[:, prompt:-1].split(1, 1)]
    return torch.cat(out, 1)


def logits_of(output) -> torch.Tensor:
    return torch.stack(output.logits, 1)


def has_its_own_attention(model) -> bool:
    return model.config._attn_implementation == tiny_model(model.config.model_type).config._attn_implementation


def is_untouched(model) -> bool:
    gc.collect()  # a failed call's traceback may hold a cache
    return "forward" not in vars(model) and has_its_own_attention(model)


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in CONFIGS), *((family, name) for family in FAMILIES[1:] for name in ("dense", "h2o"))],
)
def test_greedy_tokens_are_those_of_our_own_loop(family, name):
    prompt = tokens_of(40)
    out = plain(family).generate(prompt, past_key_values=cache_of(name, family), **GREEDY)
    expected = logits_along(name, out.sequences, 40, family)
    assert out.sequences.shape[1] == 40 + NEW
    assert torch.equal(logits_of(out), expected)
    assert torch.equal(out.sequences[:, 40:], expected.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_is_generate_by_itself(family):
    prompt, model = tokens_of(40), plain(family)
    own = model.generate(prompt, **GREEDY)
    out = model.generate(prompt, past_key_values=cache_of("dense", family), **GREEDY)
    assert torch.equal(out.sequences, own.sequences)
    assert torch.allclose(logits_of(out), logits_of(own), atol=1e-4, rtol=1e-4)


def padded(*prompts: torch.Tensor) -> dict[str, torch.Tensor]:
    longest = max(p.shape[1] for p in prompts)
    rows = [torch.nn.functional.pad(p, (longest - p.shape[1], 0)) for p in prompts]
    mask = [torch.nn.functional.pad(torch.ones_like(p), (longest - p.shape[1], 0)) for p in prompts]
    return {"input_ids": torch.cat(rows), "attention_mask": torch.cat(mask)}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", name) for name in CONFIGS if name != "snapkv prompt"),
        *(("gemma2", name) for name in CONFIGS if name not in ("snapkv prompt", "h2o pages")),  # its windows are no whole pages
    ],
)
def test_padded_prompts_are_read_as_each_alone(family, name):
    prompts = tokens_of(40), tokens_of(17, seed=1)
    together = plain(family).generate(**padded(*prompts), past_key_values=cache_of(name, family), **GREEDY)
    for row, prompt in enumerate(prompts):
        alone = plain(family).generate(prompt, past_key_values=cache_of(name, family), **GREEDY)
        assert torch.equal(together.sequences[row, 40:], alone.sequences[0, prompt.shape[1] :])
        assert torch.allclose(logits_of(together)[row], logits_of(alone)[0], atol=1e-4, rtol=1e-4)


def test_sampled_texts_are_streams_of_their_own():
    torch.manual_seed(0)
    options = {**GREEDY, "do_sample": True, "num_return_sequences": 3}
    out = plain().generate(tokens_of(40), past_key_values=cache_of("h2o"), **options)
    assert len({tuple(row) for row in out.sequences.tolist()}) == 3
    for row, sequence in enumerate(out.sequences):
        assert torch.allclose(logits_of(out)[row], logits_along("h2o", sequence[None], 40)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["h2o", "snapkv prompt"])
def test_a_beam_scores_what_its_text_scores_alone(name):
    out = plain().generate(
        tokens_of(40),
        past_key_values=cache_of(name),
        num_beams=4,
        max_new_tokens=NEW,
        do_sample=False,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    logprobs = logits_along(name, out.sequences, 40).log_softmax(-1).gather(-1, out.sequences[:, 40:, None])
    assert float(out.sequences_scores) == pytest.approx(float(logprobs.sum()), abs=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_second_turn_goes_on_where_the_first_ended(name):
    model, kept = plain(), cache_of(name)
    first = model.generate(tokens_of(40), past_key_values=kept, do_sample=False, max_new_tokens=10)
    assert kept.get_seq_length() == 49, "the last token is not read yet"
    whole = torch.cat([first, tokens_of(8, seed=2)], 1)
    second = model.generate(whole, past_key_values=kept, **GREEDY)
    read = decoder(ours(), config_of(name))
    read.read_prompt(first[:, :40], 4096)
    for token in first[:, 40:-1].split(1, 1):
        read(token)
    expected = [read(whole[:, 49:])[:, -1:]] + [read(token) for token in second.sequences[:, 58:-1].split(1, 1)]
    assert torch.allclose(logits_of(second), torch.cat(expected, 1), atol=1e-4, rtol=1e-4)


def test_a_copy_goes_on_by_itself():
    """Follows transformers' own recipe for a prompt that several questions share."""
    model, prompt = plain(), tokens_of(40)
    for name in ("h2o", "snapkv prompt"):
        kept = cache_of(name)
        model(input_ids=prompt, past_key_values=kept, logits_to_keep=1)
        answers = [
            model.generate(torch.cat([prompt, tokens_of(5, seed=s)], 1), past_key_values=copy.deepcopy(kept), **GREEDY)
            for s in (3, 4, 3)
        ]
        assert kept.get_seq_length() == 40
        assert torch.equal(logits_of(answers[0]), logits_of(answers[2]))
        read = decoder(ours(), config_of(name))
        read.read_prompt(prompt, 4096)
        assert torch.allclose(logits_of(answers[1])[:, 0], read(tokens_of(5, seed=4))[:, -1], atol=1e-4, rtol=1e-4)


def test_a_long_prompt_passes_the_model_in_blocks(monkeypatch):
    monkeypatch.setattr("kvbench.harness.run.generate._BLOCK", 16)
    blocks, model, kept = [], plain(), cache_of("h2o")
    with model.register_forward_pre_hook(
        lambda module, args, kwargs: blocks.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    ):
        logits = model(input_ids=tokens_of(40), past_key_values=kept).logits
    assert blocks == [40, 16, 16, 8], "the call itself, and those of its decoder"
    few = model(input_ids=tokens_of(40), past_key_values=cache_of("h2o"), logits_to_keep=20).logits
    expected = decoder(ours(), config_of("h2o"))(tokens_of(40))
    assert torch.allclose(logits, expected, atol=1e-4)
    assert torch.allclose(few, expected[:, 20:], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("dense", "int4"),
        ("dense", {"codec": "kivi2", "group": 8, "residual": 16}),
        ("h2o", {"codec": "int2", "exempt": {"sinks": 2, "recent": 8}}),
        ("h2o every 16", "int8"),
        ("h2o pages", "int4"),
        ("snapkv prompt", {"codec": "kivi4", "group": 8, "residual": 8}),
    ],
)
def test_kv_is_an_axis(name, kv):
    kept = cache_of(name, kv=kv)
    out = plain().generate(tokens_of(40), past_key_values=kept, **GREEDY)
    expected = logits_along(name, out.sequences, 40, kv=kv_from(kv))
    assert torch.equal(logits_of(out), expected)
    assert not torch.equal(expected, logits_along(name, out.sequences, 40))
    read, report = decoder(ours(), config_of(name, kv=kv_from(kv))), kept.report()
    read.read_prompt(out.sequences[:, :40], 4096)
    for token in out.sequences[:, 40:-1].split(1, 1):
        read(token)
    held = [len(head) for layer in read.kept() for head in layer[0]]
    assert (report["kept"], report["held_bytes"]) == (sum(held) / len(held), read.held_bytes)
    assert (report["allocated_bytes"], report["kv"]) == (read.kv_bytes, kv_from(kv).as_json())


def test_fast_writes_the_same():
    plainly, fast = (
        plain().generate(tokens_of(40), past_key_values=cache_of("sink_window", fast=fast), **GREEDY) for fast in (False, True)
    )
    assert torch.equal(plainly.sequences, fast.sequences)


def refused(text: str, *calls):
    for call in calls:
        with pytest.raises(kvbench.UserError, match=text) as error:
            call()
        assert "\n" not in str(error.value)


def test_what_cannot_be_is_refused_in_one_line():
    model, prompt = plain(), tokens_of(40)

    def generate(name="h2o", inputs=None, **options):
        inputs = inputs or {"input_ids": prompt}
        return lambda: model.generate(**inputs, past_key_values=cache_of(name), max_new_tokens=4, **options)

    refused("can't take tokens back", lambda: cache_of("h2o").crop(3))
    refused("prompts of one length", generate("snapkv prompt", padded(prompt, tokens_of(9))))
    refused("leave out prefill_chunk_size", generate("snapkv prompt", prefill_chunk_size=16))
    refused("leave out inputs_embeds", generate(inputs={"inputs_embeds": model.get_input_embeddings()(prompt).detach()}))
    refused("leave out labels", lambda: model(prompt, labels=prompt, past_key_values=cache_of("h2o")))
    refused("logits_to_keep=1", lambda: model(prompt, past_key_values=cache_of("snapkv prompt")))
    mine = cache_of("h2o", "qwen3")
    refused("belongs to another model", lambda: model(prompt, past_key_values=mine))
    refused("its layers were called", lambda: model.model(prompt, past_key_values=cache_of("h2o")))
    held = cache_of("h2o")
    model(prompt, past_key_values=held)
    refused("holds 1 texts, and 2 came", lambda: model(tokens_of(3, streams=2), past_key_values=held))
    assert held.get_seq_length() == 40, "nothing was read"


def test_the_model_is_left_as_it_was():
    model, prompt = plain(), tokens_of(40)
    own = model.generate(prompt, **GREEDY)
    trained = [p.requires_grad for p in model.parameters()]
    first = cache_of("h2o")
    second = cache_of("sink_window")
    signature = model.forward.__wrapped__
    assert signature is type(model).forward
    for kept in (first, second):
        model.generate(prompt, past_key_values=kept, max_new_tokens=3)
        assert has_its_own_attention(model)
        for others in ({}, {"past_key_values": DynamicCache(config=model.config)}):
            out = model.generate(prompt, **others, **GREEDY)
            assert torch.equal(logits_of(out), logits_of(own)), "calls without our cache are the model's own"
    del kept, first
    assert "forward" in vars(model), "another cache is left"
    del second
    assert is_untouched(model)
    assert [p.requires_grad for p in model.parameters()] == trained == [True] * len(trained)
    assert torch.equal(logits_of(model.generate(prompt, **GREEDY)), logits_of(own))


def test_the_model_is_left_as_it_was_after_an_exception(monkeypatch):
    model, prompt = plain(), tokens_of(40)
    kept = cache_of("h2o")

    def stop(*_):
        raise KeyboardInterrupt

    model.generate(prompt, past_key_values=kept, max_new_tokens=3)
    with model.model.layers[1].register_forward_pre_hook(stop), pytest.raises(KeyboardInterrupt):
        model.generate(torch.cat([prompt, prompt], 1), past_key_values=kept, max_new_tokens=3)
    assert has_its_own_attention(model)
    assert kept.get_seq_length() == 0, "layers that have read differ from those that have not"
    again = model.generate(prompt, past_key_values=kept, **GREEDY)
    assert torch.equal(logits_of(again), logits_along("h2o", again.sequences, 40))
    del kept, again
    assert is_untouched(model)
    monkeypatch.setattr("kvbench.harness.run.route.check", stop)
    with pytest.raises(KeyboardInterrupt):
        cache_of("h2o")
    assert is_untouched(model)
    assert all(p.requires_grad for p in model.parameters())


def test_importing_kvbench_imports_no_torch():
    code = "import sys, kvbench; assert 'Cache' in dir(kvbench); print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "snapkv prompt"])
def test_a_prompt_may_be_read_in_chunks(name):
    whole = plain().generate(tokens_of(40), past_key_values=cache_of(name), **GREEDY)
    chunked = plain().generate(tokens_of(40), past_key_values=cache_of(name), prefill_chunk_size=16, **GREEDY)
    assert torch.equal(whole.sequences, chunked.sequences)
    assert torch.allclose(logits_of(whole), logits_of(chunked), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("positions", ["cache", "stream", "clamped"])
def test_positions_are_an_axis(positions):
    kept = cache_of("h2o", positions=positions, limit=20 if positions == "clamped" else None)
    out = plain().generate(tokens_of(40), past_key_values=kept, **GREEDY)
    expected = logits_along("h2o", out.sequences, 40, positions=positions, limit=20 if positions == "clamped" else None)
    assert torch.equal(logits_of(out), expected)


MISTAKES = [  # the other mistakes are those of a suite's entries: test_axes.py
    ("did you mean 'h2o'", lambda: kvbench.Cache(plain(), "h20", 16)),
    ("needs a capacity", lambda: kvbench.Cache(plain(), "h2o")),
    ("takes no capacity", lambda: kvbench.Cache(plain(), "dense", 16)),
    ("capacity", lambda: kvbench.Cache(plain(), "h2o", 16, window=17)),
    ("unknown key 'windw', did you mean 'window'", lambda: kvbench.Cache(plain(), "h2o", 16, windw=3)),
    ("expected step, prompt, {every: TOKENS} or", lambda: kvbench.Cache(plain(), "h2o", 16, evict=16)),
    ("there is no codec 'int3'", lambda: kvbench.Cache(plain(), "h2o", 16, kv="int3")),
    ("dense never evicts, so no policy can hold it", lambda: kvbench.Cache(plain(), "adakv", 16, score="dense")),
    ("expected a policy's name or a mapping with its name", lambda: kvbench.Cache(plain(), "adakv", 16, score=5)),
    ("score: 2 policies; give one", lambda: kvbench.Cache(plain(), "adakv", 16, score=["h2o", "knorm"])),
    ("an instance with its parameters", lambda: kvbench.Cache(plain(), H2O(), 16, window=3)),
    ("or a wrapper of one", lambda: kvbench.Cache("llama")),
    ("evaluation mode", lambda: kvbench.Cache(tiny_model("llama").train())),
    ("AutoModelForCausalLM", lambda: kvbench.Cache(plain().model)),
    ("rope_length", lambda: kvbench.Cache(tiny_model("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}))),
    ("model family 'bloom' can't be driven", lambda: kvbench.Cache(tiny_model("bloom"))),
]


@pytest.mark.parametrize(("says", "call"), MISTAKES, ids=lambda x: x if isinstance(x, str) else "")
def test_mistakes_are_told_when_a_cache_is_made(says, call):
    refused(says, call)


def test_a_policy_may_hold_an_instance():
    report = kvbench.Cache(plain(), "adakv", 16, score=H2O(window=4)).report()
    assert report["parameters"]["score"]["window"] == 4


def test_a_copied_model_has_a_forward_of_its_own():
    model, prompt = copy.deepcopy(plain()), tokens_of(40)
    kept = kvbench.Cache(model, "h2o", 24)
    model = copy.deepcopy(model)
    kept = kvbench.Cache(model, "h2o", 24)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(-1)
        assert torch.allclose(other(prompt).logits, -model(prompt).logits)
    refused("belongs to another model", lambda: other(prompt, past_key_values=kept))


def test_a_forward_that_somebody_else_put_there_stays():
    """Accelerate and `torch.compile` put theirs on the model, before or after ours."""
    model, calls = copy.deepcopy(plain()), []

    def before(*args, **kwargs):
        calls.append(1)
        return type(model).forward(model, *args, **kwargs)

    model.forward = before
    kept = kvbench.Cache(model, "h2o", 24)
    model.generate(tokens_of(40), past_key_values=kept, max_new_tokens=3)
    assert calls
    del kept
    assert model.forward is before
    kept = kvbench.Cache(model, "h2o", 24)
    around = model.forward
    model.forward = after = lambda *args, **kwargs: around(*args, **kwargs)
    del kept
    assert model.forward is after


def test_streamers_and_chat_templates_work(capsys):
    folder = model_directory("builtin:recall", None, False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model.generation_config.use_cache = True  # its config has what it was trained with
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    kept, said = kvbench.Cache(model, "h2o", 16), torch.zeros(1, 0, dtype=torch.int64)
    for message in ("The first line of a text.", "And then what came?"):
        asked = [{"role": "user", "content": message}]
        inputs = tokenizer.apply_chat_template(asked, chat_template=template, return_tensors="pt", return_dict=True)
        said = torch.cat([said, inputs["input_ids"]], 1)
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        length = said.shape[1]
        said = model.generate(said, past_key_values=kept, max_new_tokens=8, do_sample=False, streamer=streamer)
        assert capsys.readouterr().out.strip() == tokenizer.decode(said[0, length:]).strip() != ""
        assert kept.get_seq_length() == said.shape[1] - 1
