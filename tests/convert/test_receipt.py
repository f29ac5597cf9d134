"""The receipt: what it says, and that it cannot pass off a failed comparison as a small one."""

from __future__ import annotations

import io
import json
import math

import pytest
import torch

from normkit.convert import Change, ConversionError, Difference, Errors, Receipt, Refusal, Speed
from normkit.convert.receipt import deviation, deviations, worst


def receipt(**more: object) -> Receipt:
    errors = Errors(original=Difference(outputs=1e-7, gradients=2e-6), exact=Difference(outputs=3e-7))
    changes = tuple(
        Change(name=f"layers.{i}.norm", what="RMSNorm", errors=errors, speed=Speed(before=2.0, after=1.0))
        for i in range(3)
    )
    refused = (Refusal("head", "no kernel"), Refusal("layers.0.odd", "slower"), Refusal("layers.1.odd", "slower"))
    return Receipt(conversion="swap", model="Net", changed=changes, refused=refused, errors=errors, **more)  # type: ignore[arg-type]


def shown(made: Receipt) -> str:
    from rich.console import Console

    out = io.StringIO()
    made.show(Console(file=out, width=140))
    return out.getvalue()


def test_everything_is_in_the_json(tmp_path) -> None:
    made = receipt(notes=("a note",), speed=Speed(before=3.0, after=2.0))
    read = json.loads(made.to_json(tmp_path / "receipt.json"))
    assert read == json.loads((tmp_path / "receipt.json").read_text()) == made.to_dict()
    assert [c["name"] for c in read["changed"]] == [c.name for c in made.changed]
    assert read["refused"][0] == {"name": "head", "reason": "no kernel"}
    assert read["errors"]["original"] == {"outputs": 1e-7, "gradients": 2e-6}
    assert read["changed"][0]["speed"]["ratio"] == 2.0
    assert read["speed"]["ratio"] == 1.5


def test_layers_share_a_row() -> None:
    text = shown(receipt(notes=("a note",)))
    assert "3 changed, 3 left" in text
    assert text.count("layers.*.norm") == 1
    assert "layers.*.odd: slower (2 of them)" in text
    assert "head: no kernel" in text
    assert "1.0e-07" in text and "2.0e-06" in text and "2.00x" in text and "a note" in text


def test_undo_happens_once() -> None:
    calls: list[int] = []
    made = receipt(revert=lambda: calls.append(1))
    made.undo()
    made.undo()
    assert calls == [1] and made.undone and made.to_dict()["undone"]


def test_no_way_back_is_said() -> None:
    with pytest.raises(ConversionError, match="cannot be undone"):
        receipt().undo()


def test_a_failed_undo_can_be_tried_again() -> None:
    def refuse() -> None:
        raise ConversionError("sharded since")

    made = receipt(revert=refuse)
    with pytest.raises(ConversionError, match="sharded"):
        made.undo()
    assert not made.undone


NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize(
    ("got", "expected", "wrong"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([1.0, 4.0], [1.0, 4.0], 0.0),
        ([NAN, 4.0], [1.0, 4.0], math.inf),
        ([1.0, 4.0], [NAN, 4.0], math.inf),
        ([NAN, 4.0], [NAN, 4.0], 0.0),
        ([INF, 4.0], [-INF, 4.0], math.inf),
        ([NAN, 4.0], [INF, 4.0], math.inf),
        ([INF, 3.0], [INF, 4.0], 0.25),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_deviation(got: list[float], expected: list[float], wrong: float) -> None:
    found = deviation(torch.tensor(got), torch.tensor(expected))
    assert found == wrong or (math.isinf(wrong) and found > 1e6)


def test_a_missing_gradient_is_infinitely_wrong() -> None:
    one = torch.ones(2)
    assert deviations([None, one], [None, one]) == 0
    assert deviations([one, None], [one, one]) == math.inf
    assert deviations([one], [one, one]) == math.inf
    assert deviations([None], [None]) is None


def test_the_worst_is_kept() -> None:
    found = worst([Difference(outputs=1.0), Difference(outputs=2.0, gradients=0.5), Difference(outputs=math.nan)])
    assert math.isnan(found.outputs or 0) and found.gradients == 0.5
    assert worst([]) == Difference()
