"""One's own norms and placements, in files outside the package, through the same trials as the built-in ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import normkit
from normkit.cli import app
from normkit.lab import compare as comparing
from normkit.lab.compare import Effort, candidates, compare
from normkit.lab.executors import Inline
from normkit.lab.register import BUILT_IN, CandidateError, find_norm, find_placement, register

registry = sys.modules[find_norm.__module__]
TINY = Effort(16, 1, (1, 2), 2, (1, 2), 1e-2, (1e-2, 1e-1), 3, 64, 3)
MINE = """
import torch
import normkit

@normkit.lab.register("max-norm")
class MaxNorm(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(features))
    def forward(self, x):
        return x / x.abs().amax(-1, keepdim=True).clamp_min(1e-6) * self.weight

class WrongShape(MaxNorm):
    def forward(self, x):
        return super().forward(x)[..., :-1]

class Raises(MaxNorm):
    def forward(self, x):
        raise RuntimeError("first line\\nsecond line")

class GivesNaN(MaxNorm):
    def forward(self, x):
        return super().forward(x) * float("nan")

class NaNGradient(MaxNorm):
    def forward(self, x):
        return super().forward(x) + (x - x).abs().sqrt()

class OtherType(MaxNorm):
    def forward(self, x):
        return super().forward(x).double()

class Constant(MaxNorm):
    def forward(self, x):
        return torch.ones_like(x) * self.weight

class Leaves(MaxNorm):
    def forward(self, x):
        raise SystemExit(3)

class Sleeps(MaxNorm):
    def forward(self, x):
        import time
        time.sleep(1000)

class NeedsTwo(MaxNorm):
    def __init__(self, features, groups):
        super().__init__(features)

class Dies(MaxNorm):
    def forward(self, x):
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)

def no_module(features):
    return None

