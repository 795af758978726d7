"""The answer to a question at one budget, in a sentence. Every figure comes from the rows of the feed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.harness.report.shares import too_few

_MAX_NAMES = 3


def size(capacity: int | None) -> str:
    """A budget, in words."""
    return f"{capacity:,} tokens" if capacity is not None else "a budget that the prompt decides"


def finding(rows: Sequence[dict[str, Any]], measure: str) -> str:
    """Which policy of a budget does best, what it loses and what it saves. rows: of the feed, in their order."""
    judged = [row for row in rows if _value(row, measure) is not None]
    return f"{_leaders(judged, measure)} {_price(judged[0], measure)}".strip() if judged else "Nothing was measured."


def _value(row: dict[str, Any], measure: str) -> float | None:
    value: float | None = row["perplexity"] if measure == "perplexity" else row["answers"][0]["share"] if row["answers"] else None
    return value


def _leaders(rows: Sequence[dict[str, Any]], measure: str) -> str:
    """Who may be best."""
    best, leads = rows[0], "has the lowest perplexity" if measure == "perplexity" else "answers most correctly"
    if len(rows) == 1:
        return f"{best['name']} is the only policy measured."
    if best["rank"] is None:
        short = "the text is too short" if measure == "perplexity" else "there are too few streams"
        return f"{best['name']} {leads}, but {short} to tell it from the others."
    rivals = [row["name"] for row in rows[1:] if row["rank"] is None or row["rank"][0] == 1]
    if not rivals:
        return f"{best['name']} is best of {len(rows)} (95 % confidence)."
    some = ", ".join(rivals[:_MAX_NAMES]) if len(rivals) <= _MAX_NAMES else f"{len(rivals)} others"
    return f"{best['name']} {leads} of {len(rows)}; its lead over {some} is within the noise."


def _price(row: dict[str, Any], measure: str) -> str:
    """What the row loses, holds and takes."""
    lost = [*_lost(row["loss"], measure), *_lost(row["loss_to_dense"], measure)]
    parts = [*_answered(row, measure), *lost, *_held(row["kv_share"]), *_taken(row)]
    if not parts:
        return ""
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"It {joined}."


def _answered(row: dict[str, Any], measure: str) -> list[str]:
    """The figure itself, where it says more than a difference: for answers, or without a reference."""
    if measure == "answers":
        task = row["answers"][0]
        if task["low"] is None:
            return [f"answers {100 * task['share']:.0f} % right ({too_few(task['streams'])})"]
        return [f"answers {100 * task['share']:.0f} % [{100 * task['low']:.0f}, {100 * task['high']:.0f}] right"]
    return [f"has perplexity {row['perplexity']:.4g}"] if row["loss"] is None else []


def _lost(loss: dict[str, Any] | None, measure: str) -> list[str]:
    """What the row loses to a reference, unless their difference may be chance."""
    if loss is None:
        return []
    value, low, high = loss["value"], loss["low"], loss["high"]
    unit = " % of perplexity" if measure == "perplexity" else " points of right answers"
    if low is None or high is None:
        short = "too short" if measure == "perplexity" else "too few streams"
        return [f"can't be told from {loss['to_name']} ({signed(value)}{unit}, {short} for an interval)"]
    if low <= 0 <= high:
        return [f"is within the noise of {loss['to_name']} ({signed(value)}{unit} [{signed(low)}, {signed(high)}])"]
    near, far = sorted((abs(low), abs(high)))
    verb = "loses" if value > 0 else "gains"
    return [f"{verb} {_short(abs(value))}{unit} [{_short(near)}, {_short(far)}] {'to' if value > 0 else 'on'} {loss['to_name']}"]


def loss_text(loss: dict[str, Any]) -> str:
    """A loss with its interval, for tables."""
    short = "too short" if loss["nats"] else "too few streams"
    interval = short if loss["low"] is None else f"{signed(loss['low'])}, {signed(loss['high'])}"
    return f"{signed(loss['value'])}{' %' if loss['nats'] else ''} [{interval}]"


def _short(value: float) -> str:
    """Two digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def signed(value: float) -> str:
    """The same, with its sign."""
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{_short(abs(value))}"


def _held(share: float | None) -> list[str]:
    if share is None:
        return []
    return [f"holds 1/{1 / share:,.0f} of dense's bytes" if share < 1 / 1.95 else f"holds {100 * share:.0f} % of dense's bytes"]


def _taken(row: dict[str, Any]) -> list[str]:
    if row["times_dense"] is None:
        return []
    median, low, high = row["times_dense"]
    interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return [f"takes {median:.2f}{interval} of its time a token"]
