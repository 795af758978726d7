"""Tensor parallelism: one model in several processes, each with a part of every layer's heads.

The process that runs the tasks leads. It starts the others itself, or, under `torchrun`, finds them there. They load the model
when it does (transformers' tensor-parallel plan), and then do what it does with decoders (`engine/team.py`).
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not by name
from transformers import PreTrainedConfig

from kvbench.harness.core.errors import RefusedModelError, UserError
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.team import Order, Team, leave

_START, _WAIT = timedelta(minutes=5), timedelta(days=7)  # for all to be there; for the leader's next order
_FOLLOW = "from kvbench.harness.models.follow import main; main()"
_RANK, _SIZE, _PORT, _THREADS = "KVBENCH_RANK", "KVBENCH_SIZE", "KVBENCH_PORT", "KVBENCH_THREADS"


class Load(NamedTuple):
    """The leader's order to load a model: the arguments of `load.load_model`."""

    directory: Path
    dtype: str
    device: str
    rope_length: int | None
    allow_pickle: bool


class _Running:
    """The processes that this one leads."""

    def __init__(self, team: Team, others: list[subprocess.Popen[bytes]]) -> None:
        """team: with this process; others: that were started for it."""
        self.team, self._others = team, others

    def stop(self) -> None:
        """Have the other processes end."""
        if self.team.lost:
            for process in self._others:
                process.kill()
            return
        with suppress(RuntimeError):  # they are gone
            self.team.send(None)
        leave()
        for process in self._others:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


_RUNNING: list[_Running] = []  # one at most


