"""A process that follows the leader of its team; see `tensor.py`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Follow until the leader ends. A leader that is killed leaves the connection broken, which ends this process too."""
    from kvbench.harness.core.errors import UserError
    from kvbench.harness.models.tensor import follow

    try:
        follow()
    except (RuntimeError, EOFError, UserError) as error:
        print(f"parallel: tensor: process {os.environ.get('LOCAL_RANK')} ends ({str(error).splitlines()[0]})", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # the leader is gone, and a process group without it can't be closed
