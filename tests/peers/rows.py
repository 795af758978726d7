"""The table: a rule of somebody else's with its arguments, and the policy and variant of ours that bears its name.

Windows, kernels and chunks are smaller than the published ones where a prompt of 128 to 320 tokens would leave the rule nothing
to decide; the arguments of both sides are on the page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KVPRESS = "NVIDIA/kvpress"
KVPRESS_AT = "0.5.5 (package)"

Spec = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One rule of somebody else's, and ours.

    Attributes:
        key: its name in the data.
        theirs: {"press": class, ...} of kvpress.
        ours: as a suite names a policy.
        source: repository, and commit or release.
        means: what the name means there, in one line.
        may_differ: the share of kept positions that may differ in a cell, ties aside. 0: all must be the same.
        why: if some may differ, the reason.
        min_capacity: tokens; smaller budgets leave the rule nothing to decide, or can't serve it.
        min_length: likewise, of prompts.
        pool: the heads among which victims are drawn, and so among which scores may tie.
        positions: where RoPE puts kept tokens while the continuation is read.
        takes_capacity: whether the budget is an input of theirs; otherwise it follows from the prompt.
    """

    key: str
    theirs: Spec
    ours: Spec
    source: tuple[str, str]
    means: str
    may_differ: float = 0.0
    why: str = ""
    min_capacity: int = 1
    min_length: int = 1
    pool: str = "head"
    positions: str = "stream"
    takes_capacity: bool = True
    ratios: tuple[float, ...] = (0.5, 0.75)  # shares of the prompt that kvpress evicts; with these lengths they give integers
    capacity: str = "ratio"  # where ours comes from: the ratio, or "theirs": the tokens that theirs keeps, on average
    eager: bool = field(default=False)  # kvpress' press needs the weights of eager attention


def press(key: str, theirs: Spec, ours: Spec, means: str, **more: Any) -> Row:
    """A row of kvpress."""
    return Row(f"kvpress/{key}", theirs, ours, (KVPRESS, KVPRESS_AT), means, **more)


SNAP16: Spec = {"press": "SnapKVPress", "window_size": 16}
OUR_SNAP16: Spec = {"name": "snapkv", "window": 16, "variant": "kvpress"}
EA: Spec = {"press": "ExpectedAttentionPress"}
OUR_EA: Spec = {"name": "expected_attention"}
TABLE = "odd heads of even layers, even heads of odd layers stream"

