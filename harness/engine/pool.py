"""Page pools: storage of K and V for heads that hold different numbers of tokens.

Heads may compete for one budget, or a prompt may decide how many tokens each head keeps. The largest head may then hold several
times as many tokens as the other heads. Statistics are padded to the largest head; K and V are paged. A page serves `size`
neighbouring slots of one row, and the rows of a layer share the layer's pages. Tokens occupy a row's first slots, so that all
pages of a row but the last are full. If a token is evicted, the row's last token moves to its slot.

Axis letters: L layers, R rows of all layers, N rows of one layer, G query heads of a KV head, S slots, W pages of a row at most,
P pages of a layer, E slots of a page, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.harness.engine.rotary import rotate

MAY_ASK = {"cpu"}  # devices whose tensors the host can read without waiting
PAGE = 16  # slots per page; pages of one slot would waste no memory, but every token would need a page of its own


def pages_for(tokens: int, rows: int, full: int | None, size: int) -> int:
    """Return a number of pages that suffices for a layer's tokens, however they are distributed over its rows.

    Until the layer is full, the pages have room for 5 % more tokens.

    Args:
        tokens: maximum number of tokens in the layer.
        rows: number of rows of the layer.
        full: number of tokens at which the layer is full; None if it grows without bound.
        size: slots per page.
    """
    with_room = tokens * 21 // 20
    return max(1, ((with_room if full is None else min(with_room, full)) + rows * (size - 1)) // size)


class PageTable:
    """Assignment of pages to rows.

    Attributes:
        size: slots per page.
        pages: number of pages of a layer.
        table: pages of each row, numbered over all layers; -1 for no page. [R, W] int64.
        row: row that owns each page; 0 for a free page. [L * P] int64.
        place: index of each page among its row's pages; 0 for a free page. [L * P] int64.
        slots: flat indices, over all rows, of the slots in each page; meaningless for a free page. [L * P, E] int64.
    """

    def __init__(self, table: Tensor, slots: int, layers: int, pages: int, size: int) -> None:
        """Wrap a table. slots: S; layers: L; the other arguments are the attributes."""
        self.size, self.pages, self.table, self._slots, self._layers = size, pages, table, slots, layers
        self._first_slot = torch.arange(table.shape[1], device=table.device) * size  # first slot of each page of a row
        self._in_page = torch.arange(size, device=table.device)
        self._of_layer = len(table) // layers
        self._first_page = torch.arange(layers, device=table.device)[:, None] * pages
        self._owner = table.new_empty(layers * pages + 1)  # index in the flat table, -1 if free; the last one is no page
        self.row, self.place = table.new_empty(layers * pages), table.new_empty(layers * pages)
        self.slots = table.new_empty(layers * pages, size)
        self.note_owners()

    @classmethod
    def empty(cls, rows: int, slots: int, layers: int, pages: int, size: int, device: torch.device) -> PageTable:
        """Create the table of rows that hold no token."""
        return cls(torch.full((rows, -(-slots // size)), -1, device=device), slots, layers, pages, size)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors kept between steps."""
        return self.table.nbytes + self._owner.nbytes + self.row.nbytes + self.place.nbytes + self.slots.nbytes

    def note_owners(self) -> None:
        """Update the owners, rows, places and slots of all pages after a change of the table."""
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
        """Return the pages of the layers to which these rows belong."""
        return slice(rows.start // self._of_layer * self.pages, rows.stop // self._of_layer * self.pages)

    def take(self, rows: slice, count: Tensor) -> None:
        """Allocate pages for the first `count` slots of rows of whole layers. count: [n] int64."""
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
        """Free all pages of rows except the pages of their first `count + 1` slots. count: [n] int64."""
        table = self.table[rows]
        goes = (table >= 0) & (self._first_slot > count[:, None])
        if goes.device.type in MAY_ASK and not goes.any():
            return
        table.masked_fill_(goes, -1)
        self.note_owners()

    def places(self, slots: Tensor) -> Tensor:
        """Map flat slot indices to places in the pool; negative where the row has no page. slots: int64 -> same shape."""
        slot = slots % self._slots
        page = self.table.flatten()[slots // self._slots * self.table.shape[1] + slot // self.size]
        return page * self.size + slot % self.size

    def used(self, table: Tensor) -> int:
        """Return the largest number of pages that rows use in a layer; an upper bound where the host would have to wait.

        table: pages of the rows. [R', W] int64.
        """
        if table.device.type not in MAY_ASK:
            return min(table.numel() // self._layers, -(-len(table) // len(self.table)) * self.pages)
        return max(1, int((table.view(self._layers, -1) >= 0).sum(-1).max()))

    def moved(self, table: Tensor, slots: int, pages: int) -> tuple[PageTable, Tensor]:
        """Build the table of a new pool whose rows are copies of rows of this pool.

        Args:
            table: pages in this pool that each new row copies. [R', W] int64.
            slots: slots of a new row.
            pages: pages of a layer in the new pool.

        Returns:
            The new table, and the page in this pool that each new page copies, [L * P'] int64.
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
        table: page table, which K and V share.
        tensor: [L * P, E, D].
        flat: view of `tensor`. [L * P * E, D].
    """

    def __init__(self, table: PageTable, tensor: Tensor) -> None:
        self.table, self.tensor, self.flat, self.nbytes = table, tensor, tensor.flatten(0, 1), tensor.nbytes

    @classmethod
    def empty(cls, table: PageTable, like: Tensor) -> PagedStore:
        """Create an empty store for the rows of a table. like: any tensor of its dtype and D, [..., D]."""
        return cls(table, like.new_zeros(len(table.row), table.size, like.shape[-1]))

    def window(self, rows: slice, slots: int, position: Tensor, rank: Tensor) -> PagedWindow:
        """Return a window on the first `slots` slots of some rows."""
        return PagedWindow(self, rows, slots)

    def held_bytes(self, held: Tensor, position: Tensor) -> int:
        """Return the bytes of K or V of the tokens held."""
        return int(held.sum()) * self.tensor.shape[-1] * self.tensor.itemsize


def moved(stores: tuple[PagedStore, PagedStore], table: Tensor, slots: int, pages: int) -> tuple[PagedStore, PagedStore]:
    """Copy K and V to a new pool with the rows of `PageTable.moved`."""
    new, source = stores[0].table.moved(table, slots, pages)
    keys, values = (PagedStore(new, x.tensor.index_select(0, source)) for x in stores)
    return keys, values


class PagedWindow:
    """Window on some rows of a pool. Rows of one layer attend page by page."""

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
        """Write vectors to the pool. indices: places from `PageTable.places`."""
        self._flat.index_copy_(0, indices, x)

    def put(self, x: Tensor) -> None:
        """Fill the first slots of each row, where it has pages."""
        row = torch.arange(len(x), device=x.device)[:, None] * self._table._slots + self._first
        places = self._table.places(row + torch.arange(x.shape[1], device=x.device))
        self._flat[places[places >= 0]] = x[places >= 0]

    def entered(self, indices: Tensor, x: Tensor, before: Tensor) -> Tensor:
        """Write a run of tokens, and return the slots' contents."""
        self.write(indices, x)
        return self.read()

    def dots(self, query: Tensor, factors: Tensor | None) -> Tensor:
        """Return dot products with the keys. factors: RoPE of the keys, by page; None if they need none. [P, E, D / 2]."""
        row, local = self._table.row[self._pages] - self._rows.start, self._local()
        keys = self._tensor if factors is None else rotate(self._tensor, factors)
        of_pages = torch.bmm(query.index_select(0, row.clamp(min=0)), keys.transpose(1, 2))
        of_rows = of_pages.index_select(0, local.flatten()).unflatten(0, local.shape).transpose(1, 2)
        return of_rows.flatten(2)[..., : self._slots]

    def mix(self, weights: Tensor, into: Tensor) -> None:
        """Write weighted sums of the values. The sums of a row's pages are added in float32 or wider."""
        dtype = self._tensor.dtype
        sum_dtype = torch.promote_types(dtype, torch.float32)
        table, local = self._table.table[self._rows, : self._width], self._local()
        row, place = (self._table.row[self._pages] - self._rows.start).clamp(min=0), self._table.place[self._pages]
        of_rows = pad(weights, (0, self._width * self._table.size - weights.shape[-1])).unflatten(-1, (self._width, -1))
        sums = torch.bmm(of_rows.transpose(1, 2)[row, place].to(dtype).to(sum_dtype), self._tensor.to(sum_dtype))
        by_row = sums.index_select(0, local.flatten()).unflatten(0, local.shape)
        into.copy_(by_row.masked_fill((table < 0)[..., None, None], 0).sum(1))


def moves(victims: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the tokens that move to slots of evicted tokens, so that each row's tokens stay in its first slots.

    Args:
        victims: [R, S] bool.
        count: tokens in the first slots of each row, victims included. [R, 1] int64.
        most: maximum number of victims of a row.

    Returns:
        Row, target slot and source slot of each move. [n] int64 each. On devices where the host would have to wait for n, some
        moves have equal source and target.
    """
    slot, left = torch.arange(victims.shape[1], device=victims.device), count - victims.sum(-1, keepdim=True)
    last = slot >= left
    holes, movers = victims & ~last, last & ~victims & (slot < count)
    if victims.device.type in MAY_ASK:
        (row, into), (_, out_of) = (x.nonzero(as_tuple=True) for x in (holes, movers))
        return row, into, out_of
    return _padded_moves(holes, movers, count, most)


def _padded_moves(holes: Tensor, movers: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """`moves` with exactly `most` moves per row, so that the host knows their number.

    holes, movers: [R, S] bool, equally many in each row.
    """
    slot = torch.arange(holes.shape[1], device=holes.device)
    unmoved = (count - 1).clamp(min=0).expand(-1, most + 1)  # never a hole, because a row with holes keeps fewer tokens
    pairs = []
    for chosen in (holes, movers):
        number = (chosen.cumsum(-1) - 1).where(chosen, most)
        pairs.append(unmoved.scatter(1, number, slot.expand_as(number))[:, :most])
    valid = torch.arange(most, device=slot.device) < holes.sum(-1, keepdim=True)
    into, out_of = (x.where(valid, unmoved[:, :most]).flatten() for x in pairs)
    return torch.arange(len(holes), device=slot.device).repeat_interleave(most), into, out_of
