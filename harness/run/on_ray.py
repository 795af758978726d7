"""Measures the groups of a run with workers on Ray: on this machine, or on a cluster. The only file that imports Ray.

The process that started the run schedules, writes every record, and shows progress. A worker is an actor; it is never restarted:
if it dies, another one is started in its place, and its group is measured again.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psutil

from kvbench.harness.core.device import cores
from kvbench.harness.core.errors import UserError, first_line
from kvbench.harness.run.executor import Group, Ledger
from kvbench.harness.run.fleet import Fleet
from kvbench.harness.run.messages import pack
from kvbench.harness.run.options import RunOptions
from kvbench.harness.run.prepare import MachineFacts
from kvbench.harness.run.ray_loop import Loop, works
from kvbench.harness.suite import Cell, Resources

LOCAL = "local"  # the address that means: start Ray on this machine
CONNECT_S = 5.0
OBJECT_STORE_BYTES = 2**29  # holds the texts, and a trace a worker
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_GUARD = """
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


@dataclass(frozen=True)
class RaySettings:
    """Settings of a run on Ray.

    Attributes:
        address: of a cluster: HOST:PORT, or auto; "local" starts Ray on this machine.
        workers: how many; as many as find room when None.
        threads: CPU threads of each.
        device: auto, cpu or cuda.
    """

    address: str = LOCAL
    workers: int | None = None
    threads: int = 1
    device: str = "auto"


class RayExecutor:
    """An `Executor` whose workers are Ray actors. They live as long as its context, and so does a Ray that it started."""

    def __init__(self, settings: RaySettings, options: RunOptions, cells: Sequence[Cell]) -> None:
        """Set up a run on Ray, without starting anything.

        The suite of the cells says what a worker needs. The device is each worker's own.

        Raises:
            UserError: Ray is not installed.
        """
        self._settings, self._options, self._cells = settings, options, cells
        self._ray = _import_ray()
        self._fleet: Fleet | None = None
        self._owns_ray = False
        self._guard: _Guard | None = None
        self._device = "cpu"

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    @property
    def machine(self) -> MachineFacts:
        """Device and threads of the first worker, and the least free memory of any."""
        assert self._fleet is not None
        machines = [worker.machine for worker in self._fleet.workers.values()]
        return MachineFacts(machines[0].device, machines[0].threads, min(machine.free_bytes for machine in machines))

    def measure(self, groups: Sequence[Group], cells: Sequence[Cell], ledger: Ledger) -> None:
        """See `Executor`.

        Raises:
            UserError: a worker lacks a model or data, or finds a mistake, or no worker is left. It names the worker.
        """
        assert self._fleet is not None
        numbers = {cell.id: number for number, cell in enumerate(cells)}
        prepared = {item.cell.id: item for group in groups for item in group}
        order, texts = pack(cells, prepared, self._options, self._device, self._settings.threads)
        self._fleet.give(order.to_json(), texts)
        kinds = {(i.cell.model.model_dump_json(), i.facts["policy_sha256"], id(i.data)): i.cell.id for i in prepared.values()}
        self._fleet.check([numbers[cell] for cell in kinds.values()])
        Loop(self._fleet, works(groups, self.machine.device), groups, numbers, ledger).run()

    def _open(self) -> None:
        """Connect, start the workers, and see that they can do what will be asked.

        Raises:
            UserError: there is no such cluster, no room in it, or a worker has other code.
        """
        ray, settings = self._ray, self._settings
        if not ray.is_initialized():
            others = _descendants()
            _connect(ray, settings.address)
            self._owns_ray = True
            self._guard = _Guard(others) if settings.address == LOCAL else None
        cluster = "this machine" if settings.address == LOCAL else settings.address
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = sum(machine.get("GPU", 0.0) for machine in machines)
        need = needs(self._cells[0].resources, settings.device, settings.threads, gpus)
        count = number_of_workers(settings.workers, machines, need, len(self._cells), cluster)
        self._device = "cuda" if "GPU" in need else "cpu"
        self._fleet = Fleet(ray, need, self._device, settings.threads)
        self._fleet.meet([self._fleet.start() for _ in range(count)])

    def _close(self) -> None:
        if self._fleet is not None:
            self._fleet.stop()
        if self._owns_ray:
            self._ray.shutdown()
        if self._guard is not None:
            self._guard.end()


