"""Reader of the header of a GGUF file: metadata and table of tensors.

The package gguf also reads headers, but takes seconds per 100,000 tokens of a vocabulary, whose entries are not needed here.
Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from kvbench.harness.core.errors import UserError

_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_STRING = 2**26  # bytes
MARKER = "gguf.json"  # file beside the folder of a converted model, so that a copy of the folder is an ordinary model


@dataclass(frozen=True)
class TensorEntry:
    """Entry of the header's tensor table."""

    name: str
    elements: int
    type: int  # number of a ggml type
    offset: int  # from the start of the tensors' data, in bytes


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and tensors of a GGUF file."""

    metadata: dict[str, Any]  # an array of strings is replaced by its length
    tensors: tuple[TensorEntry, ...]
    data_start: int  # start of the tensors' data, in bytes

    @classmethod
    def read(cls, file: Path) -> GGUFHeader:
        """Read the header of a file.

        Raises:
            UserError: the file can't be read, is not a GGUF file, or is damaged.
        """
        try:
            with file.open("rb") as stream:
                return _read(stream, file.name)
        except UserError:  # a subclass of ValueError
            raise
        except OSError as error:
            raise UserError(f"{file}: can't be read ({error.strerror})") from error
        except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
            raise UserError(f"{file.name}: is damaged or cut short: its header can't be read ({error})") from error


def gguf_origin(directory: Path) -> dict[str, Any]:
    """Return `file`, `sha256` and `quantised` of the GGUF file that a folder was converted from; empty for other folders."""
    try:
        origin: dict[str, Any] = json.loads((directory.parent / MARKER).read_text())
    except (OSError, ValueError):
        return {}
    return origin


def _read(stream: BinaryIO, name: str) -> GGUFHeader:
    magic = stream.read(4)
    if magic != b"GGUF":
        raise UserError(f"{name}: not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    version, tensor_count, entry_count = _unpack(stream, "<IQQ")
    if version not in _VERSIONS:
        raise UserError(f"{name}: its GGUF version is {version}; versions {' and '.join(map(str, _VERSIONS))} can be read")
    metadata = {}
    for _ in range(entry_count):
        key = _string(stream)
        metadata[key] = _value(stream, *_unpack(stream, "<I"))
    tensors = tuple(_tensor(stream) for _ in range(tensor_count))
    alignment = metadata.get("general.alignment", 32)
    return GGUFHeader(metadata, tensors, -(-stream.tell() // alignment) * alignment)


def _unpack(stream: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, stream.read(struct.calcsize(layout)))


def _string(stream: BinaryIO) -> str:
    (length,) = _unpack(stream, "<Q")
    if length > _MAX_STRING or len(text := stream.read(length)) < length:
        raise ValueError(f"a string of {length} bytes")
    return text.decode()


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(stream)
    if kind != _ARRAY:
        return _unpack(stream, _NUMBERS[kind])[0]
    inner, length = _unpack(stream, "<IQ")
    if inner != _STRING:
        layout = _NUMBERS[inner]
        return list(_unpack(stream, f"<{length}{layout[1:]}"))
    for _ in range(length):
        _string(stream)
    return length


def _tensor(stream: BinaryIO) -> TensorEntry:
    name = _string(stream)
    (dimensions,) = _unpack(stream, "<I")
    shape = _unpack(stream, f"<{dimensions}Q")
    kind, offset = _unpack(stream, "<IQ")
    return TensorEntry(name, prod(shape), kind, offset)
