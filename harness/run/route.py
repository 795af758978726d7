"""Route a model's calls to the caches that are passed with them."""

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
    """Cache that answers the model calls to which it is passed."""

    def answer(self, hf: PreTrainedModel, given: Mapping[str, Any]) -> Any:
        """Answer a call of the model. given: its arguments by name."""
        raise NotImplementedError


class Route:
    """Replacement of a model's `forward` that lets caches answer. It lasts as long as one of these caches.

    Attributes:
        hf: model whose calls are routed.
        model: checked model: `hf` itself if possible, otherwise a copy that shares its weights.
    """

    def __init__(self, hf: PreTrainedModel, rope_length: int | None) -> None:
        self.hf, self.rope_length = hf, rope_length
        try:
            self.model = adopt(hf, rope_length, shared=True)
            self.model.check = check(self.model, rope_length)
        except UnsupportedModelError as error:
            raise RefusedModelError(f"model family '{hf.config.model_type}' can't be driven: {error}") from error
        before = vars(hf).get("forward")  # Accelerate sets it, and a copy of a routed model has ours
        own, instead = type(hf).forward, before
        if isinstance(before, MethodType) and before.__self__ is hf:
            own, instead = before.__func__, None
        routed = MethodType(_routed(own, instead), hf)
        hf.forward = routed
        finalize(self, _put_back, hf, routed, before)

    @staticmethod
    def of(hf: PreTrainedModel, rope_length: int | None) -> Route:
        """Return the route of a model, which all of its caches share.

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
        """Refuse a model that was compiled after it was routed, because compiled code ignores the choice of attention.

        Raises:
            UserError: the model was compiled.
        """
        if self.model.hf is self.hf and is_compiled(self.hf):
            raise UserError(f"{type(self.hf).__name__} was compiled after its first kvbench.Cache: drop its caches for new ones")


_ROUTES: WeakValueDictionary[int, Route] = WeakValueDictionary()  # by id of the model, which a route keeps alive


def routable(model: Any) -> PreTrainedModel:
    """Return the transformers model inside a model: the model itself, or the model that PEFT, a compiler or DDP wrapped.

    Raises:
        UserError: there is no such model, it has no logits of a next token, or it is in training mode.
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
    """Refuse a model in training mode, which drops values at random.

    Raises:
        UserError: the model is in training mode.
    """
    if hf.training:
        raise UserError(f"{type(hf).__name__} is in training mode: call model.eval() to put it into evaluation mode")


def _routed(own: Callable[..., Any], before: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a `forward` that lets our caches answer. It is an unbound function, so that a copy of the model binds its own.

    Args:
        own: method of the model.
        before: function that was set on the model in place of its method; None if there was none.
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
    """Restore a model's `forward`, unless it was replaced again in the meantime."""
    if vars(hf).get("forward") is routed:
        del hf.forward
        if before is not None:
            hf.forward = before