def needs(resources: Resources, device: str, threads: int, cluster_gpus: float) -> dict[str, float]:
    """Return the Ray resources that one worker reserves.

    `device` and `threads` are options of the command line.

    Raises:
        UserError: another device than cpu, cuda or auto, or a suite that needs GPUs is to run on CPUs.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device}: with --ray, each worker gets its own devices: give auto, cpu or cuda")
    gpus = resources.gpus
    if gpus is None:
        gpus = 1.0 if device == "cuda" or (device == "auto" and cluster_gpus) else 0.0
    if device == "cuda" and not gpus:
        raise UserError("--device cuda: the suite's resources say gpus: 0")
    gpus = 0.0 if device == "cpu" else gpus
    need = {"CPU": float(resources.cpus or threads), "GPU": gpus, "memory": float(resources.memory or 0)}
    return {name: amount for name, amount in need.items() if amount}


def room(machine: Mapping[str, float], need: Mapping[str, float]) -> int:
    """How many workers a machine has room for."""
    return min((math.floor(machine.get(name, 0.0) / amount + 1e-9) for name, amount in need.items()), default=0)


def number_of_workers(
    requested: int | None, machines: Sequence[Mapping[str, float]], need: Mapping[str, float], cells: int, cluster: str
) -> int:
    """How many workers to start: as many as were asked for, else as many as find room, but not more than there are cells.

    `cluster` names the cluster in messages.

    Raises:
        UserError: names the first worker that finds no room.
    """
    places = sum(room(machine, need) for machine in machines)
    wanted = max(requested or 1, 1)
    if places < wanted:
        has = f"{len(machines)} machine{'s' if len(machines) != 1 else ''} with {_words(_total(machines, need)) or 'nothing'}"
        raise UserError(f"worker-{places + 1} of {wanted}: no room: a worker takes {_words(need)}, and {cluster} has {has}")
    return min(requested or places, cells)


def _total(machines: Sequence[Mapping[str, float]], need: Mapping[str, float]) -> dict[str, float]:
    return {name: sum(machine.get(name, 0.0) for machine in machines) for name in need}


def _words(amounts: Mapping[str, float]) -> str:
    units = {"CPU": "cores", "GPU": "GPUs"}
    parts = [f"{amount:g} {units[name]}" for name, amount in amounts.items() if name in units]
    parts += [f"{amounts['memory'] / 2**30:,.1f} GiB"] if "memory" in amounts else []
    return ", ".join(parts)


def _import_ray() -> Any:
    """Import Ray.

    Raises:
        UserError: it is not installed.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UserError("--ray: Ray is not installed: pip install 'kv-bench[ray]'") from error
    return ray


def _connect(ray: Any, address: str) -> None:
    """Start Ray here, or connect to a cluster.

    Raises:
        UserError: no cluster is there.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    with contextlib.suppress(ImportError):  # it writes about dead workers to stdout, which is for records
        from ray._private import worker

        worker.print_to_stdstream = _ignore
    if address == LOCAL:
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default everything else on the machine goes first
        ray.init(LOCAL, num_cpus=cores(), include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        return
    if "://" in address:
        raise UserError(f"--ray {address}: run bench on a machine of the cluster, and give HOST:PORT or auto")
    if address != "auto":
        _refuse_silence(address)
    try:
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, AssertionError, TimeoutError) as error:
        why = first_line(error) or type(error).__name__
        why += "; a cluster that asks for a token (Ray's default) needs RAY_AUTH_MODE=token here, too"
        raise UserError(f"--ray {address}: no cluster for worker-1: {why}") from error


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _refuse_silence(address: str) -> None:
    """Refuse an address where nothing answers; Ray would try for a minute, and then end this process.

    Raises:
        UserError: it is one.
    """
    host, colon, port = address.rpartition(":")
    try:
        if not colon:
            raise ValueError("expected HOST:PORT, or auto")
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--ray {address}: no cluster for worker-1: {why}") from error


def _descendants() -> list[psutil.Process]:
    """The processes that this one has started, and those that they have started."""
    return psutil.Process().children(recursive=True)


class _Guard:
    """A process that ends processes once this one has ended, even if it was killed.

    Ray ends its workers then, but its helpers go on for a minute, because they wait for a server that is gone.
    """

    def __init__(self, others: Sequence[psutil.Process]) -> None:
        """Make all processes that this one has started end with it, except `others`."""
        pids = [str(process.pid) for process in _descendants() if process not in others]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _GUARD, *pids], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout
        self._process.stdout.readline()  # it knows them

    def end(self) -> None:
        """End the processes now, and the guard itself."""
        self._process.communicate()
