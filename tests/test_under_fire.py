"""Kills, races, locks, full disks, a wrong clock: a clear message, and nothing finished is lost."""

import datetime
import errno
import os
import resource
import signal
import socket
import subprocess
import sys

import pytest
from factories import record
from fire import APART, MUST_NOT_BE, SUITE, fire
from helpers import bench, bench_in, bench_process

from kvbench.harness.core.errors import UserError
from kvbench.harness.core.files import OWNER_SUFFIX
from kvbench.harness.records import LOCK, RecordStore, from_the_future, newest
from kvbench.harness.report.verify import problems

pytestmark = pytest.mark.slow("processes of bench")

NOW = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "fire.yaml"
    path.write_text(SUITE.replace("[8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]", "[8, 9]").replace("[8, 12, 16, 20]", "8"))
    return path


def test_killed_at_random_moments_nothing_finished_is_lost():
    """The full experiment: `python tests/fire.py --kills 100`."""
    seen = fire(5, most=1.0)
    assert seen["kills"] == 5
    assert not any(seen[name] for name in MUST_NOT_BE), seen


def test_two_runs_of_a_suite_into_one_folder_do_not_race(tmp_path, suite):
    store = RecordStore(tmp_path / "results")
    with store.locked("fire"):
        done = bench_process("run", suite, "--results", "results", cwd=tmp_path)
        assert done.returncode == 2
        assert "another run is measuring suite fire" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        with store.locked("another suite"):
            pass
    assert bench_in("run", suite, "--results", "results", "--threads", 1, cwd=tmp_path).returncode == 0
    assert len(store.read_all()[0]) == 3
    assert (tmp_path / "results" / "fire" / LOCK).exists(), "left where it is: taking it away would race"


@pytest.mark.parametrize("room", [500, 2000])
def test_without_room_a_line_says_so_and_what_is_finished_stays(tmp_path, suite, room):
    """A limit on file sizes fails like a full disk: at the token ids or at the trace."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))  # noqa: E731
    text = suite.read_text().replace("tokens: 300", "tokens: 450" if room == 2000 else "tokens: 300")
    suite.write_text(text)
    done = bench_process("run", suite, "--results", "results", "--threads", 1, cwd=tmp_path, preexec_fn=limit)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "finished cells are kept" in done.stderr.splitlines()[-1]
    records, unreadable = RecordStore(tmp_path / "results").read_all()
    assert not unreadable
    assert all(problems(r, RecordStore(tmp_path / "results").path(r).parent) == [] for r in records)
    assert bench_in("run", suite, "--results", "results", "--threads", 1, cwd=tmp_path).returncode == 0
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_folder_is_told(tmp_path, suite):
    (tmp_path / "results").mkdir(mode=0o555)
    done = bench_in("run", suite, "--results", "results", cwd=tmp_path)
    assert done.returncode == 2
    assert "can't be written" in done.stderr.splitlines()[-1]


def test_a_clock_that_goes_backwards_does_not_hide_the_newer_record(tmp_path):
    store, old, new = RecordStore(tmp_path), record(key="a" * 64), record(key="b" * 64)
    old.finished = store.stamp(old, NOW)
    store.write(old)
    new.finished = store.stamp(new, NOW - datetime.timedelta(hours=3))
    store.write(new)
    assert newest(store.read_all()[0]) == [new]
    assert store.stamp(record(key="c" * 64), NOW + datetime.timedelta(days=1)) == "2026-01-02T12:00:00+00:00"


def test_subprocesses_end_with_a_run_that_is_killed():
    """Subprocesses of memory cells end after any signal, and so do cells that are measured together."""
    seen = fire(3, suite=APART, signals=(signal.SIGKILL, signal.SIGTERM, signal.SIGINT), in_subprocesses=True)
    assert seen["subprocesses when killed"] > 0
    assert not any(seen[name] for name in MUST_NOT_BE), seen


def test_a_record_from_the_future_is_told_before_anything_is_measured(tmp_path, suite):
    store, ahead = RecordStore(tmp_path), record(status="failed", error={"kind": "E", "message": ""}, metrics={})
    ahead.finished = "2031-01-01T00:00:00+00:00"
    store.write(ahead)
    with pytest.raises(UserError, match="is this machine.s clock right"):
        store.stamp(record(key="b" * 64), NOW)
    assert from_the_future([ahead, record()], NOW) == [ahead]
    done = bench_in("leaderboard", "--results", tmp_path, "--out", "-", cwd=tmp_path)
    assert done.returncode == 0
    assert "1 records have a time in the future" in done.stderr


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EIO])
def test_without_file_locks_a_second_run_is_kept_out_and_a_later_one_is_not(number, tmp_path, monkeypatch):
    """The lock of a process that ended on this host is taken over."""

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    store, owner, host = RecordStore(tmp_path), tmp_path / "smoke" / (LOCK + OWNER_SUFFIX), socket.gethostname()
    owner.parent.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for before in (None, f"{host} {ended.pid}\n"):
        if before:
            owner.write_text(before)
        with store.locked("smoke"), store.locked("another"):
            assert owner.read_text() == f"{host} {os.getpid()}\n"
            with pytest.raises(UserError, match=f"another run .*process {os.getpid()}"), store.locked("smoke"):
                pass
        assert not owner.exists()
    owner.write_text(f"elsewhere {ended.pid}\n")
    with pytest.raises(UserError, match="elsewhere, process .* delete .*owner"), store.locked("smoke"):
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
