"""The lm-eval model `kvbench`: what lm-eval asks of a model, answered by the decode loop under a policy, evicting as it goes.

Tokens, chat templates, truncation to the model's length and stop sequences are those of lm-eval's own `hf` model, of which
this is a subclass; only what runs the model is ours.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import simple_parse_args_string
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.stream import newline
from kvbench.harness.lm_eval.arguments import Arguments
from kvbench.harness.lm_eval.reading import Reader

_GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}  # what generation may say besides length and stops
_MEANS_NOTHING = {"temperature", "top_p", "top_k", "until"}  # to greedy decoding


class KVBench(HFLM):  # type: ignore[misc]
    """A model under a policy, as lm-eval drives one."""

    def __init__(
        self,
        reader: Reader,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        told: Callable[[int], None] | None = None,
    ) -> None:
        """Drive this.

        Args:
            reader: model, policy, and how prompts are read.
            tokenizer: of the model.
            max_length: tokens of a request, of which the last are taken; lm-eval's own choice where the policy never evicts,
                no end where it does.
            add_bos_token: as in lm-eval's `hf`.
            prefix_token_id: likewise.
            chat_template_args: likewise.
            told: is told how many more requests are done, instead of a progress bar.
        """
        self.reader, self._told = reader, told
        log = logging.getLogger("lm_eval.models.huggingface")
        level = log.level
        log.setLevel(logging.ERROR)  # it warns of being given a model instead of a name
        try:
            super().__init__(
                pretrained=reader.model.hf, backend="causal", tokenizer=tokenizer, max_length=max_length,
                batch_size=reader.batch, add_bos_token=add_bos_token, prefix_token_id=prefix_token_id,
                chat_template_args=chat_template_args,
            )  # fmt: skip
        finally:
            log.setLevel(level)
        self.truncated = 0  # requests of which something was cut off at max_length
        self.over_capacity = 0  # requests that do not fit the cache
        self.requests = 0

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """From `--model_args`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """From arguments by name: those of `Arguments`, with `batch_size` and `device` as lm-eval's own options.

        Raises:
            UserError: a model that can't be had, a policy that is not there or can't serve the capacity.
        """
        given = {k: v for k, v in (additional_config or {}).items() if v is not None and k != "max_batch_size"}
        if str(given.get("device", "")).startswith("cuda") and not torch.cuda.is_available():
            del given["device"]  # lm-eval's default, which its `hf` takes no more seriously
        asked = Arguments.of(dict(arg_dict) | given)
        return cls(*asked.loaded(), asked.max_length, asked.add_bos_token, asked.prefix_token_id, asked.chat_template_args)

    @property
    def max_length(self) -> int:
        """Tokens of a request, of which the last are taken."""
        evicts = self.reader.config.capacity is not None
        return sys.maxsize if evicts and not self._max_length else int(super().max_length)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: as in `hf`, and a line end where the tokenizer has no such token."""
        found = super().prefix_token_id
        return newline(self.tokenizer) if found is None else int(found)

    def get_model_info(self) -> dict[str, Any]:
        """For lm-eval's results: the policy and how prompts are read."""
        config = self.reader.config
        return {
            "policy": type(config.policy).__name__, "parameters": dataclasses.asdict(config.policy), "capacity": config.capacity,
            "positions": config.positions, "prompt": self.reader.prompt, "requests": self.requests,
            "over_capacity": self.over_capacity, "truncated": self.truncated,
        }  # fmt: skip

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """What continuations are worth after their contexts: nats, and whether greedy decoding would have said them."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm or self._told is not None)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """What continuations are worth after their contexts."""
        asked = [self._fitting(context, continuation) for _, context, continuation in requests]
        with self._progress(len(asked), "loglikelihoods", disable_tqdm or override_bs is not None) as bar:
            found = [(s.logprob, s.greedy) for s in self.reader.loglikelihoods(asked, self._told or bar.update)]
        for (request, _, _), answer in zip(requests, found, strict=True):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, each read as one stream where the policy evicts."""
        if self.reader.prompt != "stream":
            raise UserError(f"texts that are scored as a whole have no prompt, so prompt '{self.reader.prompt}' has no meaning")
        found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm or self._told is not None)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model says, greedily."""
        answers: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        with self._progress(len(requests), "generations", disable_tqdm) as bar:
            for numbers in groups.values():
                said = self._generated([requests[n].args[0] for n in numbers], requests[numbers[0]].args[1], bar)
                answers |= dict(zip(numbers, said, strict=True))
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, answers[number])
        return [answers[n] for n in range(len(requests))]

    def _generated(self, contexts: Sequence[str], wishes: dict[str, Any], bar: tqdm) -> list[str]:
        """Answers to prompts for which lm-eval wishes the same."""
        asked: dict[str, Any] = dict(normalize_gen_kwargs(wishes, self.max_gen_toks))
        end = self.eot_token_id
        eos = None if end is None else self.tok_decode(end, skip_special_tokens=False)
        stops = [s for s in handle_stop_sequences(asked.pop("until", None), eos=eos) if s]
        most = asked.pop("max_gen_toks")
        other = {k: v for k, v in asked.items() if k not in _MEANS_NOTHING and (k not in _GREEDY or v != _GREEDY[k])}
        if other:
            raise UserError(f"generation is greedy here; can't do {', '.join(f'{k}={v}' for k, v in other.items())}")
        room = self.max_length - most
        if room < 1:
            raise UserError(f"max_gen_toks {most} leaves no room for a prompt in {self.max_length} tokens")
        ends = self._ends()
        tail = max((len(s) for s in stops), default=0) + 4  # a token is a character at least, or part of one

        def ended(said: list[int]) -> bool:
            return said[-1] in ends or any(s in self.tok_decode(said[-tail:], skip_special_tokens=False) for s in stops)

        prompts = [self._prompt(context, room) for context in contexts]
        self._count(len(prompt) + most - 1 for prompt in prompts)
        texts = []
        for said in self.reader.generate(prompts, most, ended, self._told or bar.update):
            whole = next((at for at, token in enumerate(said) if token in ends), len(said))
            texts.append(postprocess_generated_text(self.tok_decode(said[:whole]), stops, None))
        return texts

    def _ends(self) -> set[int]:
        """Tokens that end an answer: the tokenizer's, and those of the model's own generation config."""
        own = getattr(self.model.generation_config, "eos_token_id", None)
        return {end for end in (self.eot_token_id, *(own if isinstance(own, list) else [own])) if end is not None}

    def _prompt(self, context: str, room: int) -> list[int]:
        """Its tokens, the last so many."""
        ids = list(self.reader.shortened(self.tok_batch_encode([context], truncation=self.truncation)[0][0].tolist()))
        self.truncated += len(ids) > room
        return ids[-room:] if len(ids) > room else ids

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """A request, cut as lm-eval's `hf` does it: the last `max_length` tokens that are read, and the one that is not."""
        context = list(self.reader.shortened(context))  # before anything is cut off at its beginning
        over = len(context) + len(continuation) - 1 - self.max_length
        if over > 0:
            self.truncated += 1
            if over >= len(context):
                raise UserError(f"a continuation of {len(continuation)} tokens does not fit max_length {self.max_length}")
            context = context[over:]
        self._count([len(context) + len(continuation) - 1])
        return context, continuation

    def _count(self, lengths: Any) -> None:
        capacity = self.reader.config.capacity
        for length in lengths:
            self.requests += 1
            self.over_capacity += capacity is not None and length > capacity + 1  # a step sees what is kept, and itself

    def _progress(self, total: int, what: str, hidden: bool) -> tqdm:
        return tqdm(total=total, desc=f"Running {what}", disable=hidden or self._told is not None)
