"""Pretraining with and without sinks: loss and attention to the first token (StreamingLLM, Fig. 15)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.harness.report import chart

_BUILTIN = Path(__file__).parents[2] / "models/builtin"


def training_logs() -> list[Path]:
    """Folders of the built-in models with a training log."""
    return sorted(p.parent for p in _BUILTIN.glob("*/training.jsonl"))


def curves(models: Sequence[Path]) -> list[chart.Chart]:
    """Loss and attention to the first token over tokens seen, a line per model; no chart without logs.

    Args:
        models: folders, each with the `training.jsonl` that `bench pretrain` writes.
    """
    logs = {m.name: [json.loads(x) for x in (m / "training.jsonl").read_text(encoding="utf-8").splitlines()] for m in models}
    if not logs:
        return []
    loss, attention = _losses(logs), _attention(logs)
    return [
        chart.Chart(
            "pretraining",
            f"Training loss, and attention to the first token, over tokens seen, of {', '.join(logs)}.",
            {
                "hconcat": [
                    _panel(loss, list(logs), "loss", "loss, nats per token", {"type": "linear", "zero": False, "nice": False}),
                    _panel(attention, list(logs), "attention", "attention to the first token", {"type": "linear", "zero": True}),
                ]
            },
        )
    ]


def _losses(logs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Leaves out the first steep drop, which would flatten the rest."""
    return [
        {"model": name, "tokens": row["tokens"] / 1e6, "loss": round(row["loss"], 4)}
        for name, rows in logs.items()
        for row in rows[len(rows) // 50 :]
    ]


def _attention(logs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {"model": name, "tokens": row["tokens"] / 1e6, "attention": round(row["attention_to_first"]["largest"], 4)}
        for name, rows in logs.items()
        for row in rows
        if "attention_to_first" in row
    ]


def _panel(values: list[dict[str, Any]], names: list[str], field: str, title: str, scale: dict[str, Any]) -> dict[str, Any]:
    return {
        "width": 340, "height": 260, "data": {"values": values}, "mark": {"type": "line", "strokeWidth": 1.5},
        "encoding": {
            "x": {"field": "tokens", "type": "quantitative", "title": "million tokens"},
            "y": {"field": field, "type": "quantitative", "title": title, "scale": scale},
            "color": {"field": "model", "type": "nominal", "sort": names, "title": None},
        },
    }  # fmt: skip
