"""Contestants: third-party caches listed with the policies (`hf:DynamicCache`, `file.py:MyCache`, `package.module:TheirCache`).

A contestant is a policy in name only. It runs in the unmodified model's own loop and decides itself which tokens it keeps. Its
parameters are the parameters of its constructor. A class of one layer's cache stands for a cache with such a layer throughout.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from kvbench.harness.core.errors import UserError, did_you_mean
from kvbench.harness.core.parameters import parameters_of, policy_from
from kvbench.policies import CacheView, Policy

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig

AXES = ("capacity", "evict", "positions", "limit", "seed", "kv")  # axes of policies; a contestant has none
_CACHES = "transformers.cache_utils"
_BACKENDS = {"quanto": "optimum-quanto", "hqq": "hqq"}  # packages by which transformers quantizes
_BY_VERSION = ("transformers", "torch", "abc", "builtins", "typing")  # packages whose version identifies their source


@dataclass(frozen=True, kw_only=True)
class Contestant(Policy):
    """A cache whose own code decides which tokens it keeps. The fields of each subclass are its constructor's parameters.

    Attributes:
        named_class: class of the cache, of one layer's cache, or of a press.
        attention: attention implementation of the model, `sdpa` or `eager`; None: `sdpa` where both compute the same.
        holds: largest number of tokens per KV head that the cache should hold; a cache that holds more is flagged. None: unknown.
    """

    evicts: ClassVar[bool] = False  # it takes no capacity
    named_class: ClassVar[Any]

    attention: Literal["sdpa", "eager"] | None = None
    holds: int | None = field(default=None, metadata={"added": True})

    def __post_init__(self) -> None:
        if self.holds is not None and (type(self.holds) is not int or self.holds < 1):
            raise ValueError(f"holds is {self.holds!r}, expected the most tokens that it should hold")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name and the parameters. The class is created from a name, so another process can't import it."""
        return policy_from, (type(self).__name__, parameters_of(self))

    def importance(self, view: CacheView) -> Tensor:
        """Unused: the cache evicts its tokens itself."""
        raise NotImplementedError

    def new_cache(self, config: PreTrainedConfig) -> Cache:
        """Return an empty cache for a model of this config.

        Raises:
            ValueError: the cache's backend is not installed.
        """
        if self.missing:
            raise ValueError(self.missing)
        given = {name: value for name, value in parameters_of(self).items() if name not in OURS}
        return cache_from(functools.partial(self.named_class, **given), config)

    @property
    def missing(self) -> str:
        """Message that names the missing backend package and how to install it; empty if nothing is missing."""
        is_missing = self._backend is not None and _version(self._backend) is None
        return f"its backend is not installed: pip install {self._backend}" if is_missing else ""

    @staticmethod
    def hint(parameter: inspect.Parameter) -> Any:
        """Return the type of a parameter of the constructor."""
        return Any

    @property
    def modules(self) -> list[str]:
        """Modules outside transformers that define the class and its base classes."""
        names = dict.fromkeys(c.__module__ for c in self.named_class.__mro__)
        return [name for name in names if name.split(".")[0] not in _BY_VERSION]

    @property
    def code(self) -> str:
        """Source of the code that runs, as text: file names, and packages with their versions."""
        known, named = packages_distributions() if self.modules else {}, list[str]()
        for module in self.modules:
            packages = known.get(module.split(".")[0], [])
            file = Path(getattr(sys.modules[module], "__file__", None) or module).name
            named += [f"{package} {_version(package)}" for package in packages] or [file]
        packages = ["transformers"] if self._backend is None else [self._backend, "transformers"]
        return ", ".join(dict.fromkeys([*named, *(f"{package} {_version(package)}" for package in packages)]))

    @property
    def _backend(self) -> str | None:
        return _BACKENDS.get(getattr(self, "backend", ""))


def cache_from(factory: Callable[..., Any], config: PreTrainedConfig) -> Cache:
    """Return an empty cache for a model of this config.

    factory: class of a cache or of one layer's cache, or function that returns a cache. `config` is passed if it takes one.
    """
    from transformers.cache_utils import Cache, CacheLayerMixin

    built: Any = factory.func if isinstance(factory, functools.partial) else factory
    if inspect.isclass(built) and issubclass(built, CacheLayerMixin):
        layer_class: Any = factory
        return Cache(layer_class_to_replicate=layer_class)
    cache: Cache = factory(**({"config": config} if "config" in inspect.signature(factory).parameters else {}))
    return cache


OURS = frozenset(f.name for f in fields(Contestant))  # parameters of an entry that are not the constructor's


def contestant_class(name: str, value: Any) -> type[Contestant] | None:
    """Return the contestant for a class that a user named; None unless it is a class of a cache, of one layer's or of a press.

    Raises:
        UserError: a parameter of the constructor has a reserved name, or the press can't run with the installed packages.
    """
    presses: Any = importlib.import_module("kvbench.harness.core.presses")  # imported late because it imports this one
    if presses.is_press(value):
        presses.refuse_other_versions(name)
        return _dataclass(name, value, presses.Press)
    caches: Any = sys.modules.get(_CACHES)
    if caches is None or not inspect.isclass(value) or not issubclass(value, (caches.Cache, caches.CacheLayerMixin)):
        return None
    named_class: Any = value
    return _dataclass(name, named_class, Contestant)


def library_class(attribute: str) -> type[Contestant]:
    """Return the contestant for a cache of transformers.

    Raises:
        UserError: transformers has no such cache.
    """
    module = importlib.import_module(_CACHES)
    contestant = contestant_class(f"hf:{attribute}", getattr(module, attribute, None))
    if contestant is None:
        names = [name for name, value in vars(module).items() if inspect.isclass(value) and issubclass(value, module.Cache)]
        raise UserError(f"transformers {_version('transformers')} has no cache '{attribute}'{did_you_mean(attribute, names)}")
    return contestant


@functools.cache
def _dataclass(name: str, named_class: Any, base: type[Contestant]) -> type[Contestant]:
    """Return a dataclass whose fields are a constructor's parameters. A record has the fields that differ from their defaults."""
    fields: list[Any] = []
    for parameter in inspect.signature(named_class).parameters.values():
        has_default = parameter.default is not parameter.empty
        if parameter.name == "config" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in (*AXES, "name", *dir(Contestant)):
            raise UserError(f"{name}: its parameter '{parameter.name}' means something else here: give it another name")
        default: Any = (lambda value=parameter.default: value) if has_default else MISSING
        fields.append((parameter.name, base.hint(parameter), field(default_factory=default, metadata={"added": True})))
    inside = {"named_class": named_class, "__module__": __name__, "__doc__": inspect.getdoc(named_class)}
    return make_dataclass(name, fields, bases=(base,), namespace=inside, frozen=True, kw_only=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
