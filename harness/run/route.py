"""The way from a model's calls to the caches that they carry."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from threading import RLock
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary, finalize

import transformers
from torch import nn
from transformers import PreTrainedModel

from kvbench.harness.core.errors import RefusedModelError, UserError
from kvbench.harness.engine.model import UnsupportedModelError, adopt, is_compiled
from kvbench.harness.models.selfcheck import check

LOCK = RLock()  # held while a model is checked, so that two threads don't route it twice


class AnsweringCache(transformers.Cache):
    """A cache that answers the calls of a model that carry it."""

    def answer(self, hf: PreTrainedModel, given: Mapping[str, Any]) -> Any:
        """Answer a call of the model. given: its arguments by name."""
        raise NotImplementedError


class Route:
    """The `forward` of a model that lets caches answer. It lasts as long as one of these caches.

    Attributes:
        hf: the model whose calls are routed.
        model: checked. It is the model itself wherever possible, else a copy with the same weights.
    """

    def __init__(self, hf: PreTrainedModel, rope_length: int | None) -> None:
        self.hf, self.rope_length = hf, rope_length
        try:
            self.model = adopt(hf, rope_length, shared=True)
            self.model.check = check(self.model, rope_length)
        except UnsupportedModelError as error:
            raise RefusedModelError(f"model family '{hf.config.model_type}' can't be driven: {error}") from error
        before = vars(hf).get("forward")  # Accelerate puts one there, and a copy of a routed model has ours
        own, instead = type(hf).forward, before
        if isinstance(before, MethodType) and before.__self__ is hf:
            own, instead = before.__func__, None
        routed = MethodType(_routed(own, instead), hf)
        hf.forward = routed
        finalize(self, _put_back, hf, routed, before)

    @staticmethod
    def of(hf: PreTrainedModel, rope_length: int | None) -> Route:
        """The route of a model: that of its other caches, if there are any.

        Raises:
            UserError: the model can't be driven exactly, or its other caches have another `rope_length`.
        """
        with LOCK:
            route = _ROUTES.get(id(hf))
            if route is None:
                route = _ROUTES[id(hf)] = Route(hf, rope_length)
        if route.rope_length != rope_length:
            raise UserError(f"rope_length {rope_length}: the model's other caches have {route.rope_length}")
        return route

    def refuse_if_compiled_since(self) -> None:
        """Refuse a model that was compiled after it was routed: compiled code does not ask who computes attention."""
        if self.model.hf is self.hf and is_compiled(self.hf):
            raise UserError(f"{type(self.hf).__name__} was compiled after its first kvbench.Cache: drop its caches for new ones")


_ROUTES: WeakValueDictionary[int, Route] = WeakValueDictionary()  # by id of the model, which a route keeps alive


def routable(model: Any) -> PreTrainedModel:
    """The transformers model that answers the calls of a model: itself, or the one that PEFT, a compiler or DDP wrapped.

    Raises:
        UserError: there is none, or it is in training mode.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    hf = next((module for module in modules if isinstance(module, PreTrainedModel)), None)
    if hf is None:
        raise UserError(f"{type(model).__name__}: expected a transformers model, or a wrapper of one")
    if not hf.can_generate():
        raise UserError(f"{type(hf).__name__} gives no logits of a next token: load it with AutoModelForCausalLM")
    refuse_training(hf)
    return hf


def refuse_training(hf: PreTrainedModel) -> None:
    """Refuse a model that drops values at random."""
    if hf.training:
        raise UserError(f"{type(hf).__name__} is in training mode: call model.eval() to put it into evaluation mode")


def _routed(own: Callable[..., Any], before: Callable[..., Any] | None) -> Callable[..., Any]:
    """A model's `forward` that lets caches of ours answer.

    A function to be bound, so that a copy of the model has one of its own.

    Args:
        own: the method that the model had.
        before: one that is no method, which the model had instead; None if it had none.
    """
    names = list(inspect.signature(own).parameters)[1:]

    @functools.wraps(own)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        cache = given.get("past_key_values")
        if isinstance(cache, AnsweringCache):
            return cache.answer(self, given)
        return before(*args, **kwargs) if before is not None else own(self, *args, **kwargs)

    return forward


def _put_back(hf: PreTrainedModel, routed: Callable[..., Any], before: Callable[..., Any] | None) -> None:
    """Give a model the `forward` it had, unless somebody has put another one there since."""
    if vars(hf).get("forward") is routed:
        del hf.forward
        if before is not None:
            hf.forward = before
