"""Start Ray on this machine or connect to a cluster, and compute the number of workers that find room."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvbench.harness.core.device import cores
from kvbench.harness.core.errors import UserError, first_line
from kvbench.harness.suite import Resources

LOCAL = "local"  # address that starts Ray on this machine
CONNECT_S = 5.0
SILENT_S = 10.0  # maximum silence of Ray's control service; after 60 s, Ray ends this process
OBJECT_STORE_BYTES = 2**29  # holds texts, and a trace for each worker
# Environment variables that are set to 0, unless they have a value.
_SETTINGS = ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_worker_niceness")


class Cluster:
    """Machines that Ray manages.

    Attributes:
        gpus: number of GPUs of all machines.
    """

    def __init__(self, ray: Any, address: str) -> None:
        """Describe the cluster to which this process is connected."""
        self.ray, self._name = ray, "this machine" if address == LOCAL else address
        self._machines: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.gpus = sum(machine.get("GPU", 0.0) for machine in self._machines)
        self._service: str = ray.get_runtime_context().gcs_address  # host and port of Ray's control service
        self._answered = time.monotonic()

    def answers(self) -> bool:
        """Return whether Ray's control service accepts connections. Without the service, no worker can start or end."""
        return not _silence(self._service)

    def refuse_silence(self) -> None:
        """Raise an error if Ray's control service has ended, before Ray ends this process with its own exit code.

        Raises:
            UserError: the service has not answered for `SILENT_S`.
        """
        if self.answers():
            self._answered = time.monotonic()
        elif time.monotonic() - self._answered > SILENT_S:
            raise UserError(f"Ray's control service at {self._service} has ended; finished cells are kept")

    def number_of_workers(self, requested: int | None, need: Mapping[str, float], cells: int) -> int:
        """Return the number of workers to start: `requested`, or else as many as find room, but at most one per cell.

        Raises:
            UserError: a worker finds no room. The message names the first such worker.
        """
        wanted = requested or 1
        places = sum(_room(machine, need) for machine in self._machines)
        if places < wanted:
            total = {name: sum(machine.get(name, 0.0) for machine in self._machines) for name in need}
            has = f"{len(self._machines)} machine{'s' if len(self._machines) != 1 else ''} with {_words(total) or 'nothing'}"
            raise UserError(
                f"worker-{places + 1} of {wanted}: no room: a worker takes {_words(need)}, and {self._name} has {has}"
            )
        return min(requested or places, cells)


@contextlib.contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """Start Ray here, or connect to a cluster. If this function starts Ray, Ray ends with the context.

    Raises:
        UserError: Ray is not installed, or there is no cluster at the address.
    """
    for name in _SETTINGS:
        os.environ.setdefault(name, "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UserError("--ray: Ray is not installed: pip install 'kv-bench[ray]'") from error
    if ray.is_initialized():
        yield Cluster(ray, address)
        return
    try:
        _connect(ray, address)
        yield Cluster(ray, address)
    finally:
        ray.shutdown()


def needs(resources: Resources, device: str, threads: int, cluster_gpus: float) -> dict[str, float]:
    """Return the Ray resources that one worker reserves.

    device, threads: options of the command line.

    Raises:
        UserError: the device is not cpu, cuda or auto, or it is cuda, but the suite requests no GPUs.
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


def _room(machine: Mapping[str, float], need: Mapping[str, float]) -> int:
    return min(math.floor(machine.get(name, 0.0) / amount + 1e-9) for name, amount in need.items())


def _words(amounts: Mapping[str, float]) -> str:
    units = {"CPU": (1, "cores"), "GPU": (1, "GPUs"), "memory": (2**30, "GiB")}
    return ", ".join(f"{round(amount / units[name][0], 1):g} {units[name][1]}" for name, amount in amounts.items())


def _connect(ray: Any, address: str) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    with contextlib.suppress(ImportError):  # it writes about dead workers to stdout, which is for records
        from ray._private import worker

        worker.print_to_stdstream = _ignore
    if address == LOCAL:
        ray.init(LOCAL, num_cpus=cores(), include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        return
    if "://" in address:
        raise UserError(f"--ray {address}: run bench on a machine of the cluster, and give HOST:PORT or auto")
    why = "" if address == "auto" else _silence(address)  # Ray would try for a minute, and then end this process
    try:
        if not why:
            ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        why = first_line(error) or type(error).__name__
        why += "; a cluster that asks for a token (Ray's default) needs RAY_AUTH_MODE=token here, too"
    if why:
        raise UserError(f"--ray {address}: no cluster for worker-1: {why}")


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _silence(address: str) -> str:
    """Return the reason that no service answers at an address; empty if a service answers."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return "expected HOST:PORT, or auto"
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
