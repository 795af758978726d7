"""Presses of kvpress listed with the policies: `kvpress:SnapKVPress`, or a user's class that inherits from a kvpress class.

kvpress' own hooks run a press on the unmodified model. The parameters of a press are its constructor's. A press inside another
press is an entry with its own name and parameters.
"""

from __future__ import annotations

import dataclasses
import inspect
from importlib.metadata import requires, version
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from kvbench.harness.core.contestants import OURS, Contestant
from kvbench.harness.core.errors import UserError, described
from kvbench.harness.core.parameters import policy_from

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig

_PACKAGE = "kvpress"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Press(Contestant):
    """A press. The fields of each subclass are its constructor's parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                object.__setattr__(self, name, tuple(_inside(item) for item in value))
        try:
            self.new_press()
        except Exception as error:  # presses refuse by assertions, too
            raise ValueError(described(error)) from error

    @staticmethod
    def hint(parameter: inspect.Parameter) -> Any:
        """Return the type of a parameter of the constructor: an entry for a parameter that takes a press."""
        annotation = str(parameter.annotation)
        if annotation.startswith("list"):
            return tuple[Any, ...]
        return Contestant | None if "Press" in annotation else Any

    def new_press(self) -> Any:
        """Return a new press without state."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in OURS}
        return self.named_class(**{name: _constructed(value) for name, value in given.items()})

    @property
    def cuts_prompts(self) -> bool:
        """Whether the press compresses the cache during prefill. Only presses for decoding don't."""
        return not any(base.__name__ == "DecodingPress" for base in inspect.getmro(self.named_class))

    def new_cache(self, config: PreTrainedConfig) -> Cache:
        """Return the empty cache that the press compresses."""
        from transformers import DynamicCache

        return DynamicCache()


def is_press(value: Any) -> bool:
    """Whether a value is a class of press."""
    bases = inspect.getmro(value) if inspect.isclass(value) else ()
    return any(base.__name__ == "BasePress" and base.__module__.startswith(f"{_PACKAGE}.") for base in bases)


def refuse_other_versions(name: str) -> None:
    """Refuse versions of transformers with which kvpress' hooks would fail.

    Raises:
        UserError: kvpress needs another version of transformers.
    """
    needed = [Requirement(text).specifier for text in requires(_PACKAGE) or () if Requirement(text).name == "transformers"]
    installed = version("transformers")
    if not all(installed in specifier for specifier in needed):
        raise UserError(
            f"{name}: kvpress {version(_PACKAGE)} needs transformers{needed[0]}, and {installed} is installed: `make peers` "
            "makes an environment with both, whose `bench` writes into the same results (docs/contestants.md)"
        )


def _inside(value: Any) -> Any:
    """Return an item of a list of presses, given in a suite's notation."""
    given = {"name": value} if isinstance(value, str) and ":" in value else value
    if not isinstance(given, dict) or "name" not in given:
        return value
    return policy_from(given["name"], {k: v for k, v in given.items() if k != "name"})


def _constructed(value: Any) -> Any:
    """Return a parameter in the form that the constructor takes."""
    if isinstance(value, tuple):
        return [_constructed(item) for item in value]
    return value.new_press() if isinstance(value, Press) else value
