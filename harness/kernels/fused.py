"""Forward pass of single tokens in few kernels: the whole model is compiled, with our attention as one opaque operation.

Eager code launches a kernel for every operation. Compiled code launches one kernel for every matrix product, our attention, and
one kernel for all operations between two of these, such as a residual sum and its RMSNorm, or SiLU and its product. Compiling
takes seconds for each number of streams, so only steps that are captured as CUDA graphs use compiled code.
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
_MOST_COMPILATIONS = 64  # of (model, number of streams) in one process; further steps are refused


def fused_logits(hf: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Compute logits of single tokens at position 0 by compiled code. [B, 1] int64 -> [B, 1, V], the model's dtype.

    The first call for each model and number of streams compiles the code.

    Raises:
        FusedStepError: the model can't be compiled as a whole.
    """
    from torch._dynamo import config, exc
    from torch._inductor import config as inductor

    with (
        config.patch(recompile_limit=_MOST_COMPILATIONS),
        inductor.patch(compile_threads=1),  # all layers share a few kernels, so starting processes would take longer
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
    """Return `_logits` with compilation on the first call, as a whole or not at all."""
    return torch.compile(_logits, backend=backend, fullgraph=True, dynamic=False)
