"""Data of a suite's YAML file, with the line of every value for error messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from kvbench.harness.core.errors import LARGEST_INTEGER, UserError, did_you_mean
from kvbench.harness.core.files import read_utf8

M = TypeVar("M", bound=BaseModel)
Location = tuple[str | int, ...]


class Source:
    """Data of a suite, and the place of every value: a line of the file or an option of the command line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: dict[Location, str] = {}
        try:
            text = read_utf8(path)
            node = yaml.compose(text, yaml.SafeLoader)
        except OSError as error:
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

    def _note(self, node: yaml.Node, location: Location) -> None:
        """Remember the line of every key and item."""
        self.places[location] = f"{self.path}:{node.start_mark.line + 1}"
        if len(location) > 8:
            raise UserError(f"{self.places[location]}: nested too deeply")
        if isinstance(node, yaml.SequenceNode):
            for i, item in enumerate(node.value):
                self._note(item, (*location, i))
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                place = f"{self.path}:{key.start_mark.line + 1}"
                if not isinstance(key, yaml.ScalarNode):
                    raise UserError(f"{place}: a key must be a word")
                if key.value in keys:
                    raise UserError(f"{place}: '{key.value}' is given twice")
                keys.add(key.value)
                self._note(value, (*location, key.value))
                self.places[(*location, key.value)] = place

    def place(self, location: Location) -> str:
        """Return file and line of a value or, if unknown, of the innermost value around it."""
        while location not in self.places and location:
            location = location[:-1]
        return self.places[location]

    def error(self, location: Location, message: str) -> UserError:
        """Return an error whose message begins with the place of a value."""
        return UserError(f"{self.place(location)}: {message}")

    def inherit(self, location: Location, origin: Location) -> None:
        """Give the value at `location` the place of the value at `origin`, from which it was inherited."""
        if origin in self.places:
            self.places[location] = self.places[origin]

    def is_overridden(self, location: Location) -> bool:
        """Whether a value comes from the command line."""
        return self.places.get(location, "").startswith("--")

    def put(self, location: Location, value: Any, place: str) -> None:
        """Set a value from the command line. `place` is the option, for error messages."""
        target: Any = self.data
        for step in location[:-1]:
            target = target[step]
        target[location[-1]] = value
        self.places = {k: v for k, v in self.places.items() if k[: len(location)] != location} | {location: place}


class Settings(Source):
    """Values from the command line that belong to no suite. The place of each value is the option."""

    def __init__(self, option: str) -> None:
        self.path = Path(option)
        self.places = {(): option}
        self.data = {}


def validated(kind: type[M], value: Any, source: Source, location: Location) -> M:
    """Validate a part of the data against a pydantic model.

    Raises:
        UserError: the part is invalid. The message names the first mistake with its line.
    """
    for place, leaf in _leaves(value):
        name = ".".join(map(str, place))
        if isinstance(leaf, int) and abs(leaf) > LARGEST_INTEGER:
            raise source.error((*location, *place), f"{name}: {leaf} is beyond {LARGEST_INTEGER:,}")
        if isinstance(leaf, str) and "\0" in leaf:
            raise source.error((*location, *place), f"{name}: {leaf!r} has a null byte")
    try:
        part = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = tuple(
            x for x in first["loc"] if isinstance(x, int) or x in kind.model_fields or first["type"] == "extra_forbidden"
        )
        name = ".".join(str(x) for x in first["loc"][:1])
        if first["type"] == "extra_forbidden":
            raise source.error((*location, *place), f"unknown key '{name}'{did_you_mean(name, kind.model_fields)}") from None
        if first["type"] == "missing":
            raise source.error((*location, *place), f"'{'.'.join(map(str, first['loc']))}' is missing") from None
        if first["type"] == "value_error" and not first["loc"]:  # a model's own message, about several keys
            raise source.error(location, first["msg"].removeprefix("Value error, ")) from None
        words = [
            e["ctx"]["expected"] for e in error.errors()[1:] if e["type"] == "literal_error" and e["loc"][:1] == first["loc"][:1]
        ]
        expected = " or ".join([first["msg"], *words])
        raise source.error((*location, *place), f"{name}: {expected}, not {first['input']!r:.60}") from None
    for place, given in _booleans_as_numbers(value, part):
        raise source.error((*location, *place), f"{'.'.join(map(str, place))}: expected a number, not {str(given).lower()}")
    return part


def _booleans_as_numbers(value: Any, read: Any) -> Iterator[tuple[Location, bool]]:
    """Yield (location, value) of every boolean that was read as a number. read: result of the validation."""
    if isinstance(value, bool) and isinstance(read, (int, float)) and not isinstance(read, bool):
        yield (), value
    for key, part in _parts(value):
        try:
            inside = getattr(read, str(key)) if isinstance(read, BaseModel) else read[key]
        except (LookupError, TypeError, AttributeError):  # the validated value has another structure
            continue
        yield from (((key, *place), given) for place, given in _booleans_as_numbers(part, inside))


def _parts(value: Any) -> Iterable[tuple[str | int, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()


def _leaves(value: Any) -> Iterator[tuple[Location, Any]]:
    """Yield (location, value) of every value in nested lists and mappings that is neither a list nor a mapping."""
    if not isinstance(value, (dict, list)):
        yield (), value
    for key, part in _parts(value):
        yield from (((key, *place), leaf) for place, leaf in _leaves(part))


def yaml_value(text: str, place: str) -> Any:
    """Return the value of an option of the command line, which is YAML. place: the option, for the message.

    Raises:
        UserError: the text is not YAML.
    """
    try:
        return yaml.safe_load(text)
    except RecursionError:
        raise UserError(f"{place[:40]}...: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise UserError(f"{place}: '{text}' is not YAML") from error


def items(value: Any) -> Iterator[tuple[Location, Any]]:
    """Yield the items of a list, or a single value, each with its location."""
    yield from (((i,), v) for i, v in enumerate(value)) if isinstance(value, list) else iter([((), value)])


def spread(mapping: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Expand the lists in a mapping: yield one mapping without lists per combination."""
    choices: list[list[Any]] = [v if isinstance(v, list) else [v] for v in mapping.values()]
    for values in itertools.product(*choices):
        yield dict(zip(mapping, values, strict=True))
