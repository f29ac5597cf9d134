"""What is built is what an audit reports: every placement, layer by layer, over 2 and 12 layers."""

from __future__ import annotations

import pytest
import torch

from normkit.audit import audit
from normkit.placement import Placement, known, schedule
from normkit.residual import Transformer

from .blocks import scramble

# Rows that differ only in what no single run of a branch shows: initialization, where lambda starts, the paper's name.
ALIKE = (
    {"pre", "parallel"},
    {"pre", "scaled"},  # the first layer's factor is 1
    {"post", "resi_dual"},
    {"rezero", "skipinit"},
)


def alike(built: str, reported: str) -> bool:
    return built == reported or any({built, reported} <= group for group in ALIKE)


def check(branch: dict, row: Placement, where: str) -> None:
    """One reported branch against the row that it was built from."""
    assert tuple(branch["slots"]) == row.slots, where
    assert alike(row.name, branch["placement"]), where
    assert branch["alpha"] == pytest.approx(row.alpha, rel=1e-5), where
    learned = {"fixed": row.branch_scale, "scalar": "scalar", "channel": "vector"}[row.branch_scale_kind]
    assert branch["branch_scale"] == learned, where
    for slot, names in branch["slots"].items():
        assert len(names) == 1 and f"{slot}_norm" in names[0], where


def report(name: str, depth: int, fuse: bool) -> list[dict]:
    torch.manual_seed(0)
    model = Transformer(vocab=50, dim=32, depth=depth, heads=4, placement=name, fuse=fuse).eval()
    scramble(model, 0.1)
    return audit(model, torch.randint(0, 50, (2, 8))).to_dict()["branches"]


@pytest.mark.parametrize(
    ("depth", "fuse"), [(2, True), (2, False), (12, True), pytest.param(12, False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", known())
def test_branches(name, depth, fuse):
    branches = report(name, depth, fuse)
    plan = schedule(name, depth)
    if plan.second_stream:
        branches = [b for b in branches if b["slots"]]
    kinds = ("attention",) if plan.parallel else ("attention", "ffn")
    built = [(n, kind, plan.branch(n, kind)) for n in range(1, depth + 1) for kind in kinds]
    assert len(branches) == len(built)
    for branch, (n, kind, row) in zip(branches, built, strict=True):
        where = f"layer {n} {kind}: {branch}"
        if name.startswith("hybrid") and n == depth and kind == "ffn" and plan.branch(n, kind).slots == ():
            # The final norm stands where this wiring's stream norms stand too: either reading is right.
            assert branch["slots"] in ({}, {"stream": ["stack.final_norm"]}), where
            continue
        check(branch, row, where)
        assert f"layers.{n - 1}." in branch["name"] + ".", where
        if row.input_gain != 1:
            assert branch["input_gain"] == pytest.approx(row.input_gain, rel=1e-5), where
