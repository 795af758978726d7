"""Several processes that drive one model together, each with a part of every layer's KV heads (tensor parallelism).

One process leads: it runs the task, and has the others do what it does with decoders. They run the same code on other heads. It
differs in three places, all of which ask the team: what compares heads of a layer sees all of them (`whole_view`), tables of
budgets are for all heads and each process takes its own, and figures are those of all heads.

Axis letters: B streams, H KV heads, h KV heads of one process, S slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._pytree import tree_map

from kvbench.harness.core.errors import UserError
from kvbench.policies import CacheView, Policy, Statistic

if TYPE_CHECKING:
    from kvbench.harness.engine.model import Model

_PATIENCE = timedelta(seconds=60)  # of a process that failed, for the others to fail in the same way

P = ParamSpec("P")
R = TypeVar("R")


class Driven(Protocol):
    """What the processes of a team each have one of: a decoder."""

    model: Model


D = TypeVar("D", bound=Driven)


class Order(NamedTuple):
    """What the leader has the others do.

    Attributes:
        name: of the method; "__init__" makes a decoder.
        kind: the decoder's class.
        number: of the decoder.
        args: of the method, tensors on the CPU. The model stands for itself.
        kwargs: likewise.
        gone: numbers of decoders that the leader no longer has.
    """

    name: str
    kind: type[Any]
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gone: list[int]


class _TheModel:
    """Stands for the model among the arguments of an order."""


class Team:
    """The processes that share one model.

    Attributes:
        rank: of this process; 0 leads.
        size: number of processes.
        lost: the processes are no longer in step, so none can be sent anything.
    """

    def __init__(self, rank: int, size: int, control: Any) -> None:
        """rank, size: see the attributes; control: a process group for objects of the host."""
        self.rank, self.size, self._control = rank, size, control
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._last, self._gone, self._busy, self.lost = 0, list[int](), False, False

    def all_heads(self, x: Tensor, dim: int = 1) -> Tensor:
        """Join what the processes have of their heads, in the order of heads. [.., h, ..] -> [.., H, ..]."""
        own = x.to(torch.uint8) if x.dtype == torch.bool else x
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts, dim).to(x.dtype)

    def own_heads(self, x: Tensor, dim: int = 1) -> Tensor:
        """The part of this process. [.., H, ..] -> [.., h, ..]."""
        return x.chunk(self.size, dim)[self.rank]

    def everyone(self, value: R) -> list[R]:
        """What each process gives, by rank."""
        given: list[Any] = [None] * self.size
        dist.all_gather_object(given, value, group=self._control)
        return given

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """While every process runs the same code by itself, so that none gives orders."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def send(self, message: Any) -> None:
        """Give the others a message."""
        dist.broadcast_object_list([message], src=0, group=self._control)

    def receive(self) -> Any:
        """The leader's next message."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def meet(self) -> None:
        """After an error, find out whether it came to all processes, so that they can go on together.

        Raises:
            UserError: it did not.
        """
        try:
            dist.monitored_barrier(self._control, _PATIENCE)
        except RuntimeError as error:
            self.lost = True
            raise UserError(
                "parallel: tensor: one process failed and the others did not, so they can't go on; finished cells are kept: run "
                "the same command again"
            ) from error

    def lead(self, method: Callable[..., R], driven: Any, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Call a method of a decoder here and in the other processes."""
        if self.rank or self._busy:
            return method(driven, *args, **kwargs)
        name = method.__name__
        number = self._new_number() if name in ("__init__", "fork") else 0
        of = number if name == "__init__" else self._numbers[driven]
        plain_args, plain_kwargs = tree_map(lambda x: _sent(x, model), (args, kwargs))
        gone, self._gone = self._gone, []
        self.send(Order(name, type(driven), of, plain_args, plain_kwargs | ({"_number": number} if name == "fork" else {}), gone))
        try:
            with self.in_step():
                result = method(driven, *args, **kwargs)
        except Exception:
            self.meet()
            raise
        except BaseException:  # the user stopped it, in the middle of what all compute together
            self.lost = True
            raise
        if number:
            self._note(driven if name == "__init__" else result, number)
        return result

    def follow(self, order: Order, model: Model, decoders: dict[int, Any]) -> None:
        """Do what the leader ordered. decoders: by their numbers."""
        for number in order.gone:
            decoders.pop(number, None)
        args, kwargs = tree_map(lambda x: _received(x, model), (order.args, order.kwargs))
        new = kwargs.pop("_number", 0)
        try:
            if order.name == "__init__":
                decoders[order.number] = order.kind(*args, **kwargs)
            elif isinstance(getattr(order.kind, order.name), property):
                getattr(decoders[order.number], order.name)
            else:
                result = getattr(decoders[order.number], order.name)(*args, **kwargs)
                if new:
                    decoders[new] = result
        except Exception:  # the leader reports it, if it came to all
            self.meet()

    def _new_number(self) -> int:
        self._last += 1
        return self._last

    def _note(self, driven: Any, number: int) -> None:
        self._numbers[driven] = number
        weakref.finalize(driven, self._gone.append, number)


