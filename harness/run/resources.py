"""How many workers find room on the machines of a cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvbench.harness.core.errors import UserError
from kvbench.harness.suite import Resources

Amounts = Mapping[str, float]  # CPU: cores, GPU: devices, memory: bytes


def needs(resources: Resources, device: str, threads: int, cluster_gpus: float) -> dict[str, float]:
    """What one worker takes.

    Args:
        resources: of the suite.
        device: that the command line asks for: auto, cpu or cuda.
        threads: of a worker.
        cluster_gpus: of all machines.

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


def room(machine: Amounts, need: Amounts) -> int:
    """How many workers a machine has room for."""
    return min((math.floor(machine.get(name, 0.0) / amount + 1e-9) for name, amount in need.items()), default=0)


def number_of_workers(asked: int | None, machines: Sequence[Amounts], need: Amounts, cells: int, where: str) -> int:
    """How many workers to start: as many as were asked for, else as many as find room, but not more than there are cells.

    Args:
        asked: --workers; None if not given.
        machines: what each has.
        need: of one worker.
        cells: to be measured.
        where: the cluster, for messages.

    Raises:
        UserError: names the first worker that finds no room.
    """
    places = sum(room(machine, need) for machine in machines)
    wanted = max(asked or 1, 1)
    if places < wanted:
        has = f"{len(machines)} machine{'s' if len(machines) != 1 else ''} with {_words(_total(machines, need)) or 'nothing'}"
        raise UserError(f"worker-{places + 1} of {wanted}: no room: a worker takes {_words(need)}, and {where} has {has}")
    return min(asked or places, cells)


def _total(machines: Sequence[Amounts], need: Amounts) -> dict[str, float]:
    return {name: sum(machine.get(name, 0.0) for machine in machines) for name in need}


def _words(amounts: Amounts) -> str:
    units = {"CPU": "cores", "GPU": "GPUs"}
    parts = [f"{amount:g} {units[name]}" for name, amount in amounts.items() if name in units]
    parts += [f"{amounts['memory'] / 2**30:,.1f} GiB"] if "memory" in amounts else []
    return ", ".join(parts)
