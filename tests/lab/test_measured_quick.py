"""Every measured claim in its quick form: it runs, is judged and drawn; its numbers depend on the seed alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from normkit.lab.claim import OUTCOMES, Row
from normkit.lab.claims import all_claims
from normkit.lab.run import perform, tasks_of

MEASURED = {name: claim for name, claim in all_claims().items() if claim.kind == "measured"}
TIMES = ("time", "saved", "time_share", "norm", "norm_with_backward", "step")
"""Results that are times, or ratios of times: two runs never agree in them."""


@cache
def quick_rows(name: str) -> tuple[Row, ...]:
    return tuple(map(perform, tasks_of([MEASURED[name]], quick=True)))


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in result.items() if k not in TIMES and not k.endswith("_microseconds")}


@pytest.mark.parametrize("name", MEASURED)
def test_quick_form_gives_a_verdict(name: str) -> None:
    rows = quick_rows(name)
    assert [row.error for row in rows if row.error is not None] == []
    assert [Row.from_json(row.to_json()).key for row in rows] == [row.key for row in rows]
    assert MEASURED[name].judge(list(rows)).outcome in OUTCOMES


@pytest.mark.parametrize("name", MEASURED)
def test_quick_form_is_drawn(name: str) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    draw = MEASURED[name].plot
    assert draw is not None
    figure, axes = plt.subplots()
    draw(list(quick_rows(name)), axes)
    figure.canvas.draw()
    assert axes.has_data()
    assert axes.get_xlabel() and axes.get_ylabel()
    plt.close(figure)


@pytest.mark.parametrize("name", MEASURED)
def test_numbers_depend_on_the_seed_alone(name: str) -> None:
    """The same seed gives the same bits, whatever torch's own generator is at, which stays where it is."""
    claim, row = MEASURED[name], quick_rows(name)[0]
    torch.manual_seed(12345)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)  # as the runner's workers
    try:
        again = claim.measure(seed=row.seed, **row.cell)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), before)
    assert without_times(again) == without_times(row.result)


@pytest.mark.parametrize("name", MEASURED)
def test_seeds_matter(name: str) -> None:
    by_seed = {seed: [r.result for r in quick_rows(name) if r.seed == seed] for seed in (0, 1)}
    assert by_seed[0] != by_seed[1]


@pytest.mark.parametrize("name", MEASURED)
def test_cells_say_all_that_a_run_needs(name: str) -> None:
    """Both forms are made of the same settings; the quick one is smaller only in their values."""
    claim = MEASURED[name]
    settings = {form: {tuple(sorted(cell)) for cell in claim.cells(form)} for form in (True, False)}
    assert settings[True] == settings[False]
    assert len(claim.cells(True)) <= len(claim.cells(False))
    assert claim.seeds >= 3 and claim.criterion and claim.source
