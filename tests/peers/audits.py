"""Audit kvpress' presses, transformers' caches and some policies of ours, and print a line of JSON for each (`make peers`)."""

import json
import logging
from importlib.metadata import version

import torch

from kvbench.harness.audit.audit import audited, models_of
from kvbench.harness.audit.subject import subject_of

SKIPPED = ("reset",)  # transformers 5.2 zeroes keys and values, and keeps their number
KNORM = "{name: 'kvpress:KnormPress', compression_ratio: 0.5}"
HALF = "compression_ratio=0.5"
DECODING = ("target_size=32", "compression_interval=4")
TARGETS = [  # name, parameters, and the tokens that it should hold
    ("kvpress:StreamingLLMPress", (HALF,), None),
    ("kvpress:SnapKVPress", (HALF, "window_size=16"), None),
    ("kvpress:PyramidKVPress", (HALF, "window_size=16"), None),
    ("kvpress:TOVAPress", (HALF,), None),
    ("kvpress:ObservedAttentionPress", (HALF, "attention=eager"), None),
    ("kvpress:KnormPress", (HALF,), None),
    ("kvpress:KeyDiffPress", (HALF,), None),
    ("kvpress:LagKVPress", (HALF, "lag_size=16"), None),
    ("kvpress:CURPress", (HALF,), None),
    ("kvpress:ExpectedAttentionPress", (HALF,), None),
    ("kvpress:KeyRerotationPress", (f"press={KNORM}",), None),
    ("kvpress:AdaKVPress", (f"press={KNORM}",), None),
    ("kvpress:ThinKPress", ("key_channel_compression_ratio=0.5",), None),
    ("kvpress:DecodingPress", ("base_press=kvpress:KnormPress", *DECODING), 35),
    ("kvpress:DecodingPress", ("base_press=kvpress:StreamingLLMPress", *DECODING), 35),
    ("DynamicCache", (), None),
    ("StaticCache", ("max_cache_len=96",), None),
    *((name, (), 32) for name in ("window", "sink_window", "h2o", "tova", "snapkv")),
]


def main() -> None:
    """Audit on the tiny models and on SmolLM2."""
    logging.disable(logging.WARNING)  # presses name models that they were not tested with
    torch.set_num_threads(1)
    models = [*models_of(None), *models_of("smollm2")]
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    for target, settings, budget in TARGETS:
        # kvpress is not tested with Gemma 3 for text alone, the tiny model with sliding windows.
        tested = [model for model in models if model.name != "window" or not target.startswith("kvpress:")]
        audit = audited(subject_of(target, settings, budget, 0), tested, None, SKIPPED)
        failed = [{"check": check.name, "model": check.case, "evidence": check.evidence} for check in audit.failed]
        row = {"target": target, "settings": settings, "models": [model.name for model in tested], "failed": failed}
        print(json.dumps(row | {"versions": versions}), flush=True)


if __name__ == "__main__":
    main()
