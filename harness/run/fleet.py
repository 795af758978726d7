"""The workers of a run on Ray: started, compared with this process, told what will be asked, replaced when they die.

Ray sends the classes of the actors by value, so that a worker can say that it has no KV Bench, or another one.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbench.harness.core.errors import UserError, first_line
from kvbench.harness.run.prepare import MachineFacts
from kvbench.harness.run.schedule import Work

START_S = 120.0
ANSWER_S = 2.0
CLOSE_S = 1.0  # one that is measuring does not answer
_WHERE = ("host", "node")  # what differs between workers that are alike


class FleetWorker:
    """A worker as the run sees it.

    Attributes:
        name: for people.
        actor: its handle.
        about: its machine (`host`, and `node` in Ray's words) and the versions of its code; empty until it has started.
        machine: its device and threads.
        work: that it measures, or measured last.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor
        self.about: dict[str, str] = {}
        self.machine = MachineFacts("", 0, 0)
        self.work: Work | None = None

    @property
    def label(self) -> str:
        """Its name and machine, for messages."""
        return f"{self.name} on {self.about['host']}" if self.about else self.name


class Fleet:
    """The workers of a run.

    Attributes:
        ray: the package.
        workers: by name.
        board: actor that they report their progress to.
        service: host and port of Ray's control service.
    """

    def __init__(self, ray: Any, need: Mapping[str, float], device: str, threads: int) -> None:
        """Set up the fleet, without starting a worker.

        `need` is what one worker takes: CPU, GPU, memory in bytes; `device` and `threads` are those of every worker.
        """
        self.ray, self.workers = ray, dict[str, FleetWorker]()
        self._need, self._device, self._threads = need, device, threads
        self.service: str = ray.get_runtime_context().gcs_address
        self._started = 0
        self._kind = worker_class(ray)
        self.board = board_class(ray).options(num_cpus=0).remote()
        self._order: Any = None  # reference
        self._texts: list[Any] = []  # references, which live as long as these

    def start(self) -> FleetWorker:
        """Start a worker, without waiting for it."""
        self._started += 1
        name, need = f"worker-{self._started}", self._need
        options: dict[str, Any] = {"num_cpus": need.get("CPU", 0), "num_gpus": need.get("GPU", 0)}
        options |= {"memory": int(need["memory"])} if "memory" in need else {}
        kind = self._kind.options(max_restarts=0, scheduling_strategy="SPREAD", **options)
        self.workers[name] = FleetWorker(name, kind.remote(name, self.board))
        return self.workers[name]

    def meet(self, workers: Sequence[FleetWorker]) -> None:
        """Wait until workers have started, and compare their code with ours.

        Raises:
            UserError: names the first that does not start, whose code differs, or that lacks the device.
        """
        ours = about_here()
        answers = {worker.actor.about.remote(): worker for worker in workers}
        late = self.ray.wait(list(answers), num_returns=len(answers), timeout=START_S)[1]
        if late:
            raise UserError(f"{answers[late[0]].name}: not started after {START_S:.0f} s: is the cluster busy with other work?")
        for ref, worker in answers.items():
            worker.about = self._get(ref, worker)
            for name in (name for name in ours if name not in _WHERE):
                theirs = worker.about.get(name, "none")
                if theirs != ours[name]:
                    raise UserError(f"{worker.label}: {name} is {theirs}, here it is {ours[name]}: install the same on both")
        for ref, worker in [(w.actor.machine.remote(self._device, self._threads), w) for w in workers]:
            worker.machine = MachineFacts(**self._get(ref, worker))

    def brief(self, workers: Iterable[FleetWorker]) -> None:
        """Send the order of the run.

        Raises:
            UserError: a worker finds a mistake in it.
        """
        for ref, worker in [(w.actor.open.remote(self._order, self._texts), w) for w in workers]:
            self._get(ref, worker)

    def give(self, order: str, texts: Sequence[str]) -> None:
        """Put what all workers get into Ray's object store, once, and send it.

        Raises:
            UserError: a worker finds a mistake in it.
        """
        self._order, self._texts = self.ray.put(order), [self.ray.put(text) for text in texts]
        self.brief(self.workers.values())

    def check(self, cells: Sequence[int]) -> None:
        """Have one worker of each machine look for models, code and data: its disk is that of the others there.

        Raises:
            UserError: names the first that lacks something.
        """
        of_machine = {worker.about["node"]: worker for worker in reversed(self.workers.values())}
        for ref, worker in [(w.actor.check.remote(cells), w) for w in of_machine.values()]:
            self._get(ref, worker)

    def bury(self, worker: FleetWorker) -> None:
        """Forget a worker that has died."""
        self.workers.pop(worker.name, None)
        with contextlib.suppress(Exception):
            self.ray.kill(worker.actor)

    def answers(self) -> bool:
        """Whether Ray's control service accepts connections. Without it no worker can be started, ended or found."""
        host, _, port = self.service.rpartition(":")
        try:
            socket.create_connection((host, int(port)), ANSWER_S).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """End all workers, if Ray can still do that."""
        if not self.answers():
            return
        with contextlib.suppress(Exception):  # whatever is wrong with Ray, it is the end
            closing = [worker.actor.close.remote() for worker in self.workers.values()]
            self.ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
            for actor in (*(worker.actor for worker in self.workers.values()), self.board):
                self.ray.kill(actor)

    def _get(self, ref: Any, worker: FleetWorker) -> Any:
        """The answer of a worker that is not measuring.

        Raises:
            UserError: it died, or the answer is a mistake in words.
        """
        try:
            answer = self.ray.get(ref)
        except self.ray.exceptions.RayActorError as error:
            raise UserError(f"{worker.label}: died before anything was measured ({first_line(error)})") from error
        if isinstance(answer, str) and answer:
            raise UserError(f"{worker.label}: {answer}")
        return answer


def about_here() -> dict[str, str]:
    """Return facts about this process: those that workers must share with it, such as versions, and its location."""
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

            import torch

            from kvbench.harness.core.errors import UserError
            from kvbench.harness.models.load import device_of
            from kvbench.harness.run.prepare import MachineFacts

            torch.set_num_threads(threads)
            try:
                return asdict(MachineFacts.here(device_of(device)))
            except UserError as error:
                return str(error)

        def open(self, order: str, texts: list[Any]) -> str:
            import tempfile
            from functools import partial
            from pathlib import Path

            from kvbench.harness.core.errors import UserError
            from kvbench.harness.run.messages import RunOrder
            from kvbench.harness.run.worker import Worker

            try:
                self._scratch = tempfile.mkdtemp(prefix="kv-bench-")
                read, report = RunOrder.from_json(order), partial(self._board.put.remote, self._name)
                self._worker = Worker(read, lambda number: ray.get(texts[number]), report, Path(self._scratch))
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
