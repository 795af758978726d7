"""`model.generate` of an unmodified Hugging Face model under any policy, by a cache that is passed like any other cache.

A transformers cache receives rotated keys and no attention weights. On its own, it could evict only by age, and only with stream
positions. A model call with a `Cache` is therefore answered by a decoder, which runs the model block by block. All other calls go
to the model itself. See `docs/decisions/0028`.

Axis letters: B streams, T tokens, K tokens whose logits are returned, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvbench.harness.core import plugins
from kvbench.harness.core.errors import LARGEST_INTEGER, UserError, did_you_mean
from kvbench.harness.core.evict import evict_as_json
from kvbench.harness.core.parameters import parameters_of
from kvbench.harness.engine.decoder import CacheConfig, Decoder, refuse_too_large
from kvbench.harness.engine.fastcheck import remembered_check
from kvbench.harness.engine.loop import CachedDecoder
from kvbench.harness.engine.loop import decoder as open_decoder
from kvbench.harness.engine.method import EAGER, Method
from kvbench.harness.engine.rotary import LONGEST_STREAM
from kvbench.harness.rules.rules import refuse_if_broken
from kvbench.harness.run.cache_arguments import policy_of, refuse_arguments, whole_number
from kvbench.harness.run.route import LOCK, AnsweringCache, Route, refuse_training, routable
from kvbench.harness.suite.axes import evict_from, kv_from
from kvbench.policies import Policy, PositionMode

_BLOCK = 4096  # tokens per forward pass, all streams together


class Cache(AnsweringCache):
    """Cache with a decoder inside. For `generate`, its length is the number of tokens read, evicted tokens included."""

    _decoder: Decoder | None  # None until tokens are read
    _streams: int  # B
    _tokens_read: int  # number of tokens read of each text, padding included
    _prompt: int | Tensor  # tokens of each text, without padding, before the first single token. [B] if they differ
    _padding: Tensor | None  # number of padding tokens read; None without padding. [B]
    _in_prompt: bool  # no single token was read yet

    def __init__(
        self,
        model: nn.Module,
        policy: str | Policy | type[Policy] = "dense",
        capacity: int | None = None,
        *,
        positions: PositionMode = "cache",
        evict: str | Mapping[str, Any] = "step",
        limit: int | None = None,
        seed: int = 0,
        kv: str | Mapping[str, Any] = "dtype",
        fast: bool = False,
        rope_length: int | None = None,
        **parameters: Any,
    ) -> None:
        """Create an empty cache for texts that are read side by side.

        Args:
            model: model to call with the cache, in evaluation mode. Its `forward` is replaced as long as it has such caches.
            policy: a name, `file.py:Class`, a class, or an instance.
            capacity: tokens per KV head kept between steps; None for a policy that never evicts.
            positions: position that RoPE gives to a cached token: `cache`, `stream` or `clamped`.
            evict: `step`, `prompt`, `{"every": TOKENS}` or `{"pages": TOKENS}`.
            limit: largest distance with positions `clamped`, in tokens; the model's training length when None.
            kv: format of stored K and V: `dtype`, `int4` or a mapping, as in a suite.
            fast: use the fastest method that agrees with the plain walk. The method is chosen when a cache of this configuration
                first reads a text, which takes about a second.
            rope_length: longest position + 1, in tokens, for RoPE types whose tables depend on it.
            **parameters: parameters of the policy.

        Raises:
            UserError: the model can't be driven exactly, or an argument has a mistake; the message is one line.
        """
        super().__init__(layers=[])
        hf = routable(model)
        if positions not in get_args(PositionMode):
            raise UserError(f"positions '{positions}'{did_you_mean(str(positions), get_args(PositionMode))}")
        if capacity is not None:
            capacity = whole_number("capacity", capacity, 1, LONGEST_STREAM)
        limit = None if limit is None else whole_number("limit", limit, 1, LONGEST_STREAM)
        rope_length = None if rope_length is None else whole_number("rope_length", rope_length, 1, LONGEST_STREAM)
        seed = whole_number("seed", seed, -LARGEST_INTEGER, LARGEST_INTEGER)
        try:
            unbound = policy_of(policy, parameters)
            self._config = CacheConfig(unbound, capacity, positions, limit, seed, evict_from(evict), kv_from(kv))
            if capacity is not None:
                unbound.bind(capacity)
            self._name = plugins.name_of(type(unbound)) if plugins.is_ours(type(unbound)) else type(unbound).__name__
            refuse_if_broken(self._name, unbound, capacity, hf.device)
            self._route = Route.of(hf, rope_length)
            refuse_too_large(self._route.model, self._config)
            open_decoder(self._route.model, self._config)  # which may refuse the capacity, too
        except UserError:
            raise
        except (ValueError, TypeError) as error:
            raise UserError(f"kvbench.Cache: {error}") from error
        self._fast = fast
        self.reset()

    def report(self) -> dict[str, Any]:
        """Return configuration and content of the cache as plain values. Syncs with the host.

        `seen` is the number of tokens read of each text, padding included. `kept` is the mean number of tokens held, over texts,
        layers and KV heads. Bytes are totals over all texts: `held_bytes` for K and V of the tokens held, `allocated_bytes` for
        all slots of K and V, and `state_bytes` for everything else (ranks, positions, statistics).
        """
        config, decoder = self._config, self._decoder
        held, allocated, state = (0, 0, 0) if decoder is None else (decoder.held_bytes, decoder.kv_bytes, decoder.state_bytes)
        kept = decoder.tokens_held if isinstance(decoder, CachedDecoder) else 0.0
        kv = "dtype" if config.kv is None else config.kv.as_json()
        return {
            "policy": self._name,
            "parameters": parameters_of(config.policy),
            "capacity": config.capacity,
            "positions": config.positions,
            "evict": evict_as_json(config.evict),
            "kv": kv,
            "texts": self._streams,
            "seen": self._tokens_read,
            "kept": kept,
            "held_bytes": held,
            "allocated_bytes": allocated,
            "state_bytes": state,
        }

    def kept(self) -> list[list[list[int]]]:
        """Return the positions that the first text holds, oldest first, by layer and KV head. Syncs with the host."""
        if isinstance(self._decoder, CachedDecoder):
            return [layer[0] for layer in self._decoder.kept()]
        return [[[] for _ in range(shape.heads)] for shape in self._route.model.layers]

    def __repr__(self) -> str:
        return f"Cache({', '.join(f'{name}={value!r}' for name, value in self.report().items())})"

    def reset(self) -> None:
        """Remove all texts, so that new texts can be read."""
        self._decoder, self._streams = None, 0
        self._tokens_read, self._prompt, self._padding, self._in_prompt = 0, 0, None, True

    def fork(self) -> Self:
        """Return a copy of the cache, e.g. to continue a prompt in several ways. The model is not copied."""
        other = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(other, name, value)
        other._select(range(self._streams))
        return other

    __copy__ = fork  # a decoder in two caches would read the texts of both

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.fork()

    def __reduce_ex__(self, protocol: object) -> str:
        """Refuse to be pickled or saved: the tokens held belong to a model, which is not saved with them."""
        raise UserError(
            "a kvbench.Cache can't be pickled or saved: copy it in memory by cache.fork(), or save the text and read it again"
        )

    @torch.compiler.disable(reason="a compiler can't follow a decoder")  # type: ignore[untyped-decorator]
    def answer(self, hf: PreTrainedModel, given: Mapping[str, Any]) -> Any:
        """Answer a call of the model. given: its arguments by name.

        Raises:
            UserError: the call does not continue the texts in the cache, or requests unsupported results. The cache is unchanged.
        """
        if hf is not self._route.hf:
            self.update()
        refuse_training(hf)
        if self._decoder is None:
            self._route.refuse_if_compiled_since()
        refuse_arguments(given)
        tokens, keep = given["input_ids"], given.get("logits_to_keep", 0)
        valid = self._valid(tokens, given.get("attention_mask"))
        self._refuse_other_place(tokens, valid, given.get("position_ids"))
        self._refuse_late_prompt(tokens.shape[1], valid, keep)
        try:
            logits = self._read(tokens.to(hf.device), valid, keep or tokens.shape[1])
        except BaseException:  # perhaps only some layers have read the tokens
            self.reset()
            raise
        out = CausalLMOutputWithPast(logits=logits, past_key_values=self)
        return out.to_tuple() if given.get("return_dict") is False else out

    def _valid(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the tokens that are not padding; None if there is no padding. [B, T] bool.

        Raises:
            UserError: there are no tokens, or they don't continue the texts in the cache.
        """
        if tokens.ndim != 2 or not tokens.numel() or tokens.dtype not in (torch.int32, torch.int64):
            kind, shape = str(tokens.dtype).removeprefix("torch."), list(tokens.shape)
            raise UserError(f"input_ids: expected whole numbers [texts, tokens], at least one of each, not {kind} {shape}")
        streams, count = tokens.shape
        if self._decoder is not None and streams != self._streams:
            raise UserError(f"this cache holds {self._streams} texts, and {streams} came: cache.reset() it, or make another one")
        if mask is None:
            return None
        if mask.ndim != 2 or len(mask) != streams:
            raise UserError(f"attention_mask: expected [texts, tokens] for {streams} texts, not {list(mask.shape)}")
        if mask.shape[1] != self._tokens_read + count:
            self._refuse(f"{count} came with an attention_mask of {mask.shape[1]}")
        whole = mask.to(self._route.hf.device, torch.bool)
        if bool(((~whole[:, : self._tokens_read]).sum(1) != (0 if self._padding is None else self._padding)).any()):
            guessed = "without one, generate takes every pad token for padding"
            self._refuse(f"{count} came with an attention_mask that has other padding before them ({guessed})")
        valid = whole[:, -count:]
        return None if bool(valid.all()) else valid

    def _refuse_other_place(self, tokens: Tensor, valid: Tensor | None, positions: Tensor | None) -> None:
        """Refuse tokens whose positions don't follow those of the tokens read. positions: [..., T] int64.

        Positions may count padding or not. `generate` passes a whole prompt again if it is no longer than the text read.
        """
        if positions is None:
            return
        (streams, count), device = tokens.shape, self._route.hf.device
        real = torch.ones(streams, count, dtype=torch.bool, device=device) if valid is None else valid
        steps = torch.arange(self._tokens_read, self._tokens_read + count, device=device)
        without = self._tokens_read + real.cumsum(1) - 1 - (0 if self._padding is None else self._padding[:, None])
        positions = torch.atleast_2d(positions).to(device)
        fits = positions.shape[-1] == count and positions.shape[-2] in (1, streams)
        if not fits or not bool(((positions == steps) | (positions == without) | ~real).all()):
            self._refuse(f"{count} came with other position_ids than {self._tokens_read} to {self._tokens_read + count - 1}")

    def _refuse(self, reason: str) -> None:
        raise UserError(
            f"this cache has read {self._tokens_read} tokens of each text, and {reason}: "
            "go on with a text that begins with what was read and is longer, or call cache.reset()"
        )

    def _refuse_late_prompt(self, count: int, valid: Tensor | None, keep: int) -> None:
        """Refuse a prompt that can't be cut at its end.

        Raises:
            UserError: the prompt comes in parts, its texts differ in length, or logits before its end are requested.
        """
        if self._config.evict != "prompt" or not self._in_prompt or (self._decoder is not None and count == 1):
            return
        if self._decoder is not None:
            raise UserError("evict 'prompt' needs the whole prompt at once: leave out prefill_chunk_size, or cache.reset()")
        if valid is not None:
            raise UserError("evict 'prompt' needs prompts of one length: generate one by one, or evict at another time")
        if keep != 1:
            raise UserError("evict 'prompt' gives the logits after the prompt's last token alone: pass logits_to_keep=1")

    def _read(self, tokens: Tensor, valid: Tensor | None, keep: int) -> Tensor:
        """Read the next tokens of every text. keep: number of last tokens whose logits to return. -> [B, K, V]."""
        (streams, count), first, evict = tokens.shape, self._decoder is None, self._config.evict
        block = max(1, _BLOCK // streams)
        if self._decoder is None:
            self._decoder, self._streams = open_decoder(self._route.model, self._config, streams, self._method(streams)), streams
        self._in_prompt = first or (self._in_prompt and count > 1)
        self._tokens_read += count
        if valid is not None:
            self._padding = (~valid).sum(1) if self._padding is None else self._padding + (~valid).sum(1)
        if evict == "prompt" and self._in_prompt:
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
        """Return the method of reading."""
        if not self._fast or not self._config.policy.caches:
            return EAGER
        with LOCK:
            return remembered_check(self._route.model, self._config, streams).method

    def _select(self, texts: Sequence[int]) -> None:
        """Replace all texts by a selection of them, in which a text may repeat."""
        if self._decoder is not None:
            self._decoder, self._streams, self._in_prompt = self._decoder.fork(texts), len(texts), False
            self._padding = None if self._padding is None else self._padding[list(texts)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read of each text, padding included. `generate` passes only later tokens."""
        return self._tokens_read

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: a text may have any length."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each beam by the beam that it continues."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the texts: their indices, or a mask."""
        self._select(torch.arange(self._streams)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every text `repeats` times."""
        self._select([text for text in range(self._streams) for _ in range(repeats)])

    def crop(self, *_: Any) -> None:
        """Refuse to remove the newest tokens, because evicted tokens can't be restored."""
        raise UserError("a kvbench.Cache can't take tokens back: leave out assistant_model, prompt_lookup_num_tokens and crop")

    activate_past_recording = crop  # assisted decoding calls it first

    @property
    def is_croppable(self) -> bool:
        """False, because evicted tokens can't be restored."""
        return False

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Refuse K and V of a layer. They come from another model, or from a direct call of a part of the model."""
        raise UserError("this kvbench.Cache belongs to another model, or its layers were called: make one for the model you call")
