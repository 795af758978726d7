"""The lm-eval model `kvbench`, which runs lm-eval's requests through the decode loop under a policy.

The model is a subclass of lm-eval's own `hf` model. Tokenisation, chat templates, truncation to the model's length and stop
sequences are inherited from `hf`; only the code that runs the model is ours.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import simple_parse_args_string
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.grouped import grouped
from kvbench.harness.core.parameters import parameters_of
from kvbench.harness.data.stream import newline
from kvbench.harness.engine.sampling import Sampler
from kvbench.harness.lm_eval.arguments import Arguments
from kvbench.harness.lm_eval.generation import checked
from kvbench.harness.lm_eval.reading import RequestReader

_TAKEN = ("do_sample", "temperature", "top_p", "top_k", "until", "max_gen_toks")  # supported generation_kwargs
_NO_EFFECT = {"num_beams": 1, "repetition_penalty": 1.0}
_TOP_K = 50  # transformers' default
_SIGNATURE = "kv-bench"  # key of the signature among lm-eval's kept answers, whose keys are hashes
_MAX_JOINED_TOKENS = 8  # tokens at the end of a text that may change when text follows


class KVBench(HFLM):  # type: ignore[misc]
    """An lm-eval model that keeps its cache under a policy."""

    def __init__(
        self,
        reader: RequestReader,
        tokenizer: PreTrainedTokenizerBase,
        *,
        sample_seed: int = 0,
        on_progress: Callable[[int], None] | None = None,
        question_start: Callable[[Instance], int] | None = None,
        signature: Callable[[], str] | None = None,
        **of_hf: Any,
    ) -> None:
        """Wrap a reader.

        Args:
            sample_seed: seed of sampled answers.
            on_progress: called with the number of requests just done; replaces the progress bar.
            question_start: returns the index of the first character of a request's question, which is read after the cache of
                the prompt has been cut; None if the question is part of the prompt.
            signature: returns a hash of everything that answers depend on besides the requests. Without it, lm-eval's
                `use_cache` can't keep answers.
            of_hf: further arguments of lm-eval's `hf`, such as `max_length`.

        Raises:
            UserError: the tokenizer adds a token after a text, which lm-eval would score as part of an answer.
        """
        text, bare = (tokenizer("a", add_special_tokens=special).input_ids for special in (True, False))
        if text[len(text) - len(bare) :] != bare:
            added = tokenizer.convert_ids_to_tokens(text[-1])
            raise UserError(
                f"the tokenizer adds {added} after a text, which lm-eval would score: set add_eos_token to false in its "
                "tokenizer_config.json, or take the token out of the post-processor in its tokenizer.json"
            )
        self.reader, self._on_progress, self._question_start = reader, on_progress, question_start
        self._sample_seed, self._signature = sample_seed, signature
        self._before_question: dict[str, str] = {}  # text before the question, by prompt
        log = logging.getLogger("lm_eval.models.huggingface")
        level = log.level
        log.setLevel(logging.ERROR)  # it warns when it gets a model instead of a name
        try:
            super().__init__(
                pretrained=reader.model.hf,
                backend="causal",
                tokenizer=tokenizer,
                batch_size=reader.batch,
                **of_hf,
            )
        finally:
            log.setLevel(level)
        self.truncated = 0  # requests longer than max_length
        self.over_capacity = 0  # requests longer than the cache
        self.requests = 0

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        """Create a model from `--model_args`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Self:
        """Create a model from `Arguments` by name; lm-eval's options `batch_size` and `device` are in `additional_config`.

        Raises:
            UserError: the model is not available, or the policy is unknown or can't work with the capacity.
        """
        options = {k: v for k, v in (additional_config or {}).items() if v is not None and k != "max_batch_size"}
        if str(options.get("device", "")).startswith("cuda") and not torch.cuda.is_available():
            del options["device"]  # lm-eval's default, which its `hf` ignores too
        arguments = Arguments.from_model_args(dict(arg_dict) | options)
        of_hf = arguments.model_dump(include={"max_length", "add_bos_token", "prefix_token_id", "chat_template_args"})
        return cls(*arguments.loaded(), sample_seed=arguments.sample_seed, signature=arguments.signature, **of_hf)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Use lm-eval's file of answers (`use_cache`), which is keyed by requests alone.

        Raises:
            UserError: the file holds answers under other or unknown arguments.
        """
        answers, own = cache_hook.dbdict, None if self._signature is None else self._signature()
        if answers is not None:
            kept = answers.get(_SIGNATURE)
            if own is None or (kept != own and (kept is not None or len(answers))):
                raise UserError(
                    f"--use_cache: {answers.filename} holds answers of another model, policy or other --model_args: "
                    "give each its own file"
                )
            answers[_SIGNATURE] = own
        super().set_cache_hook(cache_hook)

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a request, which keeps its last ones. Unlimited by default for a policy that evicts."""
        evicts = self.reader.config.capacity is not None
        return sys.maxsize if evicts and not self._max_length else int(super().max_length)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without context: the token of `hf`, or a newline if the tokenizer has none."""
        token: int | None = super().prefix_token_id
        return newline(self.tokenizer) if token is None else int(token)

    def get_model_info(self) -> dict[str, Any]:
        """Return the policy and the method of reading prompts, for lm-eval's results."""
        config = self.reader.config
        return {
            "policy": type(config.policy).__name__,
            "parameters": parameters_of(config.policy),
            "capacity": config.capacity,
            "evict": config.evict,
            "positions": config.positions,
            "prompt": self.reader.prompt,
            "requests": self.requests,
            "over_capacity": self.over_capacity,
            "truncated": self.truncated,
            "sample_seed": self._sample_seed,
        }

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation in nats, and whether greedy decoding would produce it."""
        self._find_questions(requests)
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm or self._on_progress is not None)
        return scores

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return the scores of requests that are given as token ids."""
        fitting = [self._fitting(context, continuation) for _, context, continuation in requests]
        cuts = [
            self._cut(self.tok_encode(self._before_question[texts[0]]), context, len(context) - len(kept))
            if self._question_start
            else len(kept) * (texts is not None)  # a text that is scored as a whole has no prompt
            for (texts, context, _), (kept, _) in zip(requests, fitting, strict=True)
        ]
        with self._progress(len(fitting), "loglikelihoods", disable_tqdm or override_bs is not None) as bar:
            done = self._on_progress or bar.update
            scores = [(s.logprob, s.greedy) for s in self.reader.loglikelihoods(fitting, done, cuts)]
        for (request, _, _), score in zip(requests, scores, strict=True):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, score)
        return scores

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts. Under a policy that evicts, each text is one stream."""
        if self.reader.reads_whole_prompts or self.reader.prompt != "stream":
            way = "evict" if self.reader.config.evict == "prompt" else "prompt"
            value, instead = ("prompt", "step") if way == "evict" else (self.reader.prompt, "stream")
            raise UserError(f"{way} '{value}': this task scores whole texts, which have no prompt; use {way} '{instead}'")
        scores: list[float] = super().loglikelihood_rolling(requests, disable_tqdm or self._on_progress is not None)
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate answers. A request that is repeated gets an answer for each repetition."""
        self._find_questions(requests)
        answers: dict[int, str] = {}
        repeats: Counter[int] = Counter()  # repetitions of each request so far
        seeds = []
        for request in requests:
            seeds.append(_seed(self._sample_seed, request.doc_id, repeats[id(request)]))
            repeats[id(request)] += 1
        by_settings = grouped(range(len(requests)), lambda number: repr(requests[number].args[1]))
        with self._progress(len(requests), "generations", disable_tqdm) as bar:
            for numbers in by_settings.values():
                contexts, settings = [requests[n].args[0] for n in numbers], requests[numbers[0]].args[1]
                texts = self._generated(contexts, settings, [seeds[n] for n in numbers], bar)
                answers |= dict(zip(numbers, texts, strict=True))
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, answers[number])
        return [answers[n] for n in range(len(requests))]

    def _generated(self, contexts: Sequence[str], gen_kwargs: dict[str, Any], seeds: Sequence[int], bar: tqdm) -> list[str]:
        """Return answers to prompts with equal generation settings, each with its own seed."""
        settings: dict[str, Any] = dict(normalize_gen_kwargs(checked(gen_kwargs, "generation_kwargs"), self.max_gen_toks))
        end = self.eot_token_id
        eos = None if end is None else self.tok_decode(end, skip_special_tokens=False)
        stops = [s for s in handle_stop_sequences(settings.pop("until", None), eos=eos) if s]
        max_tokens = settings.pop("max_gen_toks")
        sampler = self._sampler(settings)
        room = self.max_length - max_tokens
        if room < 1:
            raise UserError(f"max_gen_toks {max_tokens} leaves no room for a prompt in {self.max_length} tokens")
        end_tokens = self._end_tokens()
        longest = max(map(len, stops), default=0)

        def ended(answer: list[int]) -> bool:
            if answer[-1] in end_tokens:
                return True
            end = self._end_of(answer, longest)
            return any(s in end for s in stops)

        prompts = [self._prompt(context, room) for context in contexts]
        self._count(len(prompt) + max_tokens - 1 for prompt in prompts)
        cuts, texts = None, []
        if self._question_start is not None:
            whole = [self._ids(text) for text in contexts]
            before = [self._ids(self._before_question[text]) for text in contexts]
            cuts = [self._cut(b, ids, max(0, len(ids) - room)) for b, ids in zip(before, whole, strict=True)]
        done = self._on_progress or bar.update
        for answer in self.reader.generate(prompts, max_tokens, ended, done, cuts, seeds, sampler):
            length = next((place for place, token in enumerate(answer) if token in end_tokens), len(answer))
            texts.append(postprocess_generated_text(self.tok_decode(answer[:length]), stops, None))
        return texts

    def _end_of(self, answer: list[int], characters: int) -> str:
        """Decode the end of an answer: its last token and at least `characters` characters before it; all if shorter.

        A token may be part of a character or no text at all, so the number of tokens is increased until the text is long enough.
        """
        tokens = characters + _MAX_JOINED_TOKENS
        while True:
            text = str(self.tok_decode(answer[-tokens:], skip_special_tokens=False))
            if tokens >= len(answer) or len(text) >= characters + _MAX_JOINED_TOKENS:
                return text
            tokens *= 2

    def _sampler(self, settings: dict[str, Any]) -> Callable[[Sequence[int]], Sampler]:
        """Return the sampler for lm-eval's settings. As in `hf`, top_k and top_p default to the model's own.

        Raises:
            UserError: a setting is not supported.
        """
        given = {k: v for k, v in settings.items() if v is not None and _NO_EFFECT.get(k) != v}
        unsupported = [f"{k}={v}" for k, v in given.items() if k not in _TAKEN]
        if unsupported:
            raise UserError(
                f"kvbench does not support {', '.join(unsupported)}; of generation_kwargs it takes {', '.join(_TAKEN)}"
            )
        if not given["do_sample"]:
            return Sampler
        temperature = float(given.get("temperature", 0.0))
        if temperature <= 0:
            raise UserError("do_sample needs a temperature above 0")
        own = self.model.generation_config
        top_p = float(given.get("top_p", 1.0 if own.top_p is None else own.top_p))
        top_k = int(given.get("top_k", _TOP_K if own.top_k is None else own.top_k))
        return partial(Sampler, temperature=temperature, top_p=top_p, top_k=top_k)

    def _end_tokens(self) -> set[int]:
        """Return the tokens that end an answer, from the tokenizer and from the model's generation config."""
        own = getattr(self.model.generation_config, "eos_token_id", None)
        return {end for end in (self.eot_token_id, *(own if isinstance(own, list) else [own])) if end is not None}

    def _prompt(self, context: str, room: int) -> list[int]:
        """Return the last `room` tokens of a prompt."""
        ids = list(self.reader.shortened(self._ids(context)))
        self.truncated += len(ids) > room
        return ids[-room:] if len(ids) > room else ids

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tok_batch_encode([text], truncation=self.truncation)[0][0].tolist()
        return ids

    def _find_questions(self, requests: Sequence[Instance]) -> None:
        """Store the text before the question of every request."""
        if self._question_start is not None:
            self._before_question |= {r.args[0]: r.args[0][: self._question_start(r)] for r in requests}

    def _cut(self, before: Sequence[int], prompt: Sequence[int], dropped: int) -> int:
        """Return the number of tokens of a prompt before its question, without the `dropped` tokens cut off at its start.

        Raises:
            UserError: the text before the question has other tokens when the question follows.
        """
        length = min(_common_length(before, prompt), len(prompt) - 1)
        if length < len(before) - _MAX_JOINED_TOKENS:
            raise UserError("question unseen: this tokenizer gives a text other tokens when a question follows it")
        return max(1, length - dropped)

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Return a request truncated as in lm-eval's `hf`: the last `max_length` read tokens, and the unread last token."""
        context = list(self.reader.shortened(context))  # prompt 'truncate' is applied first
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
            self.over_capacity += capacity is not None and length > capacity + 1  # a step attends to the kept tokens and itself

    def _progress(self, total: int, what: str, hidden: bool) -> tqdm:
        return tqdm(total=total, desc=f"Running {what}", disable=hidden or self._on_progress is not None)


def _seed(*parts: Any) -> int:
    """Return a seed for an answer that depends only on these parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big", signed=True)


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens in the common beginning of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
