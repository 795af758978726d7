"""OrthoAdam: Adam with moments in a fixed random orthogonal basis, one per parameter, so that no hidden dimension is special.

Source: Kaul et al. 2024, arXiv:2410.17174, Algorithm 1.
Differs: the basis of a matrix is the Kronecker product of one for its rows and one for its columns; a basis of all numbers of a
    128 x 344 matrix would have two billion entries. Weight decay is decoupled, as in AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class OrthoAdam(torch.optim.Optimizer):
    """AdamW whose moments are those of rotated gradients."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Draw the bases of parameters, which have one or two axes, from the seed.

        They are drawn again when training resumes, so that checkpoints stay small. `weight_decay` is the share of a weight that a
        step takes away, times the learning rate.
        """
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        generator = torch.Generator().manual_seed(seed)
        every = [x for group in self.param_groups for x in group["params"]]
        self._bases = {x: [random_orthogonal(size, generator).to(x) for size in x.shape] for x in every}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    x.mul_(1 - group["lr"] * group["weight_decay"])
                    x.sub_(group["lr"] * _rotated(self._adam(x, group), [basis.T for basis in self._bases[x]]))
        return loss

    def _adam(self, x: Tensor, group: dict[str, Any]) -> Tensor:
        """Adam's direction, in the basis of the parameter."""
        gradient, state = _rotated(x.grad, self._bases[x]), self.state[x]  # type: ignore[arg-type]
        if not state:
            state |= {"step": 0, "first": torch.zeros_like(x), "second": torch.zeros_like(x)}
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["first"].lerp_(gradient, 1 - beta1)
        state["second"].lerp_(gradient.square(), 1 - beta2)
        first, second = state["first"] / (1 - beta1 ** state["step"]), state["second"] / (1 - beta2 ** state["step"])
        return first / (second.sqrt() + group["eps"])


def random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """A matrix drawn evenly from all orthogonal ones. [size, size] float32."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).float()


def _rotated(x: Tensor, bases: list[Tensor]) -> Tensor:
    """Multiply every axis by its basis. [N], or [M, N]."""
    x = bases[0] @ x
    return x if len(bases) == 1 else x @ bases[1].T
