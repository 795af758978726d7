"""Ends processes once this one has ended, even if it was killed.

Ray ends its workers then, but its helpers go on for a minute, because they wait for a server that is gone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import psutil

_CODE = """
import sys
import psutil
processes = []
for pid in sys.argv[1:]:
    try:
        processes.append(psutil.Process(int(pid)))
    except psutil.NoSuchProcess:
        pass
print(flush=True)
sys.stdin.read()  # ends when the other end is closed, or its process has ended
for process in processes:
    try:
        process.kill()  # not another process that has got its number since
    except psutil.NoSuchProcess:
        pass
"""


def descendants() -> list[psutil.Process]:
    """The processes that this one has started, and those that they have started."""
    return psutil.Process().children(recursive=True)


class Guard:
    """A process that watches this one."""

    def __init__(self, others: Sequence[psutil.Process]) -> None:
        """From now on, all processes that this one has started end with it, but not the others."""
        pids = [str(process.pid) for process in descendants() if process not in others]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, *pids], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout
        self._process.stdout.readline()  # it knows them

    def end(self) -> None:
        """End the processes now, and the guard itself."""
        self._process.communicate()
