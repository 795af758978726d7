"""A model file is the same after it was split and joined."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "gpu"))
from model import join, split

pytestmark = pytest.mark.fast


def test_pieces_come_one_a_call_and_make_the_same_file(tmp_path: Path) -> None:
    """Each call brings one piece; the last one makes the file."""
    file, store = tmp_path / "model.gguf", tmp_path / "store"
    file.write_bytes(bytes(range(256)) * 10240)
    assert split(file, tmp_path / "pieces", 1) == 3
    for number in ("3", "1"):
        with pytest.raises(ValueError, match="missing"):
            join(tmp_path / "pieces" / number, store)
    assert join(tmp_path / "pieces" / "2", store).read_bytes() == file.read_bytes()


def test_damaged_piece_is_refused(tmp_path: Path) -> None:
    """A piece that changed on the way makes no model."""
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(2**20 + 1))
    split(file, tmp_path / "pieces", 1)
    (tmp_path / "pieces" / "2" / "2.piece").write_bytes(b"x")
    with pytest.raises(ValueError, match="SHA-256"):
        join(tmp_path / "pieces", tmp_path / "store")