damped = normkit.Placement(name="damped", input_norm=True, branch_scale=0.5, final_norm=True)
three = 3
"""


@pytest.fixture(autouse=True)
def _file_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing, "QUICK", TINY)
    monkeypatch.setattr(registry, "_REGISTERED", {})  # each test's file registers the same name


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["lab", "compare", *map(str, arguments)])


@pytest.mark.timeout(900)  # worker processes import torch
def test_a_norm_in_a_file_comes_out_beside_the_built_in_ones(tmp_path: Path) -> None:
    """In a worker process, which loads the file for itself."""
    result = invoke("--norm", "mine.py:MaxNorm", "--seeds", 2, "--jobs", 1, "--plot", "c.svg", "--json", "c.json")
    assert result.exit_code == 0, result.output
    shown = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert shown[1:4] == ["MaxNorm, pre", "layer, pre", "rms, pre"]
    found = json.loads((tmp_path / "c.json").read_text())
    assert [(o["norm"], o["reason"]) for o in found] == [("mine.py:MaxNorm", ""), ("layer", ""), ("rms", "")]
    for outcome in found:
        assert set(outcome["rates"]) == {"0.01", "0.1"}
        assert set(outcome["depths"]) == {"1", "2"} and set(outcome["batches"]) == {"1", "2"}
        assert outcome["quality"]["low"] < outcome["quality"]["mean"] < outcome["quality"]["high"]
        assert outcome["forward"]["mean"] > 0 and outcome["backward"]["mean"] > 0
    assert found[0]["parameters"] == 16 and found[1]["parameters"] == 32
    drawing = (tmp_path / "c.svg").read_text()
    assert all(f">{name}<" in drawing for name in ("MaxNorm, pre", "layer, pre", "rms, pre", "learning rate"))


def test_bad_norms_have_a_reason_in_their_row_and_do_not_stop_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normkit.lab.trial.CHECK_SECONDS", 5.0)  # one such check takes milliseconds
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(3)")
    reasons = {
        "WrongShape": "its output has shape (4, 32, 15); the input has (4, 32, 16)",
        "Raises": "RuntimeError: first line second line",
        "GivesNaN": "its output of standard normal numbers is not finite",
        "NaNGradient": "the gradient of its input is not finite",
        "OtherType": "its output is torch.float64; the input is torch.float32",
        "Constant": "its output has no gradient with respect to the input",
        "Leaves": "SystemExit: 3",
        "Sleeps": "it takes more than 5 s for a few small inputs",
        "NeedsTwo": "TypeError: NeedsTwo.__init__() missing 1 required positional argument: 'groups'",
        "no_module": "mine.py:no_module made a NoneType of 16 features; it must be a torch.nn.Module",
        "Missing": "mine.py has no Missing",
        "three": "mine.py:three is no norm: it must make a module from its number of features",
        "damped": "mine.py:damped is no norm: it must make a module from its number of features",
    }
    names = [argument for name in reasons for argument in ("--norm", f"mine.py:{name}")]
    reasons["leaves.py:X"] = "leaves.py cannot be imported: SystemExit: 3"
    names += ["--norm", "leaves.py:X"]
    result = invoke(*names, "--seeds", 1, "--executor", "inline", "--json", "-")
    assert result.exit_code == 1
    found = {o["norm"].removeprefix("mine.py:"): o["reason"] for o in json.loads(result.stdout)}
    assert found == {**reasons, "layer": "", "rms": ""}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_norm_that_kills_its_process_is_one_row() -> None:
    result = invoke("--norm", "mine.py:Dies", "--seeds", 1, "--jobs", 1)
    assert result.exit_code == 1
    assert "Dies, pre: its worker process died" in result.stdout
    assert all(f"{name}, pre" in result.stdout for name in ("layer", "rms"))


def test_a_placement_in_a_file_comes_out_beside_pre_and_post() -> None:
    result = invoke("--placement", "mine.py:damped", "--seeds", 1, "--executor", "inline", "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [o["placement"] for o in found] == ["mine.py:damped", "pre", "post"]
    losses = {o["placement"]: o["quality"]["mean"] for o in found}
    assert len(set(losses.values())) == 3  # three wirings, not one three times


def test_a_norm_and_a_placement_that_compute_the_same_come_out_the_same() -> None:
    """`torch.nn.LayerNorm` against the built-in one, from the same seeds."""
    ours, builtin, _ = compare(["torch.nn:LayerNorm"], seeds=1, effort=TINY, executor=Inline())
    assert ours.quality.mean == pytest.approx(builtin.quality.mean, rel=1e-5)
    assert ours.parameters == builtin.parameters


def test_every_built_in_norm_and_placement_is_found() -> None:
    x = torch.randn(2, 3, 8)
    for name in BUILT_IN:
        assert find_norm(name)(8)(x).shape == x.shape
    for name in (*normkit.PLACEMENTS, *normkit.SCHEDULES):
        assert find_placement(name) == name


def test_registered_names_are_found_in_this_process_and_by_file() -> None:
    assert find_norm("mine.py:max-norm")(4)(torch.ones(1, 4)).tolist() == [[1.0] * 4]

    @register("halved-for-a-test")
    def halved(features: int) -> torch.nn.Module:
        return torch.nn.Linear(features, features)

    assert find_norm("halved-for-a-test") is halved
    with pytest.raises(ValueError, match="is taken"):
        register("halved-for-a-test")(torch.nn.LayerNorm)
    for bad, message in (("", "not empty"), ("a:b", "without colon"), ("layer", "built-in"), ("sandwich", "built-in")):
        with pytest.raises(ValueError, match=message):
            register(bad)
    with pytest.raises(TypeError, match="register takes a class or function"):
        register("a-number")(3)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("lair", "'lair' is not a built-in norm"),
        ("nowhere.py:X", "there is no file nowhere.py"),
        ("no.such.module:X", "cannot be imported: ModuleNotFoundError"),
        ("broken.py:X", "broken.py cannot be imported: ZeroDivisionError"),
    ],
)
def test_references_that_lead_nowhere_are_one_line(reference: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(CandidateError, match=message) as caught:
        find_norm(reference)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "broken.py") not in {getattr(m, "__file__", None) for m in list(sys.modules.values())}


def test_what_stands_beside_what() -> None:
    assert candidates(["mine"], []) == [("mine", "pre"), ("layer", "pre"), ("rms", "pre")]
    assert candidates(["rms"], []) == [("rms", "pre"), ("layer", "pre")]
    assert candidates([], ["own"]) == [("layer", "own"), ("layer", "pre"), ("layer", "post")]
    assert candidates(["mine"], ["pre"]) == [("mine", "pre"), ("mine", "post")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plot", "c.txt"), "--plot must end in .svg, .png or .pdf; got c.txt"),
        (("--plot", "nowhere/c.svg"), "there is no folder nowhere"),
        (("--executor", "cloud"), "--executor must be processes"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_measured(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