ROWS: tuple[Row, ...] = (
    press("none", {"press": ""}, {"name": "dense"}, "nothing is evicted: the two environments run one model"),
    press(
        "streaming_llm",
        {"press": "StreamingLLMPress"},
        {"name": "sink_window", "sinks": 4},
        "four sinks and the newest, at their positions in the stream",
        min_capacity=5,
    ),
    press(
        "streaming_llm, keys turned",
        {"press": "KeyRerotationPress", "inner": {"press": "StreamingLLMPress"}},
        {"name": "sink_window", "sinks": 4},
        "the same, keys turned to positions 0, 1, 2, ...: the paper's method",
        positions="cache",
        min_capacity=5,
    ),
    press(
        "snapkv",
        {"press": "SnapKVPress"},
        {"name": "snapkv", "variant": "kvpress", "window": 64},
        "window 64, weights averaged over it, average pooling over 5, then over the query group",
        min_capacity=65,
    ),
    press("snapkv, window 16", SNAP16, OUR_SNAP16, "the same, window 16", min_capacity=17),
    press(
        "pyramidkv",
        {"press": "PyramidKVPress"},
        {"name": "pyramidkv", "variant": "kvpress", "score": {"name": "snapkv", "variant": "kvpress", "window": 64}},
        "SnapKV in every layer: with window 64 the last layer's share is below the window, so no pyramid is built",
        min_capacity=65,
        ratios=(0.625, 0.75),
    ),
    press(
        "pyramidkv, window 16",
        {"press": "PyramidKVPress", "window_size": 16},
        {"name": "pyramidkv", "variant": "kvpress", "score": OUR_SNAP16},
        "SnapKV's scores; budgets fall linearly over the layers, the window counted in; or SnapKV, where the last is below it",
        min_capacity=17,
        min_length=200,
        ratios=(0.4, 0.75),
    ),
    press(
        "pyramidkv, window 16, uneven",
        {"press": "PyramidKVPress", "window_size": 16},
        {"name": "pyramidkv", "variant": "kvpress", "score": OUR_SNAP16},
        "the same where a layer's share is the window or ends in one half",
        min_capacity=17,
        ratios=(0.375, 0.5),
        may_differ=0.01,
        why="ours keeps a token beside the window and rounds halves toward the lower layer; kvpress rounds to even numbers",
    ),
    press(
        "tova",
        {"press": "TOVAPress"},
        {"name": "tova", "variant": "kvpress"},
        "the last query's weights, averaged over all heads of the layer; the last token stays",
    ),
    press(
        "observed_attention",
        {"press": "ObservedAttentionPress"},
        {"name": "h2o", "window": 0, "normalise": "visible"},
        "H2O's sums, each divided by the number of queries that could see the key; no window",
        eager=True,
    ),
    press("knorm", {"press": "KnormPress"}, {"name": "knorm"}, "the smallest key norms, in every layer, without a window"),
    press(
        "keydiff",
        {"press": "KeyDiffPress"},
        {"name": "keydiff"},
        "the rotated keys least like the mean of the head's unit keys, once over the whole prompt",
    ),
    press(
        "lagkv",
        {"press": "LagKVPress", "lag_size": 32},
        {"name": "lagkv", "lag": 32},
        "ranks within partitions of 32, each scored against the next one; four sinks, the last partition and the tail stay",
        min_capacity=80,
        min_length=128,
    ),
    press(
        "cur",
        {"press": "CURPress"},
        {"name": "cur"},
        "squared key norm times squared value norm, each as a share of its 16 neighbours; four sinks",
        min_capacity=5,
    ),
    press(
        "expected_attention",
        EA,
        OUR_EA,
        "the weight that a Gaussian of the prompt's queries is expected to give, times the value's norm; four sinks",
        min_capacity=5,
    ),
    press(
        "expected_attention, no value norm",
        {**EA, "use_vnorm": False},
        {**OUR_EA, "value_norm": False},
        "the same without the value's norm",
        min_capacity=5,
    ),
    press(
        "criticalkv of snapkv",
        {"press": "CriticalKVPress", "inner": SNAP16},
        {"name": "criticalkv", "epsilon": {"times_group": 1e-4 * 16}, "score": OUR_SNAP16},
        "half the budget by SnapKV; the rest by (score + 1e-4) times the L1 norm of the projected value; our score is a sum over "
        "window and query group, so our epsilon is as much larger",
        min_capacity=33,
    ),
    press(
        "criticalkv of expected_attention",
        {"press": "CriticalKVPress", "inner": {**EA, "use_vnorm": False}},
        {"name": "criticalkv", "score": {**OUR_EA, "value_norm": False}},
        "the same with Expected Attention's score",
        min_capacity=10,
        may_differ=0.1,
        why="scores that underflow to 0 in float32 tie, and kvpress breaks these ties in any order",
    ),
    press(
        "adakv of snapkv",
        {"press": "AdaKVPress", "inner": SNAP16},
        {"name": "adakv", "variant": "kvpress", "score": OUR_SNAP16},
        "each head keeps its top fifth, then the lowest of all heads of the layer go; nothing is freed",
        min_capacity=17,
        pool="layer",
    ),
    press(
        "adakv of expected_attention",
        {"press": "AdaKVPress", "inner": {**EA, "epsilon": 1e-2}},
        {"name": "adakv", "variant": "kvpress", "score": {**OUR_EA, "epsilon": 1e-2}},
        "what kvpress' leaderboard calls expected_attention",
        min_capacity=9,
        pool="layer",
    ),
    press(
        "chunkkv of snapkv",
        {"press": "ChunkKVPress", "inner": SNAP16, "chunk_length": 20},
        {"name": "chunkkv", "chunk": 20, "score": OUR_SNAP16, "variant": "kvpress"},
        "whole chunks of 20 by their mean score over all heads; ours is given the tokens in as many chunks as the ratio gives",
        min_capacity=33,
        capacity="theirs",
    ),
    press(
        "finch",
        {"press": "FinchPress", "window": 16},
        {"name": "finch", "window": 16},
        "SnapKV without pooling, each query's weights times the keys before it; keys turned to positions 0, 1, 2, ...",
        min_capacity=17,
        positions="cache",
    ),
    press(
        "simlayerkv",
        {"press": "SimLayerKVPress", "lazy_threshold": 0.5, "n_recent": 32},
        {"name": "simlayerkv", "threshold": 0.5, "recent": 32, "variant": "kvpress"},
        "a layer whose last query puts over half its weight on the sinks and the newest 32 keeps only those",
        takes_capacity=False,
    ),
    press(
        "duo_attention",
        {"press": "DuoAttentionPress", "sinks": 4, "recent": 32},
        {"name": "duo_attention", "sinks": 4, "recent": 32, "file": TABLE},
        "by a table, a head keeps everything or four sinks and the newest 32; ours is given the tokens of that",
        takes_capacity=False,
        capacity="theirs",
    ),
)
