"""Pools: K and V of heads that hold different numbers of tokens, in pages that heads take and give back.

Where heads compete for one budget, or a prompt decides what each of them keeps, the largest may hold several times what the
others do. Statistics are padded to it, but K and V are not: a page serves `size` neighbouring slots of one row, and a layer's
rows share its pages. Tokens lie in a row's first slots, so that all of its pages but the last are full: where one leaves, the
row's last token takes its slot.

Axis letters: L layers, R rows of all layers, N rows of one layer, G query heads of a KV head, S slots, W pages of a row at most,
P pages of a layer, E slots of a page, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.harness.engine.rotary import rotate

MAY_ASK = {"cpu"}  # devices whose numbers the host may read without waiting
PAGE = 16  # slots; 1 wastes nothing, but moves and takes a page for every token


def pages_for(tokens: int, rows: int, full: int | None, size: int) -> int:
    """Pages that are enough for a layer's tokens, however its rows share them; with room for a 20th more until it is full.

    Args:
        tokens: that the rows have slots for, at most.
        rows: of the layer.
        full: tokens for which they never need more; None if they grow without end.
        size: slots of a page.
    """
    with_room = tokens * 21 // 20
    return max(1, ((with_room if full is None else min(with_room, full)) + rows * (size - 1)) // size)


class PageTable:
    """Assignment of pages to rows.

    Attributes:
        size: slots of a page.
        pages: of a layer.
        table: a row's pages, counted over all layers; -1 where it has none. [R, W] int64.
        row: that has each page; 0 of a free one. [L * P] int64.
        place: of each page among those of its row; 0 of a free one. [L * P] int64.
        slots: flat indices in rows of what each page holds; meaningless in a free one. [L * P, E] int64.
    """

    def __init__(self, table: Tensor, slots: int, layers: int, pages: int, size: int) -> None:
        """table: as the attribute; slots: of a row; layers: L; pages: of a layer."""
        self.size, self.pages, self.table, self._slots, self._layers = size, pages, table, slots, layers
        self._first_slot = torch.arange(table.shape[1], device=table.device) * size  # of each page of a row
        self._in_page = torch.arange(size, device=table.device)
        self._of_layer = len(table) // layers
        self._first_page = torch.arange(layers, device=table.device)[:, None] * pages
        self._owner = table.new_empty(layers * pages + 1)  # flat index in the table, -1 if free; the last stands for no page
        self.row, self.place = table.new_empty(layers * pages), table.new_empty(layers * pages)
        self.slots = table.new_empty(layers * pages, size)
        self.note_owners()

    @classmethod
    def empty(cls, rows: int, slots: int, layers: int, pages: int, size: int, device: torch.device) -> PageTable:
        """Create the table of rows that hold no token."""
        return cls(torch.full((rows, -(-slots // size)), -1, device=device), slots, layers, pages, size)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept between steps."""
        return self.table.nbytes + self._owner.nbytes + self.row.nbytes + self.place.nbytes + self.slots.nbytes

    def note_owners(self) -> None:
        """Follow the table."""
        self._owner.fill_(-1)
        nowhere = len(self._owner) - 1
        flat = self.table.flatten()
        self._owner.scatter_(0, flat.where(flat >= 0, nowhere), torch.arange(len(flat), device=flat.device))
        owner, width = self._owner[:-1].clamp(min=0), self.table.shape[1]
        torch.div(owner, width, rounding_mode="floor", out=self.row)
        torch.remainder(owner, width, out=self.place)
        first = self.row * self._slots + self.place * self.size
        torch.clamp(first[:, None] + self._in_page, max=len(self.table) * self._slots - 1, out=self.slots)

    def of(self, rows: slice) -> slice:
        """The pages of the layers that some rows belong to."""
        return slice(rows.start // self._of_layer * self.pages, rows.stop // self._of_layer * self.pages)

    def take(self, rows: slice, count: Tensor) -> None:
        """Let rows of whole layers have pages for their first slots. count: slots, [n] int64."""
        table = self.table[rows]
        lacks = (table < 0) & (self._first_slot < count[:, None])
        asks = table.device.type in MAY_ASK
        if asks and not lacks.any():
            return
        layers, pages = slice(rows.start // self._of_layer, rows.stop // self._of_layer), self.of(rows)
        taken = (self._owner[pages] >= 0).to(torch.uint8).view(-1, self.pages)
        number = lacks.view(len(taken), -1).cumsum(-1) - 1
        free = taken.argsort(dim=-1, stable=True) + self._first_page[layers]
        new = free.gather(1, number.clamp(0, self.pages - 1)).view_as(table)
        assert not asks or not (lacks.view(len(taken), -1).sum(-1) + taken.sum(-1) > self.pages).any()
        table.copy_(torch.where(lacks, new, table))
        self.note_owners()

    def give_back(self, rows: slice, count: Tensor) -> None:
        """Let rows keep the pages of their first slots, and that of the slot after them. count: slots, [n] int64."""
        table = self.table[rows]
        goes = (table >= 0) & (self._first_slot > count[:, None])
        if goes.device.type in MAY_ASK and not goes.any():
            return
        table.masked_fill_(goes, -1)
        self.note_owners()

    def places(self, slots: Tensor) -> Tensor:
        """Return slots' places in the pool; negative where the row has no page. slots: flat indices in rows, int64 -> same."""
        slot = slots % self._slots
        page = self.table.flatten()[slots // self._slots * self.table.shape[1] + slot // self.size]
        return page * self.size + slot % self.size

    def used(self, table: Tensor) -> int:
        """The largest number of pages of a layer with these rows; at most, where asking waits. table: of rows, [R', W] int64."""
        if table.device.type not in MAY_ASK:
            return min(table.numel() // self._layers, -(-len(table) // len(self.table)) * self.pages)
        return max(1, int((table.view(self._layers, -1) >= 0).sum(-1).max()))

    def moved(self, table: Tensor, slots: int, pages: int) -> tuple[PageTable, Tensor]:
        """Other rows in a pool of other pages.

        Args:
            table: the pages here that each row is a copy of. [R', W] int64.
            slots: of a row.
            pages: of a layer.

        Returns:
            Their table, and the page here that each page there is a copy of, [L * P'] int64.
        """
        lacking = -(-slots // self.size) - table.shape[1]
        table = pad(table, (0, lacking), value=-1) if lacking > 0 else table
        has = table >= 0
        first = torch.arange(self._layers, device=table.device)[:, None] * pages
        new = ((has.view(self._layers, -1).cumsum(-1) - 1) + first).view_as(table).masked_fill(~has, -1)
        nowhere = self._layers * pages
        source = table.new_zeros(nowhere + 1).scatter_(0, new.where(has, nowhere).flatten(), table.clamp(min=0).flatten())
        return PageTable(new, slots, self._layers, pages, self.size), source[:-1]


class PagedStore:
    """K or V of a pool, in the model's dtype.

    Attributes:
        table: of its pages, which K and V share.
        tensor: [L * P, E, D].
        flat: a view of it. [L * P * E, D].
    """

    def __init__(self, table: PageTable, tensor: Tensor) -> None:
        self.table, self.tensor, self.flat, self.nbytes = table, tensor, tensor.flatten(0, 1), tensor.nbytes

    @classmethod
    def empty(cls, table: PageTable, like: Tensor) -> PagedStore:
        """Create an empty store for the rows of a table. like: any tensor of its dtype and D, [..., D]."""
        return cls(table, like.new_zeros(len(table.row), table.size, like.shape[-1]))

    def window(self, rows: slice, slots: int, position: Tensor, rank: Tensor) -> PagedWindow:
        """The first `slots` slots of some rows."""
        return PagedWindow(self, rows, slots)

    def held_bytes(self, held: Tensor, position: Tensor) -> int:
        """Bytes that the tokens held take."""
        return int(held.sum()) * self.tensor.shape[-1] * self.tensor.itemsize


def moved(stores: tuple[PagedStore, PagedStore], table: Tensor, slots: int, pages: int) -> tuple[PagedStore, PagedStore]:
    """K and V as `PageTable.moved` has their rows."""
    new, source = stores[0].table.moved(table, slots, pages)
    keys, values = (PagedStore(new, x.tensor.index_select(0, source)) for x in stores)
    return keys, values


class PagedWindow:
    """Some rows of a pool. Those of one layer attend page by page."""

    def __init__(self, store: PagedStore, rows: slice, slots: int) -> None:
        self._table, self._rows, self._slots = store.table, rows, slots
        self._width = -(-slots // store.table.size)  # pages of a row's slots
        self._pages = store.table.of(rows)
        self._first = rows.start * store.table._slots
        self._flat, self._tensor = store.flat, store.tensor[self._pages]
        self.parts: tuple[Tensor, ...] = (store.tensor,)

    def _local(self) -> Tensor:
        """Return each row's pages, counted from these layers' first page; arbitrary where there is none. [N, W'] int64."""
        return (self._table.table[self._rows, : self._width] - self._pages.start).clamp(min=0)

    def read(self) -> Tensor:
        """Return a copy of the slots' contents, arbitrary in slots without a page. [N, S, D]."""
        local = self._local()
        return self._tensor.index_select(0, local.flatten()).unflatten(0, local.shape).flatten(1, 2)[:, : self._slots]

    def write(self, indices: Tensor, x: Tensor) -> None:
        """Put vectors into the pool. indices: as `PageTable.places` says."""
        self._flat.index_copy_(0, indices, x)

    def put(self, x: Tensor) -> None:
        """Fill the first slots of each row, where it has pages."""
        row = torch.arange(len(x), device=x.device)[:, None] * self._table._slots + self._first
        places = self._table.places(row + torch.arange(x.shape[1], device=x.device))
        self._flat[places[places >= 0]] = x[places >= 0]

    def entered(self, indices: Tensor, x: Tensor, before: Tensor) -> Tensor:
        """Write a run of tokens, and return the slots."""
        self.write(indices, x)
        return self.read()

    def dots(self, query: Tensor, factors: Tensor | None) -> Tensor:
        """Dot products with the keys. factors: RoPE that they need, by page; None if none. [P, E, D / 2]."""
        row, local = self._table.row[self._pages] - self._rows.start, self._local()
        keys = self._tensor if factors is None else rotate(self._tensor, factors)
        of_pages = torch.bmm(query.index_select(0, row.clamp(min=0)), keys.transpose(1, 2))
        of_rows = of_pages.index_select(0, local.flatten()).unflatten(0, local.shape).transpose(1, 2)
        return of_rows.flatten(2)[..., : self._slots]

    def mix(self, weights: Tensor, into: Tensor) -> None:
        """Sums of the values, weighted; those of pages are added in float32 or wider."""
        dtype = self._tensor.dtype
        sum_dtype = torch.promote_types(dtype, torch.float32)
        table, local = self._table.table[self._rows, : self._width], self._local()
        row, place = (self._table.row[self._pages] - self._rows.start).clamp(min=0), self._table.place[self._pages]
        of_rows = pad(weights, (0, self._width * self._table.size - weights.shape[-1])).unflatten(-1, (self._width, -1))
        sums = torch.bmm(of_rows.transpose(1, 2)[row, place].to(dtype).to(sum_dtype), self._tensor.to(sum_dtype))
        by_row = sums.index_select(0, local.flatten()).unflatten(0, local.shape)
        into.copy_(by_row.masked_fill((table < 0)[..., None, None], 0).sum(1))


def moves(victims: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """How rows close up: the slots to fill, and those whose tokens go there.

    Args:
        victims: [R, S] bool.
        count: tokens in the first slots of each row, the victims among them. [R, 1] int64.
        most: victims of a row, at most.

    Returns:
        Rows, and two slots of each. [n] int64 each; on devices that would have to wait for n, some pairs are of equal slots.
    """
    slot, left = torch.arange(victims.shape[1], device=victims.device), count - victims.sum(-1, keepdim=True)
    last = slot >= left
    holes, movers = victims & ~last, last & ~victims & (slot < count)
    if victims.device.type in MAY_ASK:
        (row, into), (_, out_of) = (x.nonzero(as_tuple=True) for x in (holes, movers))
        return row, into, out_of
    return _padded_moves(holes, movers, count, most)


def _padded_moves(holes: Tensor, movers: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """`moves` with `most` pairs of each row, so that the host knows how many. holes, movers: [R, S] bool, as many in each row."""
    slot = torch.arange(holes.shape[1], device=holes.device)
    unmoved = (count - 1).clamp(min=0).expand(-1, most + 1)  # never a hole: of a row that has holes, fewer tokens are left
    pairs = []
    for chosen in (holes, movers):
        number = (chosen.cumsum(-1) - 1).where(chosen, most)
        pairs.append(unmoved.scatter(1, number, slot.expand_as(number))[:, :most])
    valid = torch.arange(most, device=slot.device) < holes.sum(-1, keepdim=True)
    into, out_of = (x.where(valid, unmoved[:, :most]).flatten() for x in pairs)
    return torch.arange(len(holes), device=slot.device).repeat_interleave(most), into, out_of
