"""A watcher that keeps everything, and the attention weights of a model's own code."""

import torch
from torch import Tensor, nn

from kvbench.harness.engine.own_attention import attention_by
from kvbench.harness.engine.watch import Chunk

TOKENS = 40
IDS = torch.randint(3, 120, (2, TOKENS), generator=torch.Generator().manual_seed(5))


class Whole:
    """Keeps all weights."""

    def __init__(self) -> None:
        self.chunks: list[list[Chunk]] = []
        self.norms: list[Tensor] = []
        self.hidden: list[Tensor] = []

    def see_vectors(self, layer, keys, values):
        self.norms.append(values.norm(dim=-1))

    def see_chunk(self, chunk):
        if chunk.layer == len(self.chunks):
            self.chunks.append([])
        self.chunks[chunk.layer].append(chunk)

    def see_hidden(self, layer, hidden):
        self.hidden.append(hidden)

    def weights(self, layer: int) -> Tensor:
        parts = [c.weights for c in self.chunks[layer]]
        return torch.cat([nn.functional.pad(x, (0, TOKENS - x.shape[-1])) for x in parts], 2)


def eager_weights(hf, ids: Tensor = IDS, mask: Tensor | None = None) -> list[Tensor]:
    with attention_by(hf, "eager"), torch.inference_mode():
        extra = {} if mask is None else {"attention_mask": mask}
        return list(hf(input_ids=ids, use_cache=False, output_attentions=True, **extra).attentions)
