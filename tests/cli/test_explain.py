"""The explain command: what it prints, reads and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from normkit import reference
from normkit.cli import app
from normkit.placement import known
from normkit.spec import NAMED


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["explain", *args])


def test_numbers() -> None:
    found = run("rms", "1", "2", "3", "4")
    assert found.exit_code == 0
    for text in ("RMSNorm", "2.7386", "0.3651", "1.4606", "sqrt(4) = 2.0000"):
        assert text in found.stdout
    assert "-1.3416" in run("layer", "1", "2", "3", "4").stdout
    assert "-2.0000" in run("layer", "1", "-2", "3").stdout


def test_a_convention_with_its_gain() -> None:
    found = run("--spec", "gemma", "1", "2", "--weight", "0,-0.5", "--dtype", "bfloat16", "--json", "-")
    data = json.loads(found.stdout)
    x, w = torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([0.0, -0.5]).bfloat16()
    y = reference.normalize(x, NAMED["gemma"], w)
    assert data["steps"][-1]["values"] == y.tolist() and data["dtype"] == "bfloat16"


@pytest.mark.parametrize("suffix", [".npy", ".pt", ".safetensors"])
def test_files(tmp_path: Path, suffix: str) -> None:
    from safetensors.torch import save_file

    x, path = torch.tensor([[1.0, 2.0, 4.0], [1.0, 0.0, 3.0]]), tmp_path / f"x{suffix}"
    if suffix == ".npy":
        np.save(path, x.numpy())
    else:
        torch.save(x, path) if suffix == ".pt" else save_file({"x": x, "y": x + 1}, path)
    key = ["--key", "x"] if suffix == ".safetensors" else []
    found = run("layer", str(path), "--at", "1,0", "--json", "-", *key)
    assert json.loads(found.stdout)["steps"][0]["values"] == [1.0, 0.0, 3.0]
    if key:
        refused = run("layer", str(path))
        assert refused.exit_code == 2 and "--key" in refused.stderr


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "touched",))

    torch.save(Evil(), tmp_path / "evil.pt")
    found = run("rms", str(tmp_path / "evil.pt"))
    assert found.exit_code == 2 and "cannot read" in found.stderr
    assert not (tmp_path / "touched").exists()


UNUSABLE = {
    "complex.npy": (lambda path: np.save(path, np.array([1 + 2j])), "holds a complex tensor"),
    "text.npy": (lambda path: path.write_text("no array"), "is no .npy file"),
    "objects.npy": (lambda path: np.save(path, np.array([1, None]), allow_pickle=True), "cannot read"),
    "meta.pt": (lambda path: torch.save(torch.empty(3, device="meta"), path), "holds a meta tensor"),
    "sparse.pt": (lambda path: torch.save(torch.eye(3).to_sparse(), path), "holds a sparse tensor"),
    "list.pt": (lambda path: torch.save([torch.ones(3)], path), "holds no tensor"),
    "code.pt": (lambda path: torch.save(Path.cwd, path), "is not executed"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_files_without_usable_numbers(tmp_path: Path, name: str) -> None:
    write, message = UNUSABLE[name]
    write(tmp_path / name)
    found = run("rms", str(tmp_path / name))
    assert found.exit_code == 2 and message in found.stderr, found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_other_byte_orders(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([1, 2, 3], dtype=">f4"))
    assert json.loads(run("rms", str(tmp_path / "x.npy"), "--json", "-").stdout)["steps"][0]["values"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("numbers", "said"),
    [(["nan", "1"], "not every number is finite"), (["inf", "1"], "not every number"), (["0", "0"], "x is zero")],
)
def test_numbers_without_a_direction(numbers: list[str], said: str) -> None:
    assert f"no direction: {said}" in run("rms", *numbers).stdout
    json.loads(run("rms", *numbers, "--json", "-").stdout, parse_constant=pytest.fail)  # strict JSON has no NaN


def test_a_constant_row_has_no_direction_left() -> None:
    assert "no direction: x̂ is zero" in run("layer", "3", "3", "3").stdout


def test_a_module_of_an_audited_model() -> None:
    found = run("tests.cli.explained:factory", "--module", "norm", "--digits", "6")
    assert found.exit_code == 0, found.stderr
    apart = re.search(r"within (\S+) of these", found.stdout)
    assert "(1 + w)" in found.stdout and apart is not None and float(apart[1]) < 1e-6  # float32, values near 1
    refused = run("tests.cli.explained:factory", "--module", "linear")
    assert refused.exit_code == 2 and "no norm is called 'linear'" in refused.stderr


@pytest.mark.parametrize("name", known())
def test_placements(name: str) -> None:
    found = run(name, "--depth", "8")
    assert found.exit_code == 0 and "y = " in found.stdout and "source" in found.stdout
    assert json.loads(run(name, "--json", "-").stdout)["branches"]


def test_pictures(tmp_path: Path) -> None:
    assert run("group", "--shape", "2x4x3x3", "--svg", str(tmp_path / "a.svg")).exit_code == 0
    assert run("pre", "--png", str(tmp_path / "b.png")).exit_code == 0
    assert "<svg" in (tmp_path / "a.svg").read_text() and (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nosuch"], "no normalization or placement is called 'nosuch'"),
        ([], "name a kind"),
        (["rms", "1", "two"], "got 'two'"),
        (["rms", "missing.npy"], "there is no file missing.npy"),
        (["rms", "1", "2", "--shape", "3"], "does not hold 2 numbers"),
        (["rms", "1", "2", "--shape", "axb"], "--shape must be integers"),
        (["rms", "1", "2", "--at", "7"], "at must be an index"),
        (["rms", "1", "2", "--weight", "1,2,3"], "weight has shape"),
        (["rms", "1", "2", "--gate", "1,2"], "has no gate"),
        (["rms", "1", "2", "--eps", "-1"], "eps must be"),
        (["group", "--shape", "2x5x2", "--groups", "2"], "groups=2 does not divide"),
        (["pre", "1"], "takes no numbers"),
        (["pre", "--depth", "0"], "depth must be an integer >= 1"),
        (["pre", "--depth", "100000000"], "depth must be at most"),
        (["rms", "--shape", "-2x4"], "--shape must be integers >= 0"),
        (["rms", "1", "2", "--shape", "-1x2"], "--shape must be integers >= 0"),
        (["rms", "--shape", "100000x100000"], "at most"),
        (["--module", "norm"], "needs a model before it"),
        (["nosuch_model", "--module", "norm"], "nosuch_model"),
        (["rms", "1", "--svg", "no/such/folder.svg"], "No such file"),
    ],
)
def test_refusals_are_one_line(args: list[str], message: str) -> None:
    found = run(*args)
    assert found.exit_code == 2 and message in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_help_has_examples_and_the_list_is_whole() -> None:
    assert "Example: normkit explain rms 1 2 3 4" in run("--help").stdout
    listed = run("--list").stdout
    assert all(name in listed for name in [*NAMED, *known(), "layer", "rms"])
