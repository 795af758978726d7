"""References for our speed: the code that people usually write. Don't improve it, so that ratios keep their meaning.

Token by token through an unmodified Hugging Face model with a `DynamicCache` that is cut by concatenating and slicing after
every step, as the StreamingLLM release does; and an H2O with eager attention, accumulated scores and a real drop. Positions
are the stream's (the cheaper choice: nothing is rotated again).
"""

import time

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

SHAPES = {
    "5m": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
    },
    "100m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 16384,
    },
}


def made(shape: str, dtype: torch.dtype, attention: str) -> LlamaForCausalLM:
    """A model with the same random weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=4096, attn_implementation=attention)
    return LlamaForCausalLM(config).to(dtype).eval()


@torch.inference_mode()
def sink_window_nll(hf: PreTrainedModel, tokens: Tensor, sinks: int, window: int, clock: list[float]) -> Tensor:
    """NLL of every token but the first. tokens: [1, T] -> [T - 1]. `clock` gets the time at the end of every step."""
    cache, losses = DynamicCache(config=hf.config), []
    for t in range(tokens.shape[1] - 1):
        at = torch.tensor([[t]])
        logits = hf(input_ids=tokens[:, t : t + 1], position_ids=at, past_key_values=cache, use_cache=True).logits
        losses.append(cross_entropy(logits[:, -1].float(), tokens[:, t + 1]))
        if cache.get_seq_length() > sinks + window:
            for layer in cache.layers:
                layer.keys = torch.cat([layer.keys[:, :, :sinks], layer.keys[:, :, -window:]], 2)
                layer.values = torch.cat([layer.values[:, :, :sinks], layer.values[:, :, -window:]], 2)
        clock.append(time.perf_counter())
    return torch.stack(losses)


@torch.inference_mode()
def h2o_nll(hf: PreTrainedModel, tokens: Tensor, heavy_hitters: int, window: int, clock: list[float]) -> Tensor:
    """NLL of every token but the first under H2O, with the arguments of `sink_window_nll`. The model must use eager attention."""
    cache, losses = DynamicCache(config=hf.config), []
    scores: list[Tensor] = [torch.zeros(0)] * hf.config.num_hidden_layers
    for t in range(tokens.shape[1] - 1):
        out = hf(
            input_ids=tokens[:, t : t + 1],
            position_ids=torch.tensor([[t]]),
            past_key_values=cache,
            use_cache=True,
            output_attentions=True,
        )
        losses.append(cross_entropy(out.logits[:, -1].float(), tokens[:, t + 1]))
        for index, (layer, attention) in enumerate(zip(cache.layers, out.attentions, strict=True)):
            heads = layer.keys.shape[1]
            mass = attention[0, :, 0].view(heads, -1, attention.shape[-1]).sum(1)  # [H, S]
            scores[index] = mass + torch.nn.functional.pad(scores[index].view(heads, -1), (0, 1)) if t else mass
            if layer.keys.shape[2] > heavy_hitters + window:
                victim = scores[index][:, :-window].argmin(-1)  # [H]
                keep = torch.ones_like(scores[index], dtype=torch.bool).scatter(1, victim[:, None], False)
                layer.keys = layer.keys[0][keep].view(1, heads, -1, layer.keys.shape[-1])
                layer.values = layer.values[0][keep].view(1, heads, -1, layer.values.shape[-1])
                scores[index] = scores[index][keep].view(heads, -1)
        clock.append(time.perf_counter())
    return torch.stack(losses)
