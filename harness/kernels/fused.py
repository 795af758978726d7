"""The forward pass of single tokens in few kernels: the whole model is compiled, with our attention as one opaque operation.

Eager code launches a kernel for every operation. Compiled code launches one for every matrix product, our attention, and one for
all that lies between two of these: a residual sum and the RMSNorm after it, or SiLU and its product.
Compiling takes seconds for each number of streams, so it is for steps that are captured as CUDA graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.harness.engine.kernel_interface import FusedStepError

_BACKEND = "inductor"
_MOST_COMPILATIONS = 64  # of models and numbers of streams in one process, after which a step is refused


def fused_logits(hf: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits of single tokens at position 0, from compiled code. [B, 1] int64 -> [B, 1, V], the model's dtype.

    The first call for a model and a number of streams compiles.

    Raises:
        FusedStepError: the model can't be compiled as a whole.
    """
    from torch._dynamo import config, exc
    from torch._inductor import config as inductor

    with (
        config.patch(recompile_limit=_MOST_COMPILATIONS),
        inductor.patch(compile_threads=1),  # the same few kernels in every layer: starting processes would take longer
        warnings.catch_warnings(action="ignore"),  # advice from the compiler
    ):
        try:
            return _compiled(_BACKEND)(hf, tokens.clone(memory_format=torch.contiguous_format))  # other strides compile again
        except exc.FailOnRecompileLimitHit as error:
            raise FusedStepError(f"its step is not compiled: {_MOST_COMPILATIONS} of other models or streams were") from error
        except exc.TorchDynamoException as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise FusedStepError(f"its step can't be compiled: {' '.join(lines[:2])}") from error


def _logits(hf: PreTrainedModel, tokens: Tensor) -> Tensor:
    logits: Tensor = hf(input_ids=tokens, position_ids=torch.zeros_like(tokens), use_cache=False).logits
    return logits


@cache
def _compiled(backend: str | Callable[..., Any]) -> Callable[[PreTrainedModel, Tensor], Tensor]:
    """`_logits`, to be compiled by its first call; whole or not at all."""
    return torch.compile(_logits, backend=backend, fullgraph=True, dynamic=False)
