"""explain: a normalization or a placement, step by step, in numbers and in pictures."""

from normkit.explain.draw import DrawError as DrawError
from normkit.explain.draw import draw_sets as draw_sets
from normkit.explain.draw import draw_values as draw_values
from normkit.explain.sets import counted as counted
from normkit.explain.sets import set_ids as set_ids
from normkit.explain.show import show as show
from normkit.explain.steps import Explanation as Explanation
from normkit.explain.steps import Step as Step
from normkit.explain.steps import explain as explain
from normkit.explain.wiring import draw_wiring as draw_wiring

__all__ = [
    "DrawError",
    "Explanation",
    "Step",
    "counted",
    "draw_sets",
    "draw_values",
    "draw_wiring",
    "explain",
    "set_ids",
    "show",
]
