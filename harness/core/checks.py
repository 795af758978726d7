"""Results of checks of a user's code: of a policy by `bench policy check`, and of a cache by `bench audit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvbench.harness.core.errors import described

Verdict = Literal["pass", "fail", "not applicable"]

StepProgress = Callable[[str, int, int], object]  # called when a step begins: its name, its number, and the number of steps


class Outcome(NamedTuple):
    """Verdict of a check, with its evidence in one line, and the exception that the code under test raised, if any."""

    verdict: Verdict
    evidence: str = ""
    error: Exception | SystemExit | None = None


def passed(evidence: str) -> Outcome:
    """Return the outcome of a check that found nothing wrong."""
    return Outcome("pass", evidence)


def failed(evidence: str) -> Outcome:
    """Return the outcome of a check that found a fault."""
    return Outcome("fail", evidence)


def judged(fault: str, evidence: str = "") -> Outcome:
    """Return the outcome of a check that found a fault, or nothing wrong if the fault is empty."""
    return failed(fault) if fault else passed(evidence)


def skipped(reason: str) -> Outcome:
    """Return the outcome of a check that does not apply."""
    return Outcome("not applicable", reason)


class NotApplicableError(Exception):
    """A check does not apply; the message says why."""


def require(condition: bool, reason: str = "does not apply") -> None:
    """End a check that does not apply unless a condition holds.

    Raises:
        NotApplicableError: the condition does not hold.
    """
    if not condition:
        raise NotApplicableError(reason)


def outcome_of(find: Callable[..., Outcome], *given: object) -> Outcome:
    """Run a check. An exception of the code under test fails it, unless the check does not apply."""
    try:
        return find(*given)
    except NotApplicableError as reason:
        return skipped(str(reason))
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        return Outcome("fail", f"it raises {described(error)}", error)


@dataclass(frozen=True)
class Check:
    """Result of one check in one case.

    Attributes:
        case: name of the model, or the capacity.
        name: name of the check.
        evidence: one line with the numbers that decided.
        error: exception that the code under test raised.
        question: what the check asks; empty if the name says so.
        usually: what a failure usually means; empty if unknown.
    """

    case: str
    name: str
    verdict: Verdict
    evidence: str = ""
    error: Exception | SystemExit | None = field(default=None, compare=False)
    question: str = ""
    usually: str = ""

    @property
    def advice(self) -> str:
        """What usually causes a failure, as the end of the evidence; empty if the check did not fail."""
        return f". Usually: {self.usually}" if self.verdict == "fail" and self.usually else ""


@dataclass(frozen=True)
class Report:
    """Results of all checks, by case and in the order of the checks."""

    checks: list[Check]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> list[Check]:
        """Results that failed."""
        return [check for check in self.checks if check.verdict == "fail"]

    def rows(self) -> list[dict[str, str]]:
        """Return a row per check: verdicts by case, and the evidence of the first case with the worst verdict."""
        cases, rows = dict.fromkeys((check.case for check in self.checks), "-"), []
        for name in dict.fromkeys(check.name for check in self.checks):
            of_check = [check for check in self.checks if check.name == name]
            worst = min(of_check, key=lambda check: ("fail", "pass", "not applicable").index(check.verdict))
            verdicts = {check.case: "-" if check.verdict == "not applicable" else check.verdict for check in of_check}
            place = f"{worst.case}: " if worst.evidence and len(cases) > 1 and worst.verdict != "not applicable" else ""
            rows.append({"check": name} | cases | verdicts | {"evidence": f"{place}{worst.evidence}{worst.advice}"})
        return rows
