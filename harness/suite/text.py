"""A YAML text as data that knows on which line everything stands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from kvbench.harness.core.errors import UserError, did_you_mean

M = TypeVar("M", bound=BaseModel)
Location = tuple[str | int, ...]


class Source:
    """A suite's text as data that knows where everything stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: dict[Location, str] = {}
        try:
            text = path.read_text(encoding="utf-8")
            node = yaml.compose(text, yaml.SafeLoader)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: can't be read ({type(error).__name__})") from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark else ""
            raise UserError(f"{path}{line}: not YAML ({getattr(error, 'problem', None) or 'broken'})") from error
        except RecursionError:
            raise UserError(f"{path}: nested too deeply") from None
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{path}:1: not a suite: expected 'suite:', 'version:', 'model:', 'task:', 'policies:'")
        self._note(node, ())
        try:
            self.data: dict[str, Any] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: not YAML ({str(error).splitlines()[0]})") from error

    def _note(self, node: yaml.Node, at: Location) -> None:
        """Remember the line of every key and item."""
        self.places[at] = f"{self.path}:{node.start_mark.line + 1}"
        if len(at) > 8:
            raise UserError(f"{self.places[at]}: nested too deeply")
        if isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                self._note(item, (*at, i))
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                place = f"{self.path}:{key.start_mark.line + 1}"
                if not isinstance(key, yaml.ScalarNode):
                    raise UserError(f"{place}: a key must be a word")
                if key.value in seen:
                    raise UserError(f"{place}: '{key.value}' is given twice")
                seen.add(key.value)
                self._note(value, (*at, key.value))
                self.places[(*at, key.value)] = place

    def error(self, at: Location, message: str) -> UserError:
        """An error about the innermost place that has a line."""
        while at not in self.places and at:
            at = at[:-1]
        return UserError(f"{self.places[at]}: {message}")

    def inherit(self, at: Location, origin: Location) -> None:
        """What holds at one place is said at another."""
        if origin in self.places:
            self.places[at] = self.places[origin]

    def is_overridden(self, at: Location) -> bool:
        """Whether the command line said it."""
        return self.places.get(at, "").startswith("--")

    def put(self, at: Location, value: Any, place: str) -> None:
        """Change the data from the command line, and remember who said so."""
        target: Any = self.data
        for step in at[:-1]:
            target = target[step]
        target[at[-1]] = value
        self.places = {k: v for k, v in self.places.items() if k[: len(at)] != at} | {at: place}


def validated(kind: type[M], value: Any, source: Source, at: Location) -> M:
    """A part of the text as what it should be.

    Raises:
        UserError: the first mistake, with its line.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = tuple(
            x for x in first["loc"] if isinstance(x, int) or x in kind.model_fields or first["type"] == "extra_forbidden"
        )
        name = ".".join(str(x) for x in first["loc"][:1])
        if first["type"] == "extra_forbidden":
            raise source.error((*at, *place), f"unknown key '{name}'{did_you_mean(name, kind.model_fields)}") from None
        if first["type"] == "missing":
            raise source.error(at, f"'{name}' is missing") from None
        if first["type"] == "value_error" and not first["loc"]:  # of several keys together, already in words
            raise source.error(at, first["msg"].removeprefix("Value error, ")) from None
        got = repr(first["input"])
        raise source.error((*at, *place), f"{name}: {first['msg']}, not {got[:60]}") from None


def items(value: Any) -> Iterator[tuple[Location, Any]]:
    """One or several, with their place."""
    yield from (((i,), v) for i, v in enumerate(value)) if isinstance(value, list) else iter([((), value)])


def spread(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A mapping whose lists multiply: one mapping without lists for every combination."""
    choices: list[list[Any]] = [v if isinstance(v, list) else [v] for v in given.values()]
    for values in itertools.product(*choices):
        yield dict(zip(given, values, strict=True))