def _sent(x: Any, model: Model) -> Any:
    if x is model:
        return _TheModel()
    return x.cpu() if isinstance(x, Tensor) else x


def _received(x: Any, model: Model) -> Any:
    if isinstance(x, _TheModel):
        return model
    return x.to(model.device) if isinstance(x, Tensor) else x


def together(method: Callable[Concatenate[D, P], R]) -> Callable[Concatenate[D, P], R]:
    """Have every process of the model's team call a decoder's method. Without a team it is the method as it is."""

    @wraps(method)
    def call(self: D, *args: P.args, **kwargs: P.kwargs) -> R:
        model: Any = args[0] if method.__name__ == "__init__" else self.model
        if model.team is None:
            return method(self, *args, **kwargs)
        team: Team = model.team
        return team.lead(method, self, model, args, kwargs)

    decorated: Any = call  # for mypy, the name `self` would be part of the type
    return cast("Callable[Concatenate[D, P], R]", decorated)


class _Fetched(dict[Statistic, Tensor]):
    """Statistics that are fetched when they are looked at."""

    def __init__(self, states: dict[Statistic, Tensor], fetch: Callable[[Tensor], Tensor]) -> None:
        super().__init__(states)
        self._fetch, self._known = fetch, dict[Statistic, Tensor]()

    def __getitem__(self, statistic: Statistic) -> Tensor:
        if statistic not in self._known:
            self._known[statistic] = self._fetch(super().__getitem__(statistic))
        return self._known[statistic]


class _WholeView(CacheView):
    """A view of all heads, whose tensors are fetched when they are looked at."""

    _OF_HEADS = ("rank", "position", "keys", "values", "head")
    _OF_STREAMS = ("step", "layer", "prompt")

    def __init__(self, view: CacheView, fetch: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """view: of some heads, or on another device; fetch: what it lacks; device: to put it on."""
        self._view, self._fetch, self._device = view, fetch, device
        self.states, self.num_layers, self.seed = _Fetched(view.states, fetch), view.num_layers, view.seed
        self.rotate = self._rotated

    def __getattr__(self, name: str) -> Any:
        """A tensor that was not looked at before."""
        if name in self._OF_STREAMS:
            found = getattr(self._view, name).to(self._device)
        elif name in self._OF_HEADS:
            x = getattr(self._view, name)
            found = self._fetch(x.expand(*self._view.rank.shape[:2], 1) if name == "head" else x)
        else:
            raise AttributeError(name)
        vars(self)[name] = found
        return found

    def _rotated(self, x: Tensor, position: Tensor) -> Tensor:
        """`CacheView.rotate`, by tables that may be elsewhere."""
        home = self._view.rank.device
        return self._view.rotate(x.to(home), position.to(home)).to(x.device)


def whole_view(view: CacheView, device: torch.device, team: Team | None) -> CacheView:
    """The view with the heads of all processes, on one device; the same view if it is that already."""
    if team is None and view.rank.device == device:
        return view

    def fetch(x: Tensor) -> Tensor:
        return (x if team is None else team.all_heads(x)).to(device)

    return _WholeView(view, fetch, device)


def importance_of(policy: Policy, view: CacheView, team: Team | None) -> Tensor:
    """The policy's importance of a view's slots, asked with all heads of the layer if it compares them. [B, H, S] float32."""
    if team is None or policy.scope != "layer":
        return policy.importance(view)
    return team.own_heads(policy.importance(whole_view(view, view.rank.device, team)))


def own_of_rows(table: Sequence[Sequence[int]], team: Team | None) -> list[list[int]]:
    """Of numbers for every head of every layer, those of this process. [L][H] -> [L][h]."""
    if team is None:
        return [list(row) for row in table]
    size = [len(row) // team.size for row in table]
    return [list(row[team.rank * n : (team.rank + 1) * n]) for row, n in zip(table, size, strict=True)]


def local(x: Tensor) -> Tensor:
    """This process's part of a tensor, if it is split over several."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part


def leave() -> None:
    """Close the connection to the other processes."""
    with suppress(RuntimeError, ValueError):
        dist.destroy_process_group()
