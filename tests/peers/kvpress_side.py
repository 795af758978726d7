"""Runs kvpress' own code: kept positions per layer and KV head, scores, and the NLLs of a continuation.

It runs in an environment of its own and knows nothing of KV Bench:

    PYTHONPATH=tests PYTHON -m peers.kvpress_side FOLDER

FOLDER holds `prompts.npz` (token ids by model and prompt) and `models.json` (the folder of each model). It writes `theirs.npz`,
with three arrays a cell: `kept` [L, H, N] bool, `scores` [L, H, N] float32 (absent if the rule has none) and `nlls` float64
(absent if kvpress raises while it reads on).

Axis letters: L layers, H KV heads, N tokens of the prompt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
from peers.cases import CONTINUATION, Cell, cells_of, streaming_heads
from peers.rows import ROWS, Spec
from transformers import AutoModelForCausalLM, DynamicCache, logging

Arrays = dict[str, np.ndarray]


def build(spec: Spec, ratio: float, model: Any, turn: bool) -> Any:
    """A press. turn: whether keys are turned to their new positions, which hides where they were."""
    arguments = {k: v for k, v in spec.items() if k not in ("press", "inner", "window", "sinks", "recent")}
    if "inner" in spec:
        inner = build(spec["inner"], ratio, model, turn)
        if spec["press"] == "KeyRerotationPress" and not turn:
            return inner
        return getattr(kvpress, spec["press"])(press=inner, **arguments)
    if spec["press"] == "FinchPress":
        press = kvpress.FinchPress(ratio, rerotate_keys=turn)
        press.window_size, press.delimiter_token_id = spec["window"], -1  # the window is given, so no token delimits it
        return press
    if spec["press"] == "DuoAttentionPress":
        return duo_attention(model, spec["sinks"], spec["recent"])
    if ratio:
        arguments["compression_ratio"] = ratio
    return getattr(kvpress, spec["press"])(**arguments)


def duo_attention(model: Any, sinks: int, recent: int) -> Any:
    """DuoAttention with a table of ours in place of one from the network."""
    table = torch.tensor(streaming_heads(model.config.num_hidden_layers, model.config.num_key_value_heads)).bool()
    press = kvpress.DuoAttentionPress(head_compression_ratio=float(table.float().mean()))
    press.sink_size, press.recent_size, press.streaming_mask = sinks, recent, table
    press.post_init_from_model = lambda model: None
    return press


def scorer(press: Any) -> Any:
    """The press whose scores are ranked: itself, or the one inside. None if no scores are."""
    if isinstance(press, kvpress.ScorerPress):
        return press
    inner = getattr(press, "press", None)
    return inner if isinstance(inner, kvpress.ScorerPress) and isinstance(press, kvpress.AdaKVPress) else None


@contextmanager
def recorded(target: Any, method: str, note: Callable[..., None]) -> Any:
    """Calls `note` with the layer, the arguments and the result of every call of a method."""
    inner = getattr(target, method)

    def outer(module: Any, hidden: Any, keys: Any, *rest: Any, **named: Any) -> Any:
        before = keys.clone()
        result = inner(module, hidden, keys, *rest, **named)
        note(module.layer_idx, before, result)
        return result

    setattr(target, method, outer)
    try:
        yield
    finally:
        delattr(target, method)


def places(kept: torch.Tensor, all_keys: torch.Tensor) -> np.ndarray:
    """Which keys of a head are among the kept. [n, D], [N, D] -> [N] bool."""
    where = {key.tobytes(): i for i, key in enumerate(all_keys.numpy())}
    assert len(where) == len(all_keys), "two positions have one key"
    mask = np.zeros(len(all_keys), bool)
    mask[[where[key.tobytes()] for key in kept.numpy()]] = True
    assert mask.sum() == len(kept), "a key was kept twice"
    return mask


def prefill(model: Any, press: Any, tokens: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The compressed cache and the last logits."""
    cache = DynamicCache()
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    with nullcontext() if press is None else press(model):
        return cache, model(tokens, past_key_values=cache).logits[0, -1]


def watched(model: Any, press: Any, tokens: torch.Tensor) -> tuple[Any, torch.Tensor, Arrays]:
    """Likewise, and what was kept with which scores."""
    keys, scores = {}, {}
    ranked = scorer(press)
    note = nullcontext() if ranked is None else recorded(ranked, "score", lambda at, _, of: scores.update({at: of[0].clone()}))
    with recorded(press, "compress", lambda at, before, _: keys.update({at: before[0]})), note:
        cache, logits = prefill(model, press, tokens)
    found = kept_of(model, cache, keys)
    if scores:
        found["scores"] = torch.stack([scores[i] for i in sorted(scores)]).float().numpy()
    return cache, logits, found


def kept_of(model: Any, cache: Any, keys: dict[int, torch.Tensor]) -> Arrays:
    """From the keys before compression, and the cache or the indices that attention masks."""
    layers = []
    for number, before in sorted(keys.items()):
        masked = model.model.layers[number].self_attn.masked_key_indices
        after = cache.layers[number].keys[0]
        if masked is None:
            layers.append(np.stack([places(a, b) for a, b in zip(after, before, strict=True)]))
        else:
            mask = np.ones(before.shape[:2], bool)
            mask[masked[1].numpy(), masked[2].numpy()] = False
            layers.append(mask)
    return {"kept": np.stack(layers)}


def continuation(model: Any, cache: Any, logits: torch.Tensor, tokens: torch.Tensor, position: int) -> np.ndarray:
    """NLLs of tokens read one by one after the prompt, the first at `position`. tokens: [T]. -> [T] float64."""
    nlls = []
    for i, token in enumerate(tokens):
        nlls.append(-logits.double().log_softmax(-1)[token].item())
        if i < len(tokens) - 1:
            at = torch.tensor([[position + i]])
            logits = model(token.view(1, 1), past_key_values=cache, position_ids=at).logits[0, -1]
    return np.array(nlls)


def run(cell: Cell, model: Any, ids: np.ndarray) -> Arrays:
    """All arrays of a cell."""
    length, spec = cell.prompt.length, cell.row.theirs
    tokens, after = torch.tensor(ids[None, :length]), torch.tensor(ids[length : length + CONTINUATION])
    model.set_attn_implementation("eager" if cell.row.eager else "sdpa")
    if not spec["press"]:
        return {"nlls": continuation(model, *prefill(model, None, tokens), after, length)}
    cache, logits, found = watched(model, build(spec, cell.ratio, model, False), tokens)
    if cell.row.positions == "cache":
        cache, logits = prefill(model, build(spec, cell.ratio, model, True), tokens)
        length = cache.get_seq_length()
    try:
        return found | {"nlls": continuation(model, cache, logits, after, length)}
    except ValueError as error:  # queries of a group that no fake key can have negative products with all of
        if "Could not find fake keys" not in str(error):
            raise
        return found


def main(folder: Path) -> None:
    """All cells of kvpress."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    prompts, models = np.load(folder / "prompts.npz"), json.loads((folder / "models.json").read_text())
    arrays: Arrays = {}
    with torch.inference_mode():
        for name, path in models.items():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for cell in (cell for row in ROWS for cell in cells_of(row, name)):
                result = run(cell, model, prompts[f"{name}|{cell.prompt.name}"])
                arrays |= {f"{cell.key}|{kind}": value for kind, value in result.items()}
    np.savez_compressed(folder / "theirs.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
