"""Runs keep each other out of a folder, whatever its file system can do; and its errors are one line."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest
from conftest import bench

from kvbench.harness.cli.terminal import link
from kvbench.harness.core.errors import UserError
from kvbench.harness.core.locks import OWNER_SUFFIX
from kvbench.harness.records import RecordStore
from kvbench.harness.records.store import LOCK

UNSUPPORTED = [errno.ENOLCK, errno.ENOTSUP, errno.EIO]


@pytest.fixture(params=UNSUPPORTED, ids=[errno.errorcode[e] for e in UNSUPPORTED])
def no_locks(request, monkeypatch):
    def flock(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr("fcntl.flock", flock)


def test_without_file_locks_a_second_run_is_kept_out_and_a_later_one_is_not(no_locks, tmp_path):
    store, owner = RecordStore(tmp_path), tmp_path / "smoke" / (LOCK + OWNER_SUFFIX)
    for _ in range(2):
        with store.locked("smoke"):
            assert owner.read_text() == f"{socket.gethostname()} {os.getpid()}\n"
            with pytest.raises(UserError, match=f"another run .*process {os.getpid()}"), store.locked("smoke"):
                pass
            with store.locked("another"):
                pass
        assert not owner.exists()


def test_the_lock_of_a_process_that_ended_here_is_taken_over_and_that_of_another_host_is_not(no_locks, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner = tmp_path / "smoke" / (LOCK + OWNER_SUFFIX)
    owner.parent.mkdir()
    owner.write_text(f"{socket.gethostname()} {ended.pid}\n")
    with RecordStore(tmp_path).locked("smoke"):
        assert owner.read_text().split()[1] == str(os.getpid())
    owner.write_text(f"elsewhere {ended.pid}\n")
    with pytest.raises(UserError, match="elsewhere, process .* delete .*owner"), RecordStore(tmp_path).locked("smoke"):
        pass


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        PermissionError(errno.EACCES, "Denied", "a\nb"),
        TimeoutError("timed out"),
        OSError(),
    ],
)
def test_an_error_of_the_users_disk_or_network_is_one_line(error, tmp_path, monkeypatch, capsys):
    def acquire(*_, **__):
        raise error

    monkeypatch.setattr("kvbench.harness.records.store.RecordStore.files", acquire)
    code, _, err = bench(capsys, "records", "verify", str(tmp_path))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "Traceback" not in err
    assert (error.strerror or str(error) or "OSError") in err


def test_a_dumb_terminal_gets_no_links(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    assert link(tmp_path, True).startswith("\x1b]8;;file://")
    monkeypatch.setenv("TERM", "dumb")
    assert link(tmp_path, True) == str(tmp_path)
