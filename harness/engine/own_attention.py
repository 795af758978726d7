"""Switch the function that computes a model's attention: one registered with transformers, or the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from transformers import PreTrainedModel

from kvbench.harness.engine.attention import implemented_by
from kvbench.harness.engine.zero_sink import ZERO_SINK


@contextmanager
def attention_by(hf: PreTrainedModel, name: str) -> Iterator[None]:
    """Let a registered function compute a model's attention in this context.

    Raises:
        ValueError: the model family does not support the function.
    """
    with implemented_by(hf._check_and_adjust_attn_implementation(name, is_init_check=False)):
        yield


def own_attention(hf: PreTrainedModel) -> AbstractContextManager[None]:
    """Run a model with the attention of its authors in this context, for a reference forward pass.

    A model class may name a function that is registered with transformers in its attribute `own_attention`.
    """
    if name := getattr(hf, "own_attention", None):
        return attention_by(hf, name)
    zero_sink = getattr(hf.config.get_text_config(), "zero_sink", False)  # transformers has no attention for it
    return attention_by(hf, ZERO_SINK if zero_sink else "eager")
