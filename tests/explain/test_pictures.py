"""The pictures show what they say: cells of the chosen set, boxes of the used slots."""

from __future__ import annotations

import sys

import pytest
import torch
from matplotlib.colors import to_rgb

from normkit.explain import DrawError, draw_sets, draw_values, draw_wiring, explain
from normkit.explain.draw import CHOSEN, OUTSIDE
from normkit.explain.wiring import branches, equation, notes
from normkit.placement import known
from normkit.spec import NAMED, TORCH_BATCH, TORCH_GROUP, TORCH_INSTANCE, TORCH_LAYER, TORCH_RMS, NormSpec


def _cells(figure, colour: str) -> int:
    pictures = [i.get_array() for axis in figure.axes for i in axis.images]
    return sum(int((abs(p - torch.tensor(to_rgb(colour)).numpy()).max(-1) < 1e-6).sum()) for p in pictures)


@pytest.mark.parametrize(
    ("spec", "shape", "filled"),
    [
        (TORCH_LAYER, (2, 4, 6), 6),
        (TORCH_LAYER, (5,), 5),
        (TORCH_LAYER.replace(channel_dim=1), (2, 4, 3, 2), 4),
        (TORCH_BATCH, (3, 4, 2, 2), 12),
        (TORCH_BATCH, (5, 4), 5),
        (TORCH_INSTANCE, (3, 4, 2, 2), 4),
        (TORCH_GROUP.replace(groups=2), (3, 4, 2, 2), 8),
        (TORCH_GROUP.replace(groups=2, channel_dim=-1), (3, 2, 2, 4), 8),
    ],
)
def test_as_many_cells_are_filled_as_share_the_statistic(spec: NormSpec, shape: tuple[int, ...], filled: int) -> None:
    assert _cells(draw_sets(spec, shape), CHOSEN) == filled


def test_features_outside_the_statistic_have_their_own_colour() -> None:
    figure = draw_sets(TORCH_RMS.replace(partial=0.5), (2, 3, 8))
    assert (_cells(figure, CHOSEN), _cells(figure, OUTSIDE)) == (4, 4)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_convention_can_be_drawn(name: str, tmp_path) -> None:
    draw_sets(NAMED[name]).savefig(tmp_path / "sets.svg", format="svg")
    assert "<svg" in (tmp_path / "sets.svg").read_text()


@pytest.mark.parametrize("name", known())
def test_every_placement_is_drawn_with_its_norms(name: str) -> None:
    figure, found = draw_wiring(name), branches(name)
    for axis, branch in zip(figure.axes, found, strict=True):
        norms = [t.get_text() for t in axis.texts if t.get_text().startswith("norm")]
        expected = len(branch.placement.slots) + branch.placement.qkv_norm
        assert len(norms) == expected
        without_inner = len(branch.placement.slots) - branch.placement.inner_norm
        assert equation(branch.placement).count("N(") == without_inner
    assert any(line.startswith("source: ") for line in notes(name))


def test_values_of_a_long_set_are_all_drawn() -> None:
    figure = draw_values(explain(TORCH_LAYER, torch.arange(100.0)))
    assert [len(axis.collections[0].get_segments()) for axis in figure.axes] == [100, 100, 100]


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(DrawError, match="1 to 4 dims"):
        draw_sets(TORCH_LAYER, (1, 1, 1, 1, 2))


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DrawError, match=r"pip install 'normkit\[lab\]'"):
        draw_sets(TORCH_LAYER)
