"""Locks of a folder against other processes, also on file systems that can't lock files. Imports no torch."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO})  # raised by NFS, Lustre, FUSE
OWNER_SUFFIX = ".owner"  # suffix of the file that serves as the lock where files can't be locked


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
