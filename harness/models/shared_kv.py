"""A transformer whose layers may read the K and V of an earlier layer, for `random:` shapes and tests.

Axis letters: B streams, T tokens, E hidden size, H KV heads, D head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, Qwen3Model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb, eager_attention_forward

from kvbench.harness.models.shared_kv_config import SharedKVConfig, kv_sources

Vectors = dict[int, tuple[Tensor, Tensor]]  # K and V of the layers so far. [B, H, T, D] each


class _SharedKVAttention(Qwen3Attention):
    """Attention over the K and V of this layer, or of an earlier one."""

    def __init__(self, config: SharedKVConfig, layer: int, source: int) -> None:
        super().__init__(config, layer)
        self.source = source
        if source != layer:
            del self.k_proj, self.v_proj, self.k_norm

    def forward(  # type: ignore[override]  # no cache: our loop keeps K and V
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None, *,
        vectors: Vectors, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """[B, T, E] -> [B, T, E]."""
        by_head = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(by_head)).transpose(1, 2)
        if self.source == self.layer_idx:
            keys = self.k_norm(self.k_proj(hidden_states).view(by_head)).transpose(1, 2)
            query, keys = apply_rotary_pos_emb(query, keys, *position_embeddings)
            vectors[self.layer_idx] = keys, self.v_proj(hidden_states).view(by_head).transpose(1, 2)
        else:
            query, _ = apply_rotary_pos_emb(query, query, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(
            self, query, *vectors[self.source], attention_mask, scaling=self.scaling, sliding_window=self.sliding_window, **kwargs
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


class _Layers(Qwen3Model):
    """The layers of Qwen3. Each hands its K and V on to the layers after it."""

    def __init__(self, config: SharedKVConfig) -> None:
        super().__init__(config)
        for layer, source in enumerate(kv_sources(config)):
            self.layers[layer].self_attn = _SharedKVAttention(config, layer, source)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of Qwen3, with an empty dict for the layers' K and V."""
        return super().forward(*args, vectors={}, **kwargs)


class SharedKVForCausalLM(Qwen3ForCausalLM):
    """Logits of the next token. It keeps no cache itself."""

    config_class = SharedKVConfig

    def __init__(self, config: SharedKVConfig) -> None:
        """config: with `kv_layers`."""
        super().__init__(config)
        self.model: nn.Module = _Layers(config)
        self.post_init()  # type: ignore[no-untyped-call]


AutoModelForCausalLM.register(SharedKVConfig, SharedKVForCausalLM)
