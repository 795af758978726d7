"""Stages that share a time: what each came to is kept in a file, so that another call goes on where one stopped."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

OK, OUT_OF_TIME, CUT_OFF, NOT_BEGUN, OK_BEFORE = "ok", "out of time", "cut off", "not begun", "ok before"
BEGUN = "killed"  # its call ended without a word, perhaps because of it; the state of every stage that runs

Execute = Callable[["Stage", float], int | None]


@dataclass(frozen=True)
class Stage:
    """One command.

    Attributes:
        name: shown, and the key of what it came to.
        cap: seconds that it may take.
        command: arguments of Python. They name no folder, so that another call finds the stage unchanged elsewhere.
        least: seconds with which it is worth beginning; with fewer it is left to the next call.
    """

    name: str
    cap: float
    command: list[str]
    least: float = 1.0

    @property
    def log(self) -> str:
        """Name of the file of what it prints."""
        return re.sub(r"\W+", "-", self.name.lower()) + ".log"


@dataclass(frozen=True)
class Outcome:
    """What a stage came to.

    Attributes:
        stage: its name.
        state: "ok", "exit code N", "out of time" (it took longer than its cap), "cut off" (the time of all stages was over),
            "killed" (the call ended while it ran, and wrote nothing more), "not begun", or "ok before" (in an earlier call).
        seconds: that it took.
        cap: seconds that it might take.
    """

    stage: str
    state: str
    seconds: float
    cap: float

    @property
    def good(self) -> bool:
        """Whether it ended well, now or before."""
        return self.state in (OK, OK_BEFORE)

    def line(self) -> str:
        """The outcome in one line."""
        return f"{self.state:<14} {self.seconds:6.1f} s of {self.cap:3.0f} s  {self.stage}"


class State:
    """What stages came to in earlier calls, as far as it still holds.

    Attributes:
        outcomes: by name.
    """

    def __init__(self, path: Path | None, key: Mapping[str, str]) -> None:
        """Read a state.

        Args:
            path: of the file, which need not exist; None if nothing is to be kept.
            key: what the outcomes depend on. A state with another key is dropped.
        """
        self._path, self._key = path, dict(key)
        self._commands: dict[str, list[str]] = {}
        self.outcomes: dict[str, Outcome] = {}
        try:
            kept = json.loads(path.read_text()) if path is not None else {}
        except (OSError, ValueError):  # there is none, or it isn't ours
            kept = {}
        if kept.get("key") == self._key:
            self._commands = kept["commands"]
            self.outcomes = {name: Outcome(**outcome) for name, outcome in kept["outcomes"].items()}

    def outcome(self, stage: Stage) -> Outcome | None:
        """What a stage came to; None if it never ran with this command."""
        return self.outcomes.get(stage.name) if self._commands.get(stage.name) == stage.command else None

    def keep(self, stage: Stage, outcome: Outcome) -> None:
        """Write what a stage came to; the file is replaced as a whole."""
        self.outcomes[stage.name] = outcome
        self._commands[stage.name] = stage.command
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f"{self._path.name}.partial")
        outcomes = {name: asdict(x) for name, x in self.outcomes.items()}
        partial.write_text(json.dumps({"key": self._key, "commands": self._commands, "outcomes": outcomes}, indent=1))
        os.replace(partial, self._path)


def run_all(
    stages: Sequence[Stage],
    end: float,
    ending: float,
    state: State,
    execute: Execute,
    again: bool = False,
    clock: Callable[[], float] = time.monotonic,
    save: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Run stages until all have ended or the time is over.

    Those that were not ended before by their own doing come first, then those that failed, ran out of time or were killed.

    Args:
        stages: in their order.
        end: time on the clock at which all must be over.
        ending: seconds that stopping a stage may take.
        state: of earlier calls; what every stage comes to is kept there at once.
        execute: runs a stage for at most some seconds. Returns its exit code; None if it was stopped.
        again: run stages that were ok, too.
        clock: in seconds.
        save: called before each stage, when the state says that it runs.

    Returns:
        What each came to, in the order of `stages`.
    """
    outcomes: dict[str, Outcome] = {}
    todo: list[tuple[bool, Stage]] = []
    for stage in stages:
        before = None if again else state.outcome(stage)
        if before is not None and before.good:
            outcomes[stage.name] = Outcome(stage.name, OK_BEFORE, before.seconds, stage.cap)
        else:
            todo.append((before is not None and before.state != CUT_OFF, stage))
    for _, stage in sorted(todo, key=lambda x: x[0]):
        if end - clock() - ending < stage.least:
            outcomes[stage.name] = Outcome(stage.name, NOT_BEGUN, 0.0, stage.cap)
            continue
        state.keep(stage, Outcome(stage.name, BEGUN, 0.0, stage.cap))
        started, result = clock(), CUT_OFF  # which it also is if this process is told to end
        try:
            save()
            left = end - clock() - ending
            print(f"== {stage.name} (at most {min(stage.cap, left):.0f} s; {left:.0f} s left for all)", flush=True)
            code = execute(stage, min(stage.cap, left))
            stopped = OUT_OF_TIME if stage.cap <= left else CUT_OFF
            result = stopped if code is None else OK if code == 0 else f"exit code {code}"
        finally:
            outcomes[stage.name] = Outcome(stage.name, result, round(clock() - started, 1), stage.cap)
            state.keep(stage, outcomes[stage.name])
    return [outcomes[stage.name] for stage in stages]
