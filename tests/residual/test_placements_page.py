"""docs/placements.md: its tables are the package's, its constants the functions', and its examples run."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from normkit import PLACEMENTS, SCHEDULES
from normkit.placement import deepnorm_constants, fixup_gain, placement, sub_ln_gain
from tests.pages import script

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "placements.md").read_text()


def test_the_tables_are_up_to_date():
    assert script("docs/placements.py").page(PAGE) == PAGE, "run python docs/placements.py --write"
    first = [line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert {*PLACEMENTS, *SCHEDULES} <= set(first)


def test_a_changed_row_is_noticed(monkeypatch):
    made = script("docs/placements.py")
    monkeypatch.setitem(PLACEMENTS, "post", PLACEMENTS["sandwich"])
    assert made.page(PAGE) != PAGE


def written(row: str, column: int, n: int, m: int) -> float:
    """A formula of the table of constants, as Python reads it."""
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} |"))
    cell = line.split("|")[1 + column].split(", ")[0].strip().removesuffix(" branches")
    text = cell.replace("^", "**").replace("layer", "n")
    text = re.sub(r"(\d)([NM(])", r"\1*\2", text)
    text = re.sub(r"(\)|\d|[NM]) ([(lMN])", r"\1*\2", text)
    names = {"sqrt": math.sqrt, "log": math.log, "N": n, "M": m, "n": n}
    return eval(text, {"__builtins__": {}}, names)


@pytest.mark.parametrize(("column", "stack"), [(1, "decoder"), (2, "encoder_of_pair"), (3, "decoder_of_pair")])
def test_the_formulas_are_the_functions(column, stack):
    n, m = 18, 6
    depths = (m, n) if stack == "decoder_of_pair" else (n, m)
    alpha, beta = deepnorm_constants(*depths, stack)
    assert written("`deepnorm` alpha", column, n, m) == pytest.approx(alpha)
    assert written("`deepnorm` gain", column, n, m) == pytest.approx(beta)
    assert written("`sub` gain", column, n, m) == pytest.approx(sub_ln_gain(*depths, stack))
    branches = 2 * n if column == 1 else 2 * n + 3 * m
    assert fixup_gain(*depths, stack) == pytest.approx(branches**-0.5)
    assert written("`scaled` g", 1, n, m) == pytest.approx(placement("scaled", layer=n).input_gain)


def test_the_examples_run():
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {"normkit.Residual(", "normkit.Transformer(", "normkit.init_for(", "normkit.param_groups("}
    assert all(any(name in code for code in examples) for name in names)
    torch.manual_seed(0)
    space: dict = {}
    for code in examples:
        exec(code, space)
    assert space["y"].shape == space["x"].shape and torch.isfinite(space["logits"]).all()
