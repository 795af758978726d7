"""Atomic writes, writable and locked folders, and users' text in UTF-8. Imports no torch.

A file appears complete or not at all, even with other writers.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kvbench.harness.core.errors import UserError

PARTIAL = ".partial"  # suffix of a file that is still being written
_OWN_PARTIAL = re.compile(rf"\..+\.[0-9a-f]{{16}}{re.escape(PARTIAL)}")  # names that `new_partial` gives
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO})  # raised by NFS, Lustre, FUSE
OWNER_SUFFIX = ".owner"  # suffix of the file that serves as the lock where files can't be locked
_MARKS = (  # UTF-32 first, because a mark of UTF-32 begins with a mark of UTF-16
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def new_partial(path: Path) -> Path:
    """Create an empty file beside `path`, to be filled and then moved to `path` with `put_in_place`.

    Its name is unique, and no symbolic link is followed.

    Raises:
        OSError: the folder is not writable; the error names `path`.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0), 0o666))
    except OSError as error:
        error.filename = str(path)  # the user knows this name
        raise
    return partial


def put_in_place(partial: Path, path: Path) -> None:
    """Move a filled file to its place. Its content is written to disk before its name changes.

    A symbolic link at `path` is replaced, never followed.

    Raises:
        OSError: the file can't be moved.
    """
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    with contextlib.suppress(OSError):  # some file systems can't sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def store_content(content: Path | bytes, path: Path) -> str:
    """Move a finished file to its place, or write its content there. Returns the sha256 of the content.

    Raises:
        OSError: the folder is not writable, or the disk is full.
    """
    if isinstance(content, bytes):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, "wb") as file:
            file.write(content)
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    put_in_place(content, path)
    return sha256


@contextmanager
def atomic_write(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that replaces `path` once it is completely written. After an error, `path` is unchanged.

    Its folder must exist. The mode is "w" for text in UTF-8, or "wb" for bytes.

    Raises:
        OSError: the folder is not writable, or the disk is full.
    """
    partial = new_partial(path)
    try:
        with partial.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        put_in_place(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # the error of a full disk names no file
            error.filename = str(path)
        raise


def remove_partials(folder: Path) -> None:
    """Remove the partial files of our killed writers in a folder and its subfolders. No process may be writing there."""
    for partial in folder.rglob(f".*{PARTIAL}"):
        if _OWN_PARTIAL.fullmatch(partial.name):
            partial.unlink(missing_ok=True)


def json_lines(file: Path | IO[bytes]) -> list[Any]:
    """Return the values in a file of JSON lines.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is not JSON lines.
    """
    if isinstance(file, Path):
        content = file.read_bytes()
    else:
        file.seek(0)
        content = file.read()
    lines = content.splitlines()  # split bytes: str.splitlines also splits at characters that JSON allows in strings
    values: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")  # one call per line takes three times as long
    if len(values) != len(lines):
        raise ValueError("a line has several values")
    return values


def writable(folder: Path) -> Path:
    """Return the folder for results that a user named. A missing folder is created.

    Raises:
        UserError: the path is not a folder, or the folder can't be created or is read-only.
    """
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise UserError(f"{folder}: not a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except ValueError as error:  # a null byte
        raise UserError(f"{str(folder)!r}: no name of a folder ({error})") from error
    except OSError as error:
        raise UserError(f"{folder}: can't be created ({error.strerror})") from error
    try:
        with tempfile.TemporaryFile(dir=folder):  # permissions are not enough: root has all, even on a read-only disk
            pass
    except OSError as error:
        raise UserError(f"{folder}: can't be written to ({error.strerror})") from error
    return folder


def read_utf8(path: Path) -> str:
    """Return the text of a file, with "\\n" for every line end and without a byte-order mark.

    Raises:
        UserError: the file is not UTF-8; the message has the offset of the first wrong byte, counted from 0.
        OSError: the file can't be read.
    """
    content = path.read_bytes()
    for mark, name in _MARKS:
        if content.startswith(mark):
            raise UserError(f"{path}: begins with the byte-order mark of {name}, expected UTF-8: save it as UTF-8")
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, content, error.start) from None
    if "\0" in text:  # UTF-16 without a mark, or a binary file
        raise _not_utf8(path, content, content.index(0))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _not_utf8(path: Path, content: bytes, offset: int) -> UserError:
    return UserError(f"{path}: not text in UTF-8: byte 0x{content[offset]:02x} at offset {offset:,}; save it as UTF-8")


class HeldError(Exception):
    """Another process holds a lock. The message names the process and a remedy if it has ended; empty if it is unknown."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file. On a file system without locks, a file with the owner's host and process id is the lock.

    Raises:
        HeldError: another process holds the lock.
        OSError: the folder can't be written to.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise HeldError from None
    except NotImplementedError:
        locks = False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        locks = False
    else:
        locks = True
    owner = path.with_name(path.name + OWNER_SUFFIX)
    if not locks:
        _create(owner)
    try:
        yield
    finally:
        if locks:
            lock.release()
        else:
            owner.unlink(missing_ok=True)


def _create(owner: Path) -> None:
    """Create the file that serves as the lock. The file of a process that has ended on this host is replaced.

    Raises:
        HeldError: the file exists, and its process may be running.
        OSError: the file can't be created.
    """
    line = f"{socket.gethostname()} {os.getpid()}\n"
    for _ in range(2):
        try:
            file = os.open(owner, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            host, _, process = owner.read_text(encoding="utf-8", errors="replace").strip().partition(" ")
            if host != socket.gethostname() or not process.isdecimal() or _is_running(int(process)):
                raise HeldError(f"{host or '?'}, process {process or '?'}; if that has ended, delete {owner}") from None
            owner.unlink(missing_ok=True)
            continue
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            stream.write(line)
        return
    raise HeldError


def _is_running(process: int) -> bool:
    """Whether this host has a process with this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; no such id
        return True
    return True
