"""Two caches that are right, and others that are wrong in one way each, as people have written them."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

BUDGET, SINKS = 16, 4


class Window(DynamicLayer):
    """The newest tokens, at their positions in the stream. It knows how many tokens it has read."""

    budget = BUDGET

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def kept(self, count: int) -> Tensor:
        """Indices of the rows to keep of `count` rows."""
        return torch.arange(count)[-self.budget :]

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.read += keys.shape[2]
        keys, values = super().update(keys, values)
        if keys.shape[2] > self.budget:
            self.evict(self.kept(keys.shape[2]))
        return keys, values

    def evict(self, kept: Tensor) -> None:
        self.keys, self.values = self.keys[:, :, kept], self.values[:, :, kept]

    def get_seq_length(self) -> int:
        return self.read

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self.keys.shape[2] if self.is_initialized else 0
        return held + query_length, self.read - held

    def reset(self) -> None:
        super().reset()
        self.read = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.keys, self.values = self.keys[beam_idx], self.values[beam_idx]

    def crop(self, tokens_to_remove: int) -> None:
        if self.keys.shape[2] < self.read:
            raise ValueError("evicted tokens can't come back")
        super().crop(tokens_to_remove)
        self.read += tokens_to_remove


class Ranked(Window):
    """The first tokens and the newest; the first follow the window, so that distances are those of ranks."""

    moves = 1

    def kept(self, count: int) -> Tensor:
        return torch.cat([torch.arange(SINKS), torch.arange(count)[SINKS - self.budget :]])

    def evict(self, kept: Tensor) -> None:
        evicted = self.keys.shape[2] - len(kept)
        super().evict(kept)
        moved = rotated(self.keys[:, :, :SINKS], self.moves * evicted).to(self.keys.dtype)
        self.keys = torch.cat([moved, self.keys[:, :, SINKS:]], 2)


def rotated(keys: Tensor, distance: int) -> Tensor:
    """Keys moved forward by RoPE of base 10,000, as Llama's. [..., D]."""
    half = keys.shape[-1] // 2
    angles = distance * 10_000.0 ** -(torch.arange(half) / half)
    first, second = keys.split(half, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class NotRenumbered(Window):
    """Says how many tokens it holds, so that later tokens are all at one position, and does not move the keys it holds."""

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class RenumberedTwice(Ranked):
    """Moves the sinks twice as far as the tokens that were evicted."""

    moves = 2


class IgnoresPadding(Window):
    """Keeps the first tokens as sinks, even if they are padding. It has no other fault."""

    def kept(self, count: int) -> Tensor:
        return torch.cat([torch.arange(SINKS), torch.arange(count)[SINKS - self.budget :]])


class SinksLostLater(IgnoresPadding):
    """Takes the sinks' indices in the text for their indices in the cache from the second eviction on."""

    def kept(self, count: int) -> Tensor:
        sinks = torch.arange(SINKS) + (self.read > BUDGET + 1)
        return torch.cat([sinks, torch.arange(count)[SINKS - self.budget :]])


class EvictsOneTooMany(Window):
    budget = BUDGET - 1


class WrongLength(Window):
    """Counts calls instead of tokens."""

    calls = 0

    def update(self, *args: Tensor, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return super().update(*args, **kwargs)

    def get_seq_length(self) -> int:
        return self.calls


class KeepsViews(Window):
    """Writes into one long buffer and keeps views of its end."""

    def __init__(self) -> None:
        super().__init__()
        self.start = 0

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        before = (self.all_keys, self.all_values) if self.read else (keys[:, :, :0], values[:, :, :0])
        self.all_keys, self.all_values = (torch.cat([a, b], 2) for a, b in zip(before, (keys, values), strict=True))
        self.read += keys.shape[2]
        start, self.start, self.is_initialized = self.start, max(0, self.read - self.budget), True
        self.keys, self.values = self.all_keys[:, :, self.start :], self.all_values[:, :, self.start :]
        return self.all_keys[:, :, start:], self.all_values[:, :, start:]

    def reset(self) -> None:
        super().reset()
        self.start = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.all_keys, self.all_values = self.all_keys[beam_idx], self.all_values[beam_idx]
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.all_keys, self.all_values = (x.repeat_interleave(repeats, 0) for x in (self.all_keys, self.all_values))
        super().batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("no crop")


class ReordersKeysOnly(Window):
    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.keys = self.keys[beam_idx]


class EvictsNothing(Window):
    def evict(self, kept: Tensor) -> None:
        self.keys[:, :, kept]


class SeedFromClock(Window):
    """The newest tokens, and a random choice among the older ones."""

    def kept(self, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(time.time_ns())
        older = torch.randperm(count - self.budget // 2, generator=generator)[: self.budget // 2].sort().values
        return torch.cat([older, torch.arange(count)[-self.budget // 2 :]])


# Faults beyond the ten.


class ValuesOfOtherTokens(Window):
    """Keeps the keys of the newest tokens, and the values of the tokens before them."""

    def evict(self, kept: Tensor) -> None:
        self.keys, self.values = self.keys[:, :, kept], self.values[:, :, kept - 1]


class Ring(Window):
    """Writes the newest token over the oldest. Blocks of several tokens would need a mask of their own."""

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        keys, values = super().update(keys, values)
        rows = torch.arange(keys.shape[2]).roll(self.read % keys.shape[2])
        return keys[:, :, rows], values[:, :, rows]


class ShiftedMask(Window):
    """Says that its first row is the first token of the text."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length)[0], 0


class CropsNoLength(Window):
    def crop(self, tokens_to_remove: int) -> None:
        read = self.read
        super().crop(tokens_to_remove)
        self.read = read


class CropsByTextIndex(Window):
    """Takes indices in the text for indices in the cache, which are equal until a token is evicted."""

    def crop(self, tokens_to_remove: int) -> None:
        self.read += tokens_to_remove
        self.evict(torch.arange(min(self.read, self.keys.shape[2])))


class CropsWindowByLength(Window):
    """Crops what it holds, but counts the rows held as tokens read once some are evicted."""

    def crop(self, tokens_to_remove: int) -> None:
        self.evict(torch.arange(self.keys.shape[2] + tokens_to_remove))
        self.read = self.keys.shape[2]


class ResetsNoLength(Window):
    def reset(self) -> None:
        read = self.read
        super().reset()
        self.read = read


class Float32(Window):
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states.float(), value_states.float())

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        return tuple(x.to(keys.dtype) for x in super().update(keys.float(), values.float()))


class SharedWithItsCopy(Window):
    def __deepcopy__(self, memo: dict[int, object]) -> SharedWithItsCopy:
        return self


class SecondBlockIsAPrompt(Window):
    """Takes every block of several tokens for a new prompt, and forgets what came before."""

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if keys.shape[2] > 1:
            self.keys, self.values = keys[:, :, :0], values[:, :, :0]
        return super().update(keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length, self.read) if query_length > 1 else super().get_mask_sizes(query_length)


class PromptLongerThanBudget(Window):
    """Cuts a prompt before it is attended to."""

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        before = self.read
        keys, values = super().update(keys, values)
        if before == 0 and keys.shape[2] > self.budget:
            return self.keys, self.values
        return keys, values


class OneOutPerCall(Window):
    """Drops one token per call, so that a block of several tokens leaves it over the budget for good."""

    def kept(self, count: int) -> Tensor:
        return torch.arange(1, count)


class SinksOfTheFirstBlock(IgnoresPadding):
    """Protects as many first tokens as the first block has, at most four: one if a stream begins with single tokens."""

    sinks = 0

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.sinks = self.sinks or min(SINKS, keys.shape[2])
        return super().update(keys, values)

    def kept(self, count: int) -> Tensor:
        return torch.cat([torch.arange(self.sinks), torch.arange(count)[self.sinks - self.budget :]])
