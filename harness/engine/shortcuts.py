"""Shortcuts: methods that read blocks faster than token by token. Results agree with the plain walk in `walk.py`.

`Fill` attends to a whole block at once while nothing is evicted. `Closed` computes banded attention if the kept tokens are known
in advance. `CompiledWalk` leaves the loop over tokens to a kernel. `Runs` makes one attention call from one eviction to the next.
On CPUs, the step kernel reads each token of blocks that no other shortcut takes, also in coded caches. PyTorch or a release
kernel then updates the statistics and evicts.

Axis letters: B streams, H KV heads, N = B * H, G query heads of a KV head, T tokens, D key dim, Dv value dim, P pairs of dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.harness.engine.attention import Terms, causal
from kvbench.harness.engine.closed_form import ClosedForm
from kvbench.harness.engine.held import writes
from kvbench.harness.engine.kernel_interface import Kernels, StepKernel
from kvbench.harness.engine.method import RAN, Method
from kvbench.harness.engine.plan import Block, Closed, CompiledWalk, Fill, Places, PlainWalk, Plan, Runs
from kvbench.harness.engine.rotary import Placement, rotate
from kvbench.harness.engine.runs import Run, RunReader
from kvbench.harness.engine.slot_rows import Rows, Windows
from kvbench.harness.engine.slots import Slots
from kvbench.policies import Statistic

_MIN_COMPILED_TOKENS = 4  # shorter blocks don't repay the kernel's copies


class Shortcuts:
    """Plans the blocks that a shortcut can read, and reads these blocks into the layers of one `Slots`.

    Attributes:
        form: closed form of the blocks; None if there is none or it may not be used.
    """

    def __init__(
        self, slots: Slots, rows: Windows, placement: Placement, form: ClosedForm | None, kernels: Kernels, method: Method
    ) -> None:
        """Prepare to read into slots by the shortcuts that `method` allows. rows: windows on the slots."""
        self.form = form
        self._slots, self._rows, self._placement, self._kernels, self._method = slots, rows, placement, kernels, method
        self._writes = any(writes(s) for s in slots.tensors.states)

    def plan(self, block: Block, ordered: bool) -> Fill | Closed | CompiledWalk | None:
        """Return the plan of a block that is read at once; None for other blocks. ordered: slots hold tokens oldest first."""
        slots, tokens_before = self._slots, block.tokens_before
        if self._can_fill(block):
            return Fill(tokens_before or 0, block.ids)
        if tokens_before is None:
            return None
        if self.form is not None and self.form.takes(block.tokens, tokens_before):
            return Closed(self.form, tokens_before, ordered)
        kernel = self._kernels.walk if self._method.walk_kernel and block.tokens >= _MIN_COMPILED_TOKENS else None
        if kernel is None:
            return None
        factors = None
        if not kernel.rotates:
            ranks, steps = slots.cadence.held_of(block.steps)[:, None, None], block.steps[:, None, None]
            if slots.uneven:  # heads differ, so the kernel turns keys to their distances from the last rank
                ranks = torch.full_like(ranks, slots.num_slots - 1)
            factors = self._placement.of_queries(ranks, steps, slots.num_slots)
        return CompiledWalk(kernel, factors, slots.attended(block.end, block.tokens), tokens_before, ordered, block)

    def runs(self, block: Block) -> list[int] | None:
        """Return the lengths of the runs in which a block may be read; None if it has to be walked token by token."""
        far = self._placement.mode == "clamped" and (block.end or 0) > self._placement.limit
        if block.tokens_before is None or not self._method.fill or far:
            return None
        lengths = self._slots.cadence.runs(block.tokens_before, block.tokens)
        return lengths if len(lengths) == 1 or self._slots.every > 1 else None

    def step_kernel(self, block: Block) -> StepKernel | None:
        """Return the step kernel if it may read the tokens of a walked block; otherwise None."""
        same_length = block.tokens_before is not None and block.valid is None
        return self._kernels.step if same_length and self.walks_by_steps else None

    @property
    def walks_by_steps(self) -> bool:
        """Whether the step kernel reads the tokens of walked blocks."""
        slots = self._slots
        if slots.device.type != "cpu" or self._kernels.step is None:
            return False
        if slots.codec is not None:
            return self._method.step_kernel and slots.sees <= {"weights"} and not self._writes and not slots.uneven
        no_walk = self._kernels.walk is None and slots.capacity is not None
        return self._method.walk_steps and no_walk and (self._kernels.step.gives_logits or "logits" not in slots.sees)

    def ordered_after(self, plan: Plan, ordered: bool, end: int | None) -> bool:
        """Return whether the slots hold their tokens oldest first after a block.

        end: tokens of each stream up to the block's end; None if streams differ in length.
        """
        capacity = self._slots.capacity
        still_filling = ordered and (capacity is None or (end is not None and end <= capacity))
        return isinstance(plan, Closed) or (isinstance(plan, CompiledWalk) and plan.kernel.leaves_ordered) or still_filling

    def _can_fill(self, block: Block) -> bool:
        """Return whether one attention call gives the walk's result: no eviction, no updates, true distances."""
        slots, end = self._slots, block.end
        if end is None or not self._method.fill or slots.cadence.dropped or (slots.sees and end > slots.quiet):
            return False
        if slots.codec is not None:  # a token may be coded before the block ends
            return False
        if slots.budget.of_rows is not None:  # a cut prompt: some heads hold fewer tokens than others
            return False
        fits = slots.capacity is None or end <= slots.capacity
        return fits and (self._placement.mode != "clamped" or end <= self._placement.limit)

    # Each of the following methods reads a block into one layer. Arguments and results are those of `Walk.attend`.

    def fill(self, plan: Fill, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Read a block that fits as a whole, by one call of causal attention."""
        return causal(*self.enter_block(plan, layer, query, keys, values), terms).flatten(1, 2)

    def enter_block(self, plan: Fill, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write a block that fits as a whole.

        Returns:
            Rotated queries, [B, H, G, T, D], and rotated keys and values of all tokens up to the block's end, [B, H, L, D] each.
        """
        end, streams, rotation = plan.tokens_before + keys.shape[2], query.shape[0], self._placement.rotation
        rows = self._rows(self._slots.num_slots, layer)
        query, keys = self._paired(query, keys)
        factors = None
        if rotation is not None:
            factors = rotation.factors(torch.arange(end, device=keys.device), keys.dtype, end)
            query = rotate(query, factors[plan.tokens_before :])
        self._enter(plan, rows, keys, values, factors)
        all_keys, all_values = (x[:, :end].unflatten(0, (streams, -1)) for x in (rows.keys, rows.values))
        if factors is not None and not rows.keys_rotated:
            all_keys = rotate(all_keys, factors)
        return query, all_keys, all_values

    def attend_in_band(self, plan: Closed, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Read a block in closed form, since the tokens that each query sees are known in advance."""
        rows = self._rows(self._slots.num_slots, layer)
        held = rows.oldest_first(min(plan.tokens_before, self._slots.capacity or 0), plan.ordered)
        query = query.unflatten(1, (keys.shape[1], -1))
        return plan.form(rows, query, keys, values, terms, held, plan.tokens_before).flatten(1, 2)

    def walk_by_kernel(self, plan: CompiledWalk, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Walk a block by a kernel."""
        rows, scaling, own, unrotated = self._rows(plan.attended, layer), terms.scaling, plan.query_factors, None
        if plan.kernel.rotates:
            query = query.unflatten(1, (keys.shape[1], -1))
        else:
            query, keys = self._paired(query, keys)
            unrotated = query if "queries" in self._slots.sees else None
            query = query * scaling if own is None else own.rotated(query, scaling)
        RAN["compiled walk"] += 1
        before, written = (plan.ordered, plan.tokens_before), self._written(plan, rows, keys, values)
        out = plan.kernel(self._slots, rows, layer, query, keys, values, scaling, *before, written, unrotated)
        return out.flatten(1, 2)

    def walk_by_steps(self, plan: PlainWalk, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Walk a block token by token, with attention by the step kernel, which decodes coded K and V itself."""
        assert plan.kernel is not None
        places, rows, out = plan.places, self._rows(plan.attended, layer), []
        observed = rows.observation_buffers()
        grouped, paired = self._paired(query, keys)
        written = self._written_in(places, rows, paired, values)
        queries = grouped.flatten(0, 1) if "queries" in observed else None  # [N, G, T, D]
        by_token = [x.movedim(2, 0)[..., None, :].contiguous().unbind(0) for x in (query, keys, values)]  # [B, H, 1, D] each
        release = self._kernels.release
        RAN["coded walk" if self._slots.codec is not None else "compiled steps"] += 1
        for t, rank in enumerate(places.ranks):
            rows.place(rows.count() if rank is None else rank, places.steps[t], places.now[t])
            rows.set_written(rows.free[:, None], {s: x[:, t : t + 1] for s, x in written.items()})
            q, k, v = (x[t] for x in by_token)
            given = terms.scaling, observed.get("weights"), observed.get("logits")
            out.append(plan.kernel(self._slots, rows, q, k, v, *given))
            if queries is not None:
                observed["queries"] = queries[:, :, t]
            if "outputs" in observed:
                observed["outputs"] = out[-1].reshape(observed["outputs"].shape)
            if observed and not (release and release.updates):
                rows.update(observed, None)
            if release is None:
                rows.release(None, places.evicts[t], places.ragged)
            else:
                release(self._slots, rows, observed.get("weights"), places.steps[t], places.evicts[t])
        return torch.cat(out, 2)

    def read_runs(self, plan: Runs, layer: int, query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
        """Read a block in runs without evictions, one run after another."""
        query, keys = self._paired(query, keys)
        rows, places = self._rows(plan.attended, layer), plan.places
        steps = torch.stack(list(places.steps), 1)
        ids = torch.stack(list(places.ids), 1) if places.ids else steps
        read = RunReader(rows, terms, self._placement.mode, self._placement.rotation, plan.updates)
        by_head, out, first = query.shape[:2], [], 0
        query, keys, values = query.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)
        for length in plan.lengths:
            part = slice(first, first + length)
            first += length
            run = Run(query[..., part, :], keys[:, part], values[:, part], steps[:, part], ids[:, part])
            out.append(read(run, places.now[part], places.evicts[first - 1]))
        return torch.cat(out, 2).unflatten(0, by_head).flatten(1, 2)

    def _paired(self, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Pair dims, and group queries by KV head. [B, H * G, T, D], [B, H, T, D] -> [B, H, G, T, D], [B, H, T, D]."""
        rotation, query = self._placement.rotation, query.unflatten(1, (keys.shape[1], -1))
        return (query, keys) if rotation is None else (rotation.pair(query), rotation.pair(keys))

    def _enter(self, plan: Fill, rows: Rows, keys: Tensor, values: Tensor, factors: Tensor | None) -> None:
        """Write a block that fits as a whole.

        keys: paired; factors: RoPE of all positions up to the block's end, None without RoPE.
        """
        first, end = plan.tokens_before, plan.tokens_before + keys.shape[2]
        kept = rotate(keys, factors[first:]) if factors is not None and rows.keys_rotated else keys
        free = rows.free[:, None] + torch.arange(end - first, device=keys.device)
        rows.write(kept.flatten(0, 2), values.flatten(0, 2), free)
        rows.rank[:, first:end] = rows.position[:, first:end] = torch.arange(first, end, device=keys.device)
        if self._writes:
            steps = rows.position[:, first:end]
            rows.note_written(free, keys.flatten(0, 1), values.flatten(0, 1), steps, rows.of_streams(plan.ids))
        rows.free += keys.shape[2]

    def _written_in(self, places: Places, rows: Rows, keys: Tensor, values: Tensor) -> dict[Statistic, Tensor]:
        """Compute the first values of statistics for the tokens of a walked block. keys: paired. [N, T, *k] each."""
        if not self._writes:
            return {}
        steps, ids = (torch.stack(list(x), 1) for x in (places.steps, places.ids))
        return rows.written(keys.flatten(0, 1), values.flatten(0, 1), steps, ids)

    def _written(self, plan: CompiledWalk, rows: Rows, keys: Tensor, values: Tensor) -> dict[Statistic, Tensor]:
        """Compute the first values of statistics for a block's tokens, before a kernel walks it. [N, T, *k] each."""
        if not self._writes:
            return {}
        if plan.kernel.rotates and self._placement.rotation is not None:
            keys = self._placement.rotation.pair(keys)
        steps, ids = rows.of_streams(plan.block.steps), rows.of_streams(plan.block.ids)
        return rows.written(keys.flatten(0, 1), values.flatten(0, 1), steps, ids)
