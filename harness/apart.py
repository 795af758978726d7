"""One cell in a process of its own: what a process's peak memory says is then about that cell alone.

The request goes in as JSON on stdin; progress, and at the end the figures, come back as lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import UserError


class ApartError(RuntimeError):
    """What a cell died of in its process. The first argument is the kind, the second the message."""


def measure(request: dict[str, Any], progress: Callable[[int, str], None]) -> dict[str, Any]:
    """Run a cell in a fresh process.

    Args:
        request: `directory`, `random`, `dtype`, `rope_length`, `pickle`: the model; `task` with its `name`; `data`;
            `policy`, `parameters`, `capacity`, `positions`, `limit`, `seed`; `block`, `walk`, `threads`, `trace`.
        progress: as in `Job`.

    Returns:
        {"metrics", "model"}: the figures, and the model's facts.

    Raises:
        UserError: of the child's; its model can't be driven, say.
        ApartError: what it died of.
        MemoryError: it was killed, as the system does with a process that takes too much memory.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "harness.apart"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:  # fmt: skip
        assert child.stdin
        assert child.stdout
        with contextlib.suppress(BrokenPipeError), child.stdin:  # a child that died at once is told of below
            json.dump(request, child.stdin)
        answer: dict[str, Any] = {}
        for line in child.stdout:
            said = json.loads(line)
            if "progress" in said:
                progress(*said["progress"])
            else:
                answer = said
    if "error" in answer and answer["error"][0] == UserError.__name__:
        raise UserError(answer["error"][1])
    if "error" in answer:
        raise ApartError(*answer["error"])
    if child.returncode < 0:
        raise MemoryError(f"its process was killed by signal {-child.returncode}")
    if "metrics" not in answer:
        raise ApartError("ProcessError", f"its process ended with exit code {child.returncode} and said nothing")
    return answer


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """The child's side."""
    import torch

    from harness import registry
    from harness.engine.decoder import CacheConfig
    from harness.engine.load import load_model, load_tokenizer
    from harness.tasks.task import Job

    torch.set_num_threads(request["threads"])
    directory = Path(request["directory"])
    task = registry.task_class(request["task"]["name"])
    options = task.options(**request["task"])
    policy = registry.policy_class(request["policy"])(**request["parameters"])
    config = CacheConfig(policy, request["capacity"], request["positions"], request["limit"], request["seed"])
    data = task.data(options, lambda: load_tokenizer(directory), Path(request["data"]) if request["data"] else None)
    model = load_model(
        directory, request["dtype"], torch.device("cpu"), request["rope_length"], request["pickle"], random=request["random"]
    )
    job = Job(
        model, config, data, request["block"], request["walk"], Path(request["trace"]),
        lambda tokens, text: _say({"progress": [tokens, text]}),
    )  # fmt: skip
    return {"metrics": task.run(options, job), "model": model.facts()}


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), file=sys.__stdout__, flush=True)


def _main() -> None:
    """The child."""
    request = json.load(sys.stdin)
    sys.stdout = sys.stderr  # whatever a library prints is no line of ours
    try:
        _say(_answer(request))
    except Exception as error:  # the parent tells of it
        lines = str(error).strip().splitlines() or [""]
        _say({"error": [type(error).__name__, lines[0][:300]]})
    except KeyboardInterrupt:  # the parent was stopped too, and says so
        sys.exit(130)


if __name__ == "__main__":
    _main()
