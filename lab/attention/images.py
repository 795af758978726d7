"""Images for vision transformers: files of a directory, a dataset of the hub, or shapes that are drawn from a seed.

An image is [height, width, 3] uint8, RGB.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.harness.core.errors import UserError
from kvbench.harness.data.data_files import files_below, listed
from kvbench.harness.models.hub import quiet

Image = NDArray[np.uint8]
_SUFFIXES = (".png", ".jpg", ".jpeg")
_DRAWN_SIZE = 256  # height and width of a drawn image


@dataclass(frozen=True)
class Images:
    """Images in order."""

    source: str
    load: Callable[[int], Image]  # the image with a number, from 0; raises UserError if it is unreadable
    count: int | None  # None if there is no end of them


def shapes(seed: int) -> Images:
    """Ellipses and rectangles, plain or striped, on a coloured gradient with noise: no photographs, but no download either."""
    return Images(f"shapes drawn from seed {seed}", lambda number: _drawn(seed, number), None)


def require_pillow(who: str) -> None:
    """Check that Pillow, which decodes images, is installed.

    Raises:
        UserError: Pillow is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise UserError(f"{who} needs the package 'pillow': pip install 'kv-bench[vision]'")


def in_directory(directory: Path) -> Images:
    """Return the .png and .jpg files of a directory and its subfolders, sorted by name. `directory` may be a single file.

    Raises:
        UserError: the directory does not exist or has no images, or Pillow is not installed.
    """
    files = files_below(directory, _SUFFIXES)
    if not files:
        raise UserError(f"{directory}: no images ({', '.join(_SUFFIXES)})")
    require_pillow(f"{directory}: reading images")
    return Images(f"local {listed(files)}", lambda number: _decoded(files[number].read_bytes(), str(files[number])), len(files))


def on_hub(dataset: str, split: str, most: int) -> Images:
    """Return the first `most` images of "owner/name" or "owner/name@revision" on the hub, or of a directory for `datasets`.

    Rows are streamed, so that only these images are downloaded. Images are held as encoded files.

    Raises:
        UserError: the data set can't be loaded or has no column of images, or Pillow is not installed.
    """
    source = f"{dataset} {split}"
    require_pillow(f"{source}: reading images")
    try:
        files = _files_of(dataset, split, most)
    except UserError:
        raise
    except Exception as error:  # datasets raises many kinds
        raise UserError(
            f"{source}: can't be loaded ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}); "
            "give --data DIR or BENCH_DATA, a directory of .png or .jpg files"
        ) from error
    return Images(source, lambda number: _decoded(files[number], f"{source}, image {number}"), len(files))


def _files_of(dataset: str, split: str, most: int) -> list[bytes]:
    """The bytes of the first images, as they were stored."""
    import datasets

    quiet()
    name, _, revision = dataset.partition("@")
    rows: Any = datasets.load_dataset(name, revision=revision or None, split=split, streaming=True)
    column = next((c for c, kind in (rows.features or {}).items() if isinstance(kind, datasets.Image)), None)
    if column is None:
        raise UserError(f"{dataset} {split}: no column of images, only {', '.join(rows.features or {})}")
    rows = rows.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    stored = [row[column] for row in islice(rows, most)]
    return [x["bytes"] if x["bytes"] is not None else Path(x["path"]).read_bytes() for x in stored]


def _decoded(file: bytes, name: str) -> Image:
    """The pixels of a .png or .jpg file, turned as its camera says."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    try:
        with Pillow.open(io.BytesIO(file)) as image:
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, ValueError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise UserError(f"{name}: not a readable image ({type(error).__name__})") from None


def _drawn(seed: int, number: int) -> Image:
    """Draw image `number` of a seed: a gradient, shapes and noise. [size, size, 3] uint8."""
    rng = np.random.default_rng((seed, number))
    y, x = np.mgrid[0 : 1 : _DRAWN_SIZE * 1j, 0 : 1 : _DRAWN_SIZE * 1j]
    left, right = rng.random((2, 3))
    canvas = left + (right - left) * x[..., None]
    for _ in range(rng.integers(3, 9)):
        angle, (centre_y, centre_x), (height, width) = rng.random() * np.pi, rng.random(2), 0.05 + 0.3 * rng.random(2)
        along = ((x - centre_x) * np.cos(angle) + (y - centre_y) * np.sin(angle)) / width
        across = ((y - centre_y) * np.cos(angle) - (x - centre_x) * np.sin(angle)) / height
        round_shape, striped, colour = rng.random() < 0.5, rng.random() < 0.5, rng.random(3)
        inside = along**2 + across**2 < 1 if round_shape else np.maximum(np.abs(along), np.abs(across)) < 1
        shade = 0.5 + 0.5 * np.sin(rng.uniform(6, 40) * along) if striped else np.ones_like(along)
        canvas = np.where(inside[..., None], shade[..., None] * colour, canvas)
    canvas = canvas + rng.normal(0, 0.02, canvas.shape)
    return np.asarray(np.clip(255 * canvas, 0, 255), np.uint8)
