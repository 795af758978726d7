"""A file appears complete or not at all, and writing it touches no other."""

from __future__ import annotations

import errno
import os

import pytest

from kvbench.harness.core.files import atomic_write, new_partial, put_in_place, remove_partials


def test_what_fails_half_way_changes_nothing(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("before")

    def write_half():
        with atomic_write(path) as file:
            file.write("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left on device") as caught, atomic_write(tmp_path / "page.md"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(tmp_path / "page.md")


def test_a_symbolic_link_is_replaced_and_its_target_left_alone(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "page.md"
    victim.write_text("mine")
    path.symlink_to(victim)
    with atomic_write(path) as file:
        file.write("page")
    assert (victim.read_text(), path.read_text(), path.is_symlink()) == ("mine", "page", False)


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "page.md"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write("first")
        second.write("second")
    assert path.read_text() == "first", "the outer one is put in place last"
    assert list(tmp_path.iterdir()) == [path]


def test_a_partial_that_exists_is_never_opened(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    new_partial(tmp_path / "a")
    with pytest.raises(FileExistsError):
        new_partial(tmp_path / "a")


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path):
    (tmp_path / "deep").mkdir()
    whole = tmp_path / "deep" / "whole"
    put_in_place(new_partial(whole), whole)
    new_partial(tmp_path / "deep" / "left")
    remove_partials(tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [whole]
