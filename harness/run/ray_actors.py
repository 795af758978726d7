"""The actors of a run on Ray.

Ray sends these classes by value, so that a worker can say that it has no KV Bench, or another one.
"""

from __future__ import annotations

from typing import Any


def about_here() -> dict[str, str]:
    """What a worker must have in common with the run's own process, and where it is."""
    about: dict[str, str] = _about()()
    return about


def _about() -> Any:
    def about() -> dict[str, str]:
        import hashlib
        import importlib.util
        import socket
        from importlib.metadata import PackageNotFoundError, version
        from pathlib import Path

        facts = {"host": socket.gethostname()}
        spec = importlib.util.find_spec("kvbench")
        if spec is None or spec.origin is None:
            return facts
        import kvbench

        root = Path(spec.origin).parent
        digest = hashlib.sha256()
        for package in ("policies", "harness"):
            for file in sorted((root / package).resolve().rglob("*.py"), key=str):
                digest.update(file.name.encode() + file.read_bytes())
        facts |= {"kv-bench": kvbench.__version__, "kv-bench's code": digest.hexdigest()[:12]}
        for package in ("torch", "transformers"):
            try:
                facts[package] = version(package)
            except PackageNotFoundError:
                facts[package] = ""
        return facts

    return about


def worker_class(ray: Any) -> Any:
    """The class of a worker."""
    about_worker = _about()

    class Remote:
        """A worker. Its answers to all but `measure` are a value, or a mistake in words."""

        def __init__(self, name: str, board: Any) -> None:
            self._name, self._board = name, board
            self._worker: Any = None
            self._scratch = ""

        def about(self) -> dict[str, str]:
            facts: dict[str, str] = about_worker()
            return facts | {"node": ray.get_runtime_context().get_node_id()}

        def machine(self, device: str, threads: int) -> Any:
            from dataclasses import asdict

            from kvbench.harness.core.errors import UserError
            from kvbench.harness.run.worker import machine_here

            try:
                return asdict(machine_here(device, threads))
            except UserError as error:
                return str(error)

        def open(self, order: str, texts: list[Any]) -> str:
            import tempfile
            from pathlib import Path

            from kvbench.harness.core.errors import UserError
            from kvbench.harness.run.messages import RunOrder
            from kvbench.harness.run.worker import Worker

            try:
                self._scratch = tempfile.mkdtemp(prefix="kv-bench-")
                read = RunOrder.from_json(order)
                self._worker = Worker(read, lambda number: ray.get(texts[number]), self._report, Path(self._scratch))
            except UserError as error:
                return str(error)
            return ""

        def check(self, numbers: list[int]) -> Any:
            return self._worker.check(numbers)

        def measure(self, numbers: list[int], references: list[Any]) -> Any:
            return self._worker.measure(numbers, references).to_json()

        def close(self) -> None:
            import shutil

            shutil.rmtree(self._scratch, ignore_errors=True)

        def _report(self, tokens: int, text: str) -> None:
            self._board.put.remote(self._name, tokens, text)

    return ray.remote(Remote)


def board_class(ray: Any) -> Any:
    """The class of the board that workers report their progress to."""

    class Board:
        """Holds the latest progress of every worker."""

        def __init__(self) -> None:
            self._latest: dict[str, tuple[int, str]] = {}

        def put(self, name: str, tokens: int, text: str) -> None:
            self._latest[name] = (tokens, text)

        def read(self) -> dict[str, tuple[int, str]]:
            latest, self._latest = self._latest, {}
            return latest

    return ray.remote(Board)
