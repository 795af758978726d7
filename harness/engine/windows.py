"""The rows of layers, made when they are first looked at and kept as long as their tensors last."""

from __future__ import annotations

from kvbench.harness.engine.rows import Rows
from kvbench.harness.engine.slots import Slots


class Windows:
    """The rows of `Slots` that steps look at, each made once for as long as its tensors last.

    Attributes:
        made: the rows made so far, by (slots attended, layer).
    """

    def __init__(self, slots: Slots) -> None:
        self._slots, self._version = slots, slots.version
        self.made: dict[tuple[int, int | None], Rows] = {}

    def __call__(self, attended: int, layer: int | None = None) -> Rows:
        """The rows of one layer (its index in the model), or of all."""
        if self._version != self._slots.version:
            self._version, self.made = self._slots.version, {}
        if (attended, layer) not in self.made:
            self.made = {key: rows for key, rows in self.made.items() if key[0] == attended}
            self.made[attended, layer] = Rows(self._slots, attended, layer)
        return self.made[attended, layer]
