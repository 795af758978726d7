"""A press of kvpress as an entry beside the policies: `kvpress:SnapKVPress`, or one of your own that inherits from its classes.

kvpress' own hooks run it on the unmodified model. Its parameters are those of its constructor; presses inside it are entries with
a name and parameters themselves.
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
        """The type of a parameter of the constructor: an entry where it takes a press."""
        annotation = str(parameter.annotation)
        if annotation.startswith("list"):
            return tuple[Any, ...]
        return Contestant | None if "Press" in annotation else Any

    def new_press(self) -> Any:
        """The press, which has noted nothing yet."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in OURS}
        return self.named_class(**{name: _constructed(value) for name, value in given.items()})

    @property
    def cuts_prompts(self) -> bool:
        """Whether it cuts what the model's first pass reads, as all do but those for decoding."""
        return not any(base.__name__ == "DecodingPress" for base in inspect.getmro(self.named_class))

    def new_cache(self, config: PreTrainedConfig) -> Cache:
        """The cache that it cuts."""
        from transformers import DynamicCache

        return DynamicCache()


def is_press(value: Any) -> bool:
    """Whether it is a class of press."""
    bases = inspect.getmro(value) if inspect.isclass(value) else ()
    return any(base.__name__ == "BasePress" and base.__module__.startswith(f"{_PACKAGE}.") for base in bases)


def refuse_other_versions(name: str) -> None:
    """Refuse to run where kvpress' hooks would fail."""
    needed = [Requirement(text).specifier for text in requires(_PACKAGE) or () if Requirement(text).name == "transformers"]
    installed = version("transformers")
    if not all(installed in specifier for specifier in needed):
        raise UserError(
            f"{name}: kvpress {version(_PACKAGE)} needs transformers{needed[0]}, and {installed} is installed: `make peers` "
            "makes an environment with both, whose `bench` writes into the same results (docs/contestants.md)"
        )


def _inside(value: Any) -> Any:
    """An item of a list of presses, as a suite has it."""
    given = {"name": value} if isinstance(value, str) and ":" in value else value
    if not isinstance(given, dict) or "name" not in given:
        return value
    return policy_from(given["name"], {k: v for k, v in given.items() if k != "name"})


def _constructed(value: Any) -> Any:
    """A parameter as the constructor takes it."""
    if isinstance(value, tuple):
        return [_constructed(item) for item in value]
    return value.new_press() if isinstance(value, Press) else value
