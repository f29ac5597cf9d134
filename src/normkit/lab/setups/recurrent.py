"""A GRU that reads an image of a digit in a few pixels at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

import normkit.nn as norms

CELLS: dict[str, Callable[[int, int], nn.Module]] = {
    "none": nn.GRUCell,
    "layer": norms.LayerNormGRUCell,
    "rms": norms.RMSNormGRUCell,
}


class Reader(nn.Module):
    """One cell over ``steps`` equal parts of the image, then the classes' scores from the last state.

    The cell is called step by step, also where torch has a fused loop, so that times compare norms.
    """

    def __init__(self, norm: str, *, steps: int, hidden: int = 32) -> None:
        super().__init__()
        self.steps, self.hidden = steps, hidden
        self.cell = CELLS[norm](64 // steps, hidden)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.hidden)
        for part in x.flatten(1).unflatten(1, (self.steps, -1)).unbind(1):
            state = self.cell(part, state)
        return self.head(state)
