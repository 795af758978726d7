"""`model.generate` of an unmodified Hugging Face model under any policy, by a cache that is passed to it like any other.

A transformers cache is handed keys that are rotated already, and no attention weights, so by itself it could evict only by age,
and only at positions of the stream. So a call of the model that carries a `Cache` is answered by a decoder, which runs the model
block by block; every other call goes to the model itself. See `docs/decisions/0028`.

Axis letters: B streams, T tokens, K tokens whose logits are returned, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from types import MethodType
from typing import Any, Self, get_args
from weakref import WeakValueDictionary, finalize

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import RefusedModelError, UserError, did_you_mean
from kvbench.harness.core.evict import evict_as_json
from kvbench.harness.core.parameters import parameters_of, policy_from
from kvbench.harness.engine.attention import NAME
from kvbench.harness.engine.decoder import CacheConfig, Decoder
from kvbench.harness.engine.fastcheck import remembered_check
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.loop import decoder as open_decoder
from kvbench.harness.engine.method import EAGER, Method
from kvbench.harness.engine.model import UnsupportedModelError, adopt
from kvbench.harness.models.selfcheck import check
from kvbench.harness.rules.rules import refuse_if_broken
from kvbench.harness.suite.axes import evict_from, kv_from
from kvbench.policies import Policy, PositionMode

_BLOCK = 4096  # tokens per forward pass, all streams together
_UNDERSTOOD = {
    "input_ids", "attention_mask", "past_key_values", "logits_to_keep", "return_dict",
    "position_ids", "cache_position", "use_cache",  # which the decoder knows without being told
}  # fmt: skip


class Cache(transformers.Cache):
    """Holds a decoder. To `generate` it is as long as the text it has read, whatever it keeps of it."""

    _decoder: Decoder | None  # None until something is read
    _streams: int  # B
    _seen: int  # tokens read of each text, padding included
    _prompt: int | Tensor  # tokens of each text, without padding, before the first that came alone. [B] if they differ
    _in_prompt: bool  # none has come alone yet

    def __init__(
        self, model: PreTrainedModel, policy: str | Policy | type[Policy] = "dense", capacity: int | None = None, *,
        positions: PositionMode = "cache", evict: str | Mapping[str, Any] = "step", limit: int | None = None, seed: int = 0,
        kv: str | Mapping[str, Any] = "dtype", fast: bool = False, rope_length: int | None = None, **parameters: Any,
    ) -> None:  # fmt: skip
        """An empty cache for texts that are read side by side.

        Args:
            model: whose calls may carry the cache, in evaluation mode. While it has such caches, its `forward` is ours.
            policy: a name, `file.py:Class`, a class, or an instance.
            capacity: tokens per KV head kept between steps; None for a policy that never evicts.
            positions: where RoPE puts a cached token: `cache`, `stream` or `clamped`.
            evict: `step`, `prompt`, `{"every": TOKENS}` or `{"pages": TOKENS}`.
            limit: largest distance with positions `clamped`, in tokens; the model's training length when None.
            kv: how K and V are stored: `dtype`, `int4` or a mapping, as a suite writes it.
            fast: use the fastest method that agrees with the plain walk. It is found when a cache of this configuration first
                reads a text, in about a second.
            rope_length: longest position + 1, in tokens, for RoPE types whose tables depend on it.
            **parameters: of the policy.

        Raises:
            UserError: the model can't be driven exactly, or an argument has a mistake; the message is one line.
        """
        super().__init__(layers=[])
        if not isinstance(model, PreTrainedModel) or model.training:
            raise UserError(f"{type(model).__name__}: expected a transformers model in evaluation mode (model.eval())")
        if positions not in get_args(PositionMode):
            raise UserError(f"positions '{positions}'{did_you_mean(positions, get_args(PositionMode))}")
        try:
            asked = _policy(policy, parameters)
            self._config = CacheConfig(asked, capacity, positions, limit, seed, evict_from(evict), kv_from(kv))
            if capacity is not None:
                asked.bind(capacity)
            self._name = plugins.name_of(type(asked)) if plugins.is_ours(type(asked)) else type(asked).__name__
            refuse_if_broken(self._name, asked, capacity, model.device)
            self._route = _Route.of(model, rope_length)
            open_decoder(self._route.model, self._config)  # which may refuse the capacity, too
        except UserError:
            raise
        except (ValueError, TypeError) as error:
            raise UserError(f"kvbench.Cache: {error}") from error
        self._fast = fast
        self.reset()

    def report(self) -> dict[str, Any]:
        """What is kept, as plain values. Syncs with the host.

        `seen` are the tokens read of each text, padding included, and `kept` those held, the mean over texts, layers and KV
        heads. Bytes are those of all texts together: of K and V of the tokens held, of all slots for K and V, and of everything
        else (ranks, positions, statistics).
        """
        config, decoder = self._config, self._decoder
        held, allocated, state = (0, 0, 0) if decoder is None else (decoder.held_bytes, decoder.kv_bytes, decoder.state_bytes)
        kept = decoder.tokens_held if isinstance(decoder, CachedDecoder) else 0.0
        kv = "dtype" if config.kv is None else config.kv.as_json()
        return {
            "policy": self._name, "parameters": parameters_of(config.policy), "capacity": config.capacity,
            "positions": config.positions, "evict": evict_as_json(config.evict), "kv": kv, "texts": self._streams,
            "seen": self._seen, "kept": kept, "held_bytes": held, "allocated_bytes": allocated, "state_bytes": state,
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"Cache({', '.join(f'{name}={value!r}' for name, value in self.report().items())})"

    def reset(self) -> None:
        """Forget all texts, so that others can be read."""
        self._decoder, self._streams = None, 0
        self._seen, self._prompt, self._in_prompt = 0, 0, True

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache that has read the same, to go on from a prompt in several ways. The model is not copied."""
        other = copy(self)
        other._select(range(self._streams))
        return other

    def _answer(self, hf: PreTrainedModel, given: Mapping[str, Any]) -> Any:
        """Answer a call of the model. given: its arguments by name."""
        if hf is not self._route.model.hf:
            self.update()
        others = [k for k, v in given.items() if k not in _UNDERSTOOD and v is not None and v is not False]
        tokens, mask, keep = given.get("input_ids"), given.get("attention_mask"), given.get("logits_to_keep", 0)
        if others or tokens is None or not isinstance(keep, int):
            wrong = ", ".join(others or ["logits_to_keep as a tensor" if tokens is not None else "all but input_ids"])
            raise UserError(f"a kvbench.Cache reads input_ids and gives logits: leave out {wrong}")
        if given.get("use_cache") is False:
            raise UserError("use_cache is False, so generate would pass the whole text at every step: pass use_cache=True")
        if mask is not None and mask.ndim != 2:
            raise UserError(f"a kvbench.Cache needs an attention_mask of two dimensions, not {mask.ndim}")
        if self._decoder is not None and len(tokens) != self._streams:
            raise UserError(f"this cache holds {self._streams} texts, and {len(tokens)} came: reset() it, or make another one")
        valid = None if mask is None else mask[:, -tokens.shape[1] :].to(hf.device, torch.bool)
        try:
            with self._route.our_attention():
                logits = self._read(
                    tokens.to(hf.device), None if valid is None or bool(valid.all()) else valid, keep or tokens.shape[1]
                )
        except BaseException:  # some layers have read what others have not
            self.reset()
            raise
        out = CausalLMOutputWithPast(logits=logits, past_key_values=self)
        return out.to_tuple() if given.get("return_dict") is False else out

    def _read(self, tokens: Tensor, valid: Tensor | None, keep: int) -> Tensor:
        """Read what comes next of every text. keep: of how many of the last tokens to return logits. -> [B, K, V]."""
        (streams, count), first, evict = tokens.shape, self._decoder is None, self._config.evict
        block = max(1, _BLOCK // streams)
        if self._decoder is None:
            self._decoder, self._streams = open_decoder(self._route.model, self._config, streams, self._method(streams)), streams
        self._in_prompt = first or (self._in_prompt and count > 1)
        self._seen += count
        if evict == "prompt" and self._in_prompt:
            if not first:
                raise UserError("evict 'prompt' needs the whole prompt at once: leave out prefill_chunk_size")
            if valid is not None:
                raise UserError("evict 'prompt' needs prompts of one length: generate one by one, or evict at another time")
            if keep != 1:
                raise UserError("evict 'prompt' gives the logits after the prompt's last token alone: pass logits_to_keep=1")
            return torch.stack([self._decoder.read_prompt(tokens, block)], 1)
        if self._in_prompt and isinstance(self._decoder, CachedDecoder):
            self._prompt = self._prompt + (count if valid is None else valid.sum(1))
            self._decoder.begin_prompt(self._prompt)
        parts = []
        for start in range(0, count, block):
            part, counts = tokens[:, start : start + block], None if valid is None else valid[:, start : start + block]
            length = part.shape[1]
            kept = torch.arange(min(max(0, count - keep - start), length), length, device=tokens.device)
            parts.append(self._decoder(part, counts, kept if len(kept) < length else None))
        return torch.cat(parts, 1)  # outside of inference mode, so that the caller may change it

    def _method(self, streams: int) -> Method:
        """The way of reading."""
        if not self._fast or not self._config.policy.caches:
            return EAGER
        return remembered_check(self._route.model, self._config, streams).method

    def _select(self, texts: Sequence[int]) -> None:
        """Hold these texts instead of all, some more than once."""
        if self._decoder is not None:
            self._decoder, self._streams, self._in_prompt = self._decoder.fork(texts), len(texts), False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read of each text, padding included: `generate` passes on only what comes after them."""
        return self._seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: a text may have any length."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue each beam from the one it came from."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the texts: their indices, or a mask."""
        self._select(torch.arange(self._streams)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue every text in several ways."""
        self._select([text for text in range(self._streams) for _ in range(repeats)])

    def crop(self, *_: Any) -> None:
        """Refuse to forget the newest tokens: the evicted ones don't come back."""
        raise UserError("a kvbench.Cache can't take tokens back: leave out assistant_model, prompt_lookup_num_tokens and crop")

    activate_past_recording = crop  # what assisted decoding does first

    @property
    def is_croppable(self) -> bool:
        """False: evicted tokens don't come back."""
        return False

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Refuse K and V, which come from a model, or a part of one, that this cache was not made for."""
        raise UserError("this kvbench.Cache belongs to another model, or its layers were called: make one for the model you call")


def _policy(policy: str | Policy | type[Policy], parameters: Mapping[str, Any]) -> Policy:
    """The policy that was asked for.

    Raises:
        UserError: there is none of this name.
        ValueError, TypeError: it has no such parameters, or refuses their values.
    """
    if isinstance(policy, str):
        return policy_from(policy, parameters)
    if isinstance(policy, Policy) and not parameters:
        return policy
    if inspect.isclass(policy) and issubclass(policy, Policy):
        return policy(**parameters)
    raise UserError(f"policy: expected a name, file.py:Class, a class or an instance with its parameters, not {policy!r}")


class _Route:
    """The way of a model's calls to the caches that they carry. It lasts as long as one of these caches.

    Attributes:
        model: checked. Between calls it has its own attention.
    """

    def __init__(self, hf: PreTrainedModel, rope_length: int | None) -> None:
        self._rope_length = rope_length
        self._configs = list({id(m.config): m.config for m in hf.modules() if isinstance(m, PreTrainedModel)}.values())
        trained = [parameter for parameter in hf.parameters() if parameter.requires_grad]
        try:
            with self.our_attention():
                self.model = adopt(hf, rope_length)
                self.model.check = check(self.model, rope_length)
        except UnsupportedModelError as error:
            raise RefusedModelError(f"model family '{hf.config.model_type}' can't be driven: {error}") from error
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
        before = vars(hf).get("forward")  # Accelerate puts one there, and a copy of a routed model has ours
        own, instead = type(hf).forward, before
        if isinstance(before, MethodType) and before.__self__ is hf:
            own, instead = before.__func__, None
        routed = MethodType(_routed(own, instead), hf)
        hf.forward = routed
        finalize(self, _put_back, hf, routed, before)

    @staticmethod
    def of(hf: PreTrainedModel, rope_length: int | None) -> _Route:
        """The route of a model: that of its other caches, if there are any.

        Raises:
            UserError: the model can't be driven exactly, or its other caches have another `rope_length`.
        """
        route = _ROUTES.get(id(hf))
        if route is None:
            route = _ROUTES[id(hf)] = _Route(hf, rope_length)
        if route._rope_length != rope_length:
            raise UserError(f"rope_length {rope_length}: the model's other caches have {route._rope_length}")
        return route

    @contextmanager
    def our_attention(self) -> Iterator[None]:
        """Let the decoder compute the model's attention; what computed it before is put back."""
        before = [(config, config._attn_implementation) for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation = NAME
            yield
        finally:
            for config, own in before:
                config._attn_implementation = own


_ROUTES: WeakValueDictionary[int, _Route] = WeakValueDictionary()  # by id of the model, which a route keeps alive


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
        if isinstance(cache, Cache):
            return cache._answer(self, given)
        return before(*args, **kwargs) if before is not None else own(self, *args, **kwargs)

    return forward


def _put_back(hf: PreTrainedModel, routed: Callable[..., Any], before: Callable[..., Any] | None) -> None:
    """Give a model the `forward` it had, unless somebody has put another one there since."""
    if vars(hf).get("forward") is routed:
        del hf.forward
        if before is not None:
            hf.forward = before
