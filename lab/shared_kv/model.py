"""A Llama whose layers read the K and V of other layers, so that fewer layers have a cache.

Sources: CLA, Brandon et al. 2024, arXiv:2405.12981, `kv_layers: [0, 0, 2, 2]`; YOCO, Sun et al. 2024, arXiv:2405.05254,
    `[0, 1, 2, 2]`; LCKV, Wu and Tu 2024, arXiv:2405.10637, whyNLP/LCKV dd21716 and, for the paper, its branch dev-lckv-publish.
    In LCKV no token sees itself, and the first one, which sees nothing, gets zeros from attention. Training: `blind` passes, then
    `graded` ones.
Differs: layers that read their own K and V alone have standard attention, with the diagonal, as in the paper's text and the newer
    code; the paper's code hides it there, too. The top layer hides it as in the paper; the newer code doesn't. Outside of
    training, passes are repeated until none changes K or V, so that a text gives the logits that single tokens give.

Axis letters: B samples, T tokens, E width, H KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvbench.harness.engine.attention import NAME as DECODE_LOOP
from kvbench.harness.engine.probes import SHARED_KV
from kvbench.lab.shared_kv.sources import kv_sources
from kvbench.lab.variants.base import VariantForCausalLM, register

NAME = "kv_bench_lckv_attention"
Vectors = dict[int, tuple[Tensor, Tensor]]  # K and V, by the layer that made them last. [B, H, T, D] each


class LCKVConfig(LlamaConfig):
    """Llama's config and, for each layer, the layer whose K and V it reads, which may come later."""

    model_type = "kv_bench_lckv"
    kv_layers: list[int] | None = None  # None: each reads its own
    blind: int = 7  # passes of a training step without a gradient; m in the paper
    graded: int = 2  # and with one, after them; b


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None = None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention, without the diagonal where K and V come later. [B, Q, T, D], [B, H, T, D] -> [B, T, Q, D]."""
    lags: Any = module.lags
    hidden = int(lags)  # keys of the newest tokens that a query doesn't see
    query, length = query[:, :, hidden:], key.shape[2] - hidden
    key, value = key[:, :, :length], value[:, :, :length]
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return pad(out, (0, 0, hidden, 0)).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)


class _Attention(llama.LlamaAttention):
    """Attention over the K and V of this layer or another.

    Attributes:
        source: the layer whose K and V it reads.
        lags: some layer reads these K and V before they are made, so that no token sees itself.
    """

    def __init__(self, config: LlamaConfig, layer: int, source: int, lags: bool) -> None:
        super().__init__(config, layer)
        self.source, self.lags = source, lags
        if source != layer:
            del self.k_proj, self.v_proj

    def forward(  # type: ignore[override]  # no cache: a decoder keeps K and V
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *, vectors: Vectors, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, E] -> [B, T, E]."""
        by_head = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(by_head).transpose(1, 2)
        if self.source == self.layer_idx:
            keys, values = (project(hidden_states).view(by_head).transpose(1, 2) for project in (self.k_proj, self.v_proj))
            query, keys = apply_rotary_pos_emb(query, keys, *position_embeddings)
            vectors[self.layer_idx] = keys, values
        else:
            query, _ = apply_rotary_pos_emb(query, query, *position_embeddings)
        unmade = query.new_zeros(()).expand(query[:, :: self.num_key_value_groups].shape)  # the decode loop has them in its cache
        keys, values = vectors.get(self.source, (unmade, unmade))
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, weights = attend(self, query, keys, values, None, scaling=self.scaling)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


class _Layers(llama.LlamaModel):
    """The layers of a Llama. Those between a reader and the layer it reads run again and again."""

    def __init__(self, config: LCKVConfig) -> None:
        super().__init__(config)
        sources = kv_sources(config)
        lagging = {source for layer, source in enumerate(sources) if source > layer}
        readers = [layer for layer, source in enumerate(sources) if source in lagging]
        self.first, self.end = min(readers, default=0), max(readers, default=-1) + 1  # of those that run again
        for layer, source in enumerate(sources):
            self.layers[layer].self_attn = _Attention(config, layer, source, source in lagging)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(  # type: ignore[override]  # the rest of what a Llama takes is of caches
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """[B, T] int64 -> [B, T, E].

        Raises:
            ValueError: a cache or a mask is given, which the model does not support.
        """
        if past_key_values is not None or (attention_mask is not None and not bool(attention_mask.all())):
            raise ValueError("a kv_bench_lckv reads whole texts without padding, and keeps no cache itself: see bench shared-kv")
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(embedded.shape[1], device=embedded.device)[None]
        tables, vectors = self.rotary_emb(embedded, position_ids=position_ids), Vectors()

        def through(x: Tensor, layers: nn.ModuleList) -> Tensor:
            for layer in layers:
                x = layer(x, position_embeddings=tables, vectors=vectors)
            return x

        before = after = through(embedded, self.layers[: self.first])
        for graded in self._passes(embedded.shape[1], vectors):
            with nullcontext() if graded else torch.no_grad():
                after = through(before, self.layers[self.first : self.end])
        return BaseModelOutputWithPast(last_hidden_state=self.norm(through(after, self.layers[self.end :])))

    def _passes(self, tokens: int, vectors: Vectors) -> Iterator[bool]:
        """Whether each pass has a gradient. The n-th one is right for the first n tokens, whatever came before."""
        if self.config._attn_implementation == DECODE_LOOP or self.first >= self.end:
            yield True
            return
        if self.training:
            yield from [False] * self.config.blind + [True] * self.config.graded
            return
        for _ in range(tokens):
            before = dict(vectors)
            yield True
            if before.keys() == vectors.keys() and all(
                torch.equal(x, y) for layer, pair in vectors.items() for x, y in zip(before[layer], pair, strict=True)
            ):
                return


class LCKVForCausalLM(VariantForCausalLM):
    """A Llama with fewer caches than layers."""

    config_class = LCKVConfig
    own_attention = NAME
    undrivable = SHARED_KV

    def __init__(self, config: LCKVConfig) -> None:
        super().__init__(config)
        self.model: nn.Module = _Layers(config)
        self.post_init()  # type: ignore[no-untyped-call]


register(LCKVForCausalLM)
