"""Audit of a cache: all checks, on a model or on the built-in ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench.harness.audit import checks_of_calls, checks_of_quality, checks_of_tokens
from kvbench.harness.audit.case import AuditCheck, AuditedCache
from kvbench.harness.audit.page import html
from kvbench.harness.audit.subject import Subject, subject_of_factory, subject_of_policy
from kvbench.harness.audit.trace import Held
from kvbench.harness.core import plugins
from kvbench.harness.core.checks import Check, Outcome, Report, StepProgress, outcome_of, skipped
from kvbench.harness.core.errors import UserError, did_you_mean
from kvbench.harness.engine.foreigncheck import agreeing_attention
from kvbench.harness.engine.own_attention import attention_by
from kvbench.harness.engine.probes import NOT_ROUTED
from kvbench.harness.models.families import tiny_model
from kvbench.harness.models.load import load
from kvbench.policies import Policy

CHECKS = [
    x
    for module in (checks_of_tokens, checks_of_calls, checks_of_quality)
    for x in vars(module).values()
    if isinstance(x, AuditCheck)
]
_TINY = {"gqa": "llama", "window": "gemma3_text"}  # families of random models
_BUILTIN = {"sinks": "builtin:sink_1"}
_VOCABULARY = 4096  # tokens of the tiny models, so that those of a text are distinct
_PROBED = 32  # tokens by which the attention function is chosen


@dataclass(frozen=True)
class Named:
    """A model with its name, and its tokenizer unless its weights are random."""

    name: str
    hf: PreTrainedModel
    tokenizer: Any = None


@dataclass(frozen=True)
class Audit(Report):
    """Results of all checks of one cache, on every model.

    Attributes:
        target: name of the cache.
        seconds: time that the audit took.
        held: tokens held before every step but the first, by model and step.
    """

    target: str
    seconds: float
    held: dict[str, dict[int, Held]] = field(default_factory=dict, repr=False)

    @property
    def summary(self) -> str:
        """Sentence with the number of failed checks, the number of models on which a check failed, and the seconds."""
        failed, models = len({check.name for check in self.failed}), len({check.case for check in self.failed})
        names = {check.case for check in self.checks}
        total = len({check.name for check in self.checks})
        return f"{failed} of {total} checks failed, on {models} of {len(names)} models, in {self.seconds:.0f} s"

    def table(self) -> str:
        """Return the rows as aligned text."""
        rows = self.rows()
        lines = [list(rows[0]), *(list(row.values()) for row in rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]
        return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[-1]]) for line in lines)

    __str__ = table

    def to_json(self) -> str:
        """Return the results as JSON."""
        fields = ("name", "question", "verdict", "evidence", "usually")
        checks = [{name: vars(check)[name] for name in fields} | {"model": check.case} for check in self.checks]
        held = {
            model: {step: [[_ranges(tokens) for tokens in heads] for heads in layers] for step, layers in steps.items()}
            for model, steps in self.held.items()
        }
        return json.dumps({"target": self.target, "ok": self.ok, "seconds": self.seconds, "checks": checks, "held": held})

    def to_html(self) -> str:
        """Return the results as a page, with pictures of the positions held."""
        return html(self)

    _repr_html_ = to_html  # for notebooks


def audit(
    cache: Callable[..., Any] | str | Policy,
    model: PreTrainedModel | str | None = None,
    *,
    budget: int | None = None,
    sinks: int = 0,
    like: str | None = None,
    skip: Sequence[str] = (),
) -> Audit:
    """Run all checks of a cache, on one model or on the built-in models.

    Args:
        cache: function that returns an empty cache, such as a class; it gets the model's `config` if it takes one. A class of one
            layer's cache works, too. Or a policy, or its name.
        model: a transformers model in evaluation mode, or a name as in `load`; three built-in models when None.
        budget: tokens that a KV head should keep between steps; None if unknown.
        sinks: number of first tokens that should always be held.
        like: policy of ours that should hold the same tokens at this budget.
        skip: names of checks to leave out.

    Raises:
        UserError: there is no such model, policy or check; the cache can't be created; the model's attention can't be recorded;
            or the model's vocabulary is too small for the budget.
    """
    if isinstance(cache, str | Policy):
        policy = plugins.policy_class(cache)() if isinstance(cache, str) else cache
        subject = subject_of_policy(plugins.name_of(type(policy)), policy, budget, sinks)
    else:
        subject = subject_of_factory(cache, budget, sinks)
    return audited(subject, models_of(model), like, skip)


def audited(
    subject: Subject, models: Sequence[Named], like: str | None, skip: Sequence[str], progress: StepProgress = lambda *_: None
) -> Audit:
    """Return the audit of a subject on models.

    Raises:
        UserError: there is no such policy or check.
    """
    names, started, result = [check.name for check in CHECKS], perf_counter(), Audit([], subject.name, 0)
    for name in skip:
        if name not in names:
            raise UserError(f"--skip {name}: no such check{did_you_mean(name, names)}")
    other = None if like is None else subject_of_policy(like, plugins.policy_class(like)(), subject.budget)
    for number, model in enumerate(models, 1):
        progress(model.name, number, len(models))
        _extend(result, subject, model, other, skip)
    return replace(result, seconds=perf_counter() - started)


@torch.inference_mode()
def _extend(result: Audit, subject: Subject, model: Named, like: Subject | None, skip: Sequence[str]) -> None:
    """Add the results on one model. PyTorch's generator is restored.

    Raises:
        UserError: the model's attention can't be recorded.
    """
    hf = model.hf
    if not hf._can_set_attn_implementation():
        raise UserError(f"{model.name}: {NOT_ROUTED}")
    ids = torch.arange(min(_PROBED, hf.config.get_text_config().vocab_size), device=hf.device)[None]
    attention = subject.attention or agreeing_attention(hf, "sdpa" if hf._supports_sdpa else "eager", ids)
    failed: list[str] = []
    with attention_by(hf, attention), torch.random.fork_rng():
        case = AuditedCache(subject, hf, like, model.tokenizer)
        for check in CHECKS:
            if check.name not in skip:
                outcome = _outcome(check, case, failed)
                failed += [check.name] if outcome.verdict == "fail" else []
                result.checks.append(Check(model.name, check.name, *outcome, check.question, check.usually))
        result.held[model.name] = {p.first: p.held for p in case.decode.passes[1:]}


def _outcome(check: AuditCheck, case: AuditedCache, failed: Sequence[str]) -> Outcome:
    """Return the outcome of a check. A failure that may follow from an earlier one is not reported as another fault."""
    if case.decode.error and check.name != "reads":
        return skipped("the text could not be read")
    outcome = outcome_of(check.find, case)
    cause = next((name for name in check.follows if name in failed), None)
    if outcome.verdict == "fail" and cause is not None:
        return skipped(f"may follow from {cause}: {outcome.evidence}")
    return outcome


def _ranges(tokens: Sequence[int]) -> list[list[int]]:
    """Return the first and the last token of every run of consecutive tokens. tokens: ascending."""
    firsts = [token for token in tokens if token - 1 not in {*tokens}]
    lasts = [token for token in tokens if token + 1 not in {*tokens}]
    return [list(pair) for pair in zip(firsts, lasts, strict=True)]


def models_of(model: PreTrainedModel | str | None) -> list[Named]:
    """Return the given model; for None, three built-in models: with GQA, with sliding-window layers, and with attention sinks.

    Raises:
        UserError: there is no such model.
    """
    if isinstance(model, str):
        return [Named(model, *load(model))]
    if model is not None:
        return [Named(str(model.config.model_type), model)]
    tiny = [Named(name, tiny_model(family, vocab_size=_VOCABULARY)) for name, family in _TINY.items()]
    return [*tiny, *(Named(name, *load(builtin)) for name, builtin in _BUILTIN.items())]
