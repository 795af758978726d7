"""Group KV heads of equal shape and equal budget, which share tensors.

Axis letters: B streams, L layers, H KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from kvbench.harness.core.codec import Codec, Kivi
from kvbench.harness.engine.decoder import CacheConfig
from kvbench.harness.engine.held import writes
from kvbench.harness.engine.model import Model
from kvbench.harness.engine.slot_rows import Rows
from kvbench.harness.engine.slots import Budget, Cadence, LayerHeads, LayerShape, Slots
from kvbench.policies import Policy, Selecting, Statistic
from kvbench.policies.merges import Evicted, Merging

Table = Sequence[Sequence[int]]  # tokens that each head keeps. [L][H]
Key = TypeVar("Key", bound=Hashable)


def static_table(model: Model, config: CacheConfig, prompt: int | None) -> Table | None:
    """Return the policy's budgets if they are known in advance and differ between heads; otherwise None.

    Args:
        prompt: tokens of the prompt, if eviction waits for its end.

    Raises:
        ValueError: the table does not fit the model's heads, its budgets don't add up, or whole pages are evicted.
    """
    if config.capacity is None:
        return None
    heads = [shape.heads for shape in model.layers]
    policy = config.policy.bind(config.capacity)
    table = policy.budgets(config.capacity, len(heads), max(heads), prompt)
    if config.pages is not None and (table is not None or policy.pool_floor(config.capacity) is not None):
        raise ValueError("its heads keep different numbers of tokens, and whole pages need heads that keep equally many")
    if table is None:
        return None
    if [len(row) for row in table] != heads:
        given = [len(row) for row in table]
        raise ValueError(f"its table of budgets is for layers with {given} KV heads, and those of the model have {heads}")
    total, wanted = sum(map(sum, table)), sum(heads) * config.capacity
    if total != wanted:
        raise ValueError(f"its budgets add up to {total} tokens, and {sum(heads)} heads of {config.capacity} make {wanted}")
    if min(map(min, table)) < 1:
        raise ValueError("one of its budgets is below 1 token")
    if len({budget for row in table for budget in row}) == 1:
        return None
    return table


def floor_of(policy: Policy, capacity: int) -> int | None:
    """Return the least number of tokens per head where the heads of a layer compete; None where they don't.

    Raises:
        ValueError: the policy's floor is not a number of tokens that all heads can keep.
    """
    floor = policy.pool_floor(capacity)
    if floor is not None and not 1 <= floor <= capacity:
        raise ValueError(f"its heads keep at least {floor} tokens each, where they keep {capacity} on average")
    return floor


class Layout:
    """Creates the slots of a decoder's layers."""

    def __init__(self, model: Model, config: CacheConfig, streams: int, dtype: torch.dtype | None = None) -> None:
        """Prepare for a model and a cache. streams: B; dtype: dtype of K and V, the model's when None."""
        self._model, self._config, self._streams, self._dtype = model, config, streams, dtype or model.dtype
        bound = self.bound(config.capacity)
        self._needs_output = any(writes(s) for s in bound.statistics)
        selects = isinstance(config.policy, Selecting)
        self._keys_rotated = selects or (config.positions == "stream" and not self._compares_keys())
        if config.kv is not None:
            self._keys_rotated = self._coded_rotated(config.kv, bound)

    def for_stream(self, table: Table | None) -> list[Slots]:
        """Create slots that evict while tokens are read."""
        config, slots = self._config, []
        for (shape, budget), parts in self._grouped(lambda layer, head: table[layer][head] if table else config.capacity).items():
            kept = shape.kept(budget)
            cadence = Cadence.from_start(kept, config.every if config.policy.evicts else 1)
            slots.append(self._slots(shape, parts, self.bound(kept), cadence, self._limits(shape, kept)))
        return slots

    def for_prompt(self, length: int, table: Table | None) -> list[Slots]:
        """Create slots that hold a whole prompt, with the statistics that the policy needs at any head's budget."""
        slots = []
        for (shape, _), parts in self._grouped(lambda *_: None).items():
            room, kept = shape.kept(length), shape.kept(self._config.capacity)
            budgets = {kept, *(shape.kept(n) for part in parts for n in (table[part.layer] if table else ()))}
            statistics = dict.fromkeys(s for n in sorted(budgets, key=str) for s in self.bound(n).statistics)
            slots.append(self._slots(shape, parts, self.bound(kept), Cadence.from_start(room), Budget(room), tuple(statistics)))
        return slots

    def after_prompt(self, length: int, counts: Sequence[Sequence[int]], table: Table | None) -> list[Slots]:
        """Create slots for the kept tokens of a prompt, with budgets known in advance.

        Args:
            counts: tokens that each head keeps. [L][H].
            table: budgets of the heads; None if all heads have the same budget.
        """
        slots, capacity = [], self._config.capacity
        for (shape, (count, budget)), parts in self._grouped(
            lambda layer, head: (counts[layer][head], table[layer][head] if table else capacity)
        ).items():
            kept = shape.kept(budget)
            cadence, limits = self._afterwards(shape, kept, length, count)
            slots.append(self._slots(shape, parts, self.bound(kept), cadence, limits))
        return slots

    def as_decided(self, length: int, counts: Sequence[Tensor]) -> list[Slots]:
        """Create slots for the kept tokens of a prompt that decided their number.

        If heads of a layer keep different numbers of tokens, every layer has slots of its own, padded to its largest head.

        Args:
            counts: tokens that each head keeps, by layer. Syncs with the host. [B, H] int64 each.
        """
        capacity, slots = self._config.capacity, []
        if any(bool((count != count[0, 0]).any()) for count in counts):
            return [self._uneven(length, layer, count) for layer, count in enumerate(counts)]
        cut = capacity is not None and length > capacity  # a prompt that fits decides nothing
        for (shape, count), parts in self._grouped(lambda layer, _: int(counts[layer][0, 0])).items():
            kept = shape.kept(capacity)
            cadence, limits = self._afterwards(shape, shape.kept(count) if cut else kept, length, count)
            slots.append(self._slots(shape, parts, self.bound(kept), cadence, limits))
        return slots

    def _uneven(self, length: int, layer: int, counts: Tensor) -> Slots:
        """Create slots of one layer whose heads hold different numbers of tokens. counts: [B, H] int64."""
        shape, most = self._model.layers[layer], int(counts.max())
        kept = shape.kept(self._config.capacity)
        cadence, limits = self._afterwards(shape, kept, length, most)
        slots = limits.slots or most + self._config.every
        limits = replace(limits, of_rows=counts.reshape(-1, 1), slots=slots)
        return self._slots(shape, [self._part(layer, None)], self.bound(kept), cadence, limits)

    def _afterwards(self, shape: LayerShape, kept: int | None, length: int, held: int) -> tuple[Cadence, Budget]:
        """Return cadence and budget after a prompt of which a head holds `held` tokens."""
        if self._config.evict == "prompt":
            return Cadence.from_start(None).after(length, held), Budget.growing_from(held)
        return Cadence.from_start(kept, self._config.every).after(length, held), self._limits(shape, kept)

    def _limits(self, shape: LayerShape, kept: int | None) -> Budget:
        """Return the budget of slots that evict while tokens are read.

        A competing head may hold all tokens above the floors of the other heads.
        """
        floor, pages = None if kept is None else floor_of(self.bound(kept), kept), self._config.pages
        if pages is not None and kept is not None and kept % pages.size:
            raise ValueError(f"a layer with a sliding window keeps {kept} tokens, which don't make up pages of {pages.size}")
        heads = shape.heads
        if floor is None or kept is None or heads == 1:
            return Budget(kept, pages=pages)
        return Budget(kept, floor, slots=heads * kept - (heads - 1) * floor + self._config.every)

    def bound(self, kept: int | None) -> Policy:
        """Return the policy, bound for heads that keep this many tokens."""
        policy = self._config.policy
        return policy if kept is None or self._config.capacity is None else policy.bind(kept)

    def _grouped(self, key: Callable[[int, int], Key]) -> dict[tuple[LayerShape, Key], list[LayerHeads]]:
        """Group heads by shape and key. key: called with a layer and a head."""
        groups: dict[tuple[LayerShape, Key], list[LayerHeads]] = {}
        for layer, shape in enumerate(self._model.layers):
            alike: dict[Key, list[int]] = {}
            for head in range(shape.heads):
                alike.setdefault(key(layer, head), []).append(head)
            for name, heads in alike.items():
                part = self._part(layer, None if len(alike) == 1 else tuple(heads))
                groups.setdefault((replace(shape, heads=len(heads)), name), []).append(part)
        return groups

    def _part(self, layer: int, heads: tuple[int, ...] | None) -> LayerHeads:
        output = self._model.output_of(layer) if self._needs_output else None
        return LayerHeads(layer, heads, output if output is None or heads is None else output[list(heads)])

    def _compares_keys(self) -> bool:
        """Return whether the policy, or one of its statistics, reads the keys held. If in doubt, return True.

        A policy whose code names keys may read them under a condition (LagKV does so once there are two partitions). Any other
        policy is run with a view without keys, on the meta device, so that the result does not depend on data. Rotating keys back
        is no alternative: rounding would make equal keys differ, such as those of a repeated token in the first layer.
        """
        shape = self._model.layers[0]
        kept = shape.kept(self._config.capacity)
        cadence, policy = Cadence.from_start(kept), self.bound(kept)
        if not _names(policy).isdisjoint(("keys", "rotated_keys")):
            return True
        device = torch.device("meta")
        slots = self._slots(shape, [LayerHeads(0)], policy, cadence, Budget(kept), policy.statistics, device, keys_rotated=True)
        rows = Rows(slots, slots.num_slots)
        if rows.summed:
            return True
        try:
            rows.update(rows.observation_buffers(), None)
            policy.importance(rows.view)
            policy.prompt_budgets([rows.view] * len(self._model.layers), self._config.capacity)
            if isinstance(policy, Merging):
                policy.merge(rows.view, Evicted.of(rows.view.valid, rows.view.valid, rows.view, 1))
        except Exception:  # the view has no keys, or a user's policy raised any other error
            return True
        return False

    def _coded_rotated(self, codec: Codec, policy: Policy) -> bool:
        """Return whether keys are rotated before they are coded.

        Raises:
            ValueError: the policy reads keys or sums that the codec would change.
        """
        name, written = type(policy).__name__, [s for s in policy.statistics if writes(s)]
        if codec.codes_later and any(s.per == "head" for s in written):
            raise ValueError(f"kv: {name} sums what a head holds, and a code would change it later: leave exempt.recent out")
        if codec.keys == "rotated" and (written or not self._keys_rotated):
            raise ValueError(f"kv: {name} looks at keys before RoPE: leave keys: rotated out")
        return codec.keys == "rotated"

    def _slots(
        self,
        shape: LayerShape,
        parts: Sequence[LayerHeads],
        policy: Policy,
        cadence: Cadence,
        budget: Budget,
        statistics: Sequence[Statistic] | None = None,
        device: torch.device | None = None,
        keys_rotated: bool | None = None,
    ) -> Slots:
        """Create slots. Slots with an explicit choice of statistics are not coded."""
        model, config = self._model, self._config
        codec = config.kv if statistics is None else None
        if isinstance(codec, Kivi) and cadence.capacity is not None:
            raise ValueError(f"kv: {codec.name} codes groups of tokens, out of which a layer with a sliding window would evict")
        if keys_rotated is None:
            keys_rotated = self._keys_rotated and shape.rotation is not None
        if statistics is None:
            statistics = [s for s in policy.statistics if s.lasts or cadence.capacity is not None]
        return Slots(
            shape,
            parts=parts,
            policy=policy,
            statistics=statistics,
            cadence=cadence,
            budget=budget,
            num_layers=len(model.layers),
            streams=self._streams,
            seed=config.seed,
            device=device or shape.device or model.device,
            dtype=self._dtype,
            keys_rotated=keys_rotated,
            codec=codec,
        )


def _names(policy: Policy) -> set[str]:
    """Return the names used by the methods of a policy and of the policies inside it."""
    held = [value for value in vars(policy).values() if isinstance(value, Policy)]
    methods = (getattr(x, "__code__", None) for kind in type(policy).__mro__ if kind is not Policy for x in vars(kind).values())
    return {name for code in methods if code for name in code.co_names}.union(*map(_names, held))