def under_torchrun() -> bool:
    """Whether `torchrun` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def follows() -> bool:
    """Whether this process was started to follow another one."""
    return _RANK in os.environ or (under_torchrun() and os.environ["RANK"] != "0")


def refuse_split(config: PreTrainedConfig, name: str, size: int, device: torch.device, random: bool) -> None:
    """Refuse what can't be split over processes.

    Raises:
        UserError: the machine lacks devices, or the weights are random.
        RefusedModelError: the model's heads can't be divided, or transformers has no plan for its family.
    """
    text: Any = config.get_text_config()
    if device.type == "cuda" and ((device.index or 0) != 0 or torch.cuda.device_count() < size):
        present = torch.cuda.device_count()
        raise UserError(f"model.devices: {size}, but this machine has {present} CUDA devices, used from cuda:0 on")
    if device.type == "cpu" and torch.cuda.is_available():
        raise UserError("parallel: tensor runs on CUDA where there is a GPU: leave --device out")
    if random:
        raise UserError(f"{name}: random weights are not split over processes: use parallel: layers")
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if heads is None or not getattr(text, "base_model_tp_plan", None):
        raise RefusedModelError(f"{name}: transformers has no tensor-parallel plan for '{text.model_type}': use parallel: layers")
    if heads % size:
        raise RefusedModelError(f"{name}: its {heads} KV heads can't be shared by {size} processes: use parallel: layers")


def gather(size: int, device: torch.device) -> Team:
    """The team of this process; the same as before if it has as many processes.

    Raises:
        UserError: `torchrun` started another number of processes, or they don't answer.
    """
    if _RUNNING and (_RUNNING[0].team.size != size or _RUNNING[0].team.lost):
        _RUNNING.pop().stop()
    if not _RUNNING:
        _RUNNING.append(_started(size, device))
        atexit.register(_stop_all)
    return _RUNNING[0].team


def lead(size: int, device: torch.device, load: Load) -> Team:
    """The team of this process, all of which load a model now.

    Raises:
        UserError: as `gather`.
    """
    team = gather(size, device)
    team.send(load)
    return team


def _stop_all() -> None:
    while _RUNNING:
        _RUNNING.pop().stop()


def _started(size: int, device: torch.device) -> _Running:
    """Start the other processes, or find them."""
    if under_torchrun():
        given = int(os.environ["WORLD_SIZE"])
        if given != size:
            raise UserError(f"model.devices: {size}, but torchrun started {given} processes: give --nproc-per-node {size}")
        return _Running(join(device.type), [])
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes are here, so nobody else need reach them
    store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=_START)
    environment = os.environ | {_SIZE: str(size), _PORT: str(store.port), _THREADS: str(torch.get_num_threads())}
    own = [environment | {_RANK: str(rank), "LOCAL_RANK": str(rank)} for rank in range(1, size)]
    others = [  # in sessions of their own: Ctrl-C is for the leader, which then ends them
        subprocess.Popen([sys.executable, "-c", _FOLLOW], env=each, stdin=subprocess.DEVNULL, start_new_session=True)
        for each in own
    ]
    try:
        _await(store, others)
        return _Running(_joined(store, 0, size, device.type), others)
    except BaseException:
        for process in others:
            process.kill()
        raise


def _await(store: TCPStore, others: list[subprocess.Popen[bytes]]) -> None:
    """Wait until the others have started.

    Raises:
        UserError: one has ended, or it takes too long.
    """
    deadline = time.monotonic() + _START.total_seconds()
    while not all(store.check([_here(rank)]) for rank in range(1, len(others) + 1)):
        if any(process.poll() is not None for process in others) or time.monotonic() > deadline:
            raise UserError("parallel: tensor: the other processes did not start")
        time.sleep(0.05)


def _here(rank: int) -> str:
    """The key by which a process says that it has started."""
    return f"here {rank}"


def join(kind: str) -> Team:
    """Join the processes that belong to this one's team. kind: of the devices.

    Returns:
        The team, with this process in it.
    """
    if _RANK in os.environ:
        rank, size = int(os.environ[_RANK]), int(os.environ[_SIZE])
        torch.set_num_threads(int(os.environ[_THREADS]))
        store = TCPStore("127.0.0.1", int(os.environ[_PORT]), size, is_master=False, timeout=_START)
        store.set(_here(rank), "")
        return _joined(store, rank, size, kind)
    return _joined(None, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), kind)


def _joined(store: TCPStore | None, rank: int, size: int, kind: str) -> Team:
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if kind == "cuda" else "gloo"
    if store is None:
        dist.init_process_group(backend, timeout=_WAIT)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_WAIT)
    return Team(rank, size, dist.new_group(backend="gloo", timeout=_WAIT))


def split_options(size: int) -> dict[str, Any]:
    """Options of `from_pretrained` that give this process its part of a model."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size)}


def refuse_unsplit(model: Model, team: Team, name: str) -> None:
    """Refuse a model whose heads transformers' plan leaves whole.

    Raises:
        RefusedModelError: it does.
    """
    text: Any = model.hf.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if any(shape.heads * team.size != heads for shape in model.layers):
        raise RefusedModelError(f"{name}: transformers' plan does not split its {heads} KV heads: use parallel: layers")


def agree(team: Team, error: Exception | None) -> None:
    """Find out whether a model was loaded everywhere.

    Raises:
        Exception: this process's error, or the first of another's.
    """
    errors = team.everyone(None if error is None else str(error))
    if error is not None:
        raise error
    first = next((message for message in errors if message is not None), None)
    if first is not None:
        raise UserError(first)


def follow() -> None:
    """Do what the leader orders, until it ends."""
    from kvbench.harness.models.load import load_model

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    team = join(kind)
    decoders: dict[int, Any] = {}
    model: Model | None = None
    receive = partial(team.receive)
    while (order := receive()) is not None:
        if isinstance(order, Load):
            decoders.clear()
            model = None
            device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
            try:
                model = load_model(order.directory, order.dtype, device, order.rope_length, order.allow_pickle, team=team)
            except UserError:  # the leader reports it
                continue
        elif isinstance(order, Order) and model is not None:
            team.follow(order, model, decoders)
    leave()
