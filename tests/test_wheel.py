"""The wheel: one for every Python and torch, no Python linkage, small; installed elsewhere, it computes the same.

Elsewhere is a Python of another version with the oldest torch that the package promises to run on.
NORMKIT_SECOND_PYTHON may name one that has a torch already; else the first of python3.13 and python3.12 that starts
gets an environment under build/, into which torch is downloaded once (a CUDA build: gigabytes).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OTHER_TORCH = "torch==2.10.*"
SMOKE = """
import sys, pathlib, warnings, torch, normkit
from normkit import ops, nn, functional as F
assert pathlib.Path(normkit.__file__).is_relative_to(sys.argv[1]), normkit.__file__
assert ops.LOADED, ops.report().reason
warnings.simplefilter("error")
x = torch.randn(4, 8, 6, 6, requires_grad=True)
for kind, args in (("LayerNorm", (6,)), ("RMSNorm", (6,)), ("GroupNorm", (2, 8)), ("BatchNorm2d", (8,)),
                   ("InstanceNorm2d", (8,))):
    y, expected = getattr(nn, kind)(*args)(x), getattr(torch.nn, kind)(*args)(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    y.square().sum().backward()
y, stream = F.rms_norm(x, (6,), torch.ones(6), residual=x)
assert torch.equal(stream, x + x)
print(sys.version.split()[0], torch.__version__, ops.report().instruction_set)
"""


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT, timeout=1500)
    return next(folder.glob("*.whl"))


def _version(python: str) -> str | None:
    """The version of a Python that starts; a name on the path may be a switch that refuses."""
    code = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _other_python() -> str | None:
    for minor in (13, 12, 14):
        if minor == sys.version_info.minor:
            continue
        given = [shutil.which(f"python3.{minor}")]
        given += [str(p) for p in sorted(Path(sys.base_prefix).parent.glob(f"3.{minor}.*/bin/python3"))]
        for python in given:
            if python and _version(python) == f"3.{minor}":
                return python
    return None


@pytest.fixture(scope="module")
def second_python() -> str:
    """A Python that has another torch."""
    if named := os.environ.get("NORMKIT_SECOND_PYTHON"):
        return named
    other = _other_python()
    if other is None:
        pytest.skip("no python3.12 or later but this one; name one with another torch in NORMKIT_SECOND_PYTHON")
    folder = ROOT / "build" / f"second-{_version(other)}"
    python = str(folder / "bin" / "python")
    if not (folder / ".installed").exists():
        run(other, "-m", "venv", "--clear", folder)
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, OTHER_TORCH, "numpy", "typer", "rich", "safetensors", timeout=3000)
        (folder / ".installed").touch()
    return python


def test_what_goes_into_the_wheel_is_small() -> None:
    """As `test_the_wheel_serves_every_python_and_holds_what_it_should` finds, without building one."""
    from normkit import ops

    if not ops.LOADED:
        pytest.skip("no native library here")
    files = [f for f in (ROOT / "src" / "normkit").rglob("*") if f.is_file() and f.suffix != ".pyc"]
    assert sum(len(zlib.compress(f.read_bytes())) for f in files) < 1.93 * 2**20  # and names, hashes, metadata


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_serves_every_python_and_holds_what_it_should(wheel: Path) -> None:
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert wheel.stat().st_size < 2 * 2**20
    names = zipfile.ZipFile(wheel).namelist()
    assert {"normkit/ops/normkit_native.so", "normkit/ops/_build.json"} <= set(names)
    assert not [n for n in names if n.startswith(("csrc/", "tests/"))]


def installed(wheel: Path, python: str, folder: Path) -> str:
    """Install the wheel alone into a fresh environment that borrows a Python's packages; what the smoke test prints."""
    run(python, "-m", "venv", folder / "venv")
    fresh = folder / "venv" / "bin" / "python"
    site = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    purelib, lender = run(fresh, "-c", site).strip(), run(python, "-c", site).strip()
    run(fresh, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    # A plain path line lends the packages without their .pth files, so that no editable normkit comes along.
    Path(purelib, "lender.pth").write_text(f"{lender}\n")
    return run(fresh, "-P", "-c", SMOKE, purelib, cwd=folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_computes_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    told = installed(wheel, sys.executable, tmp_path)
    assert "avx" in told or "baseline" in told


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheel_computes_in_another_python_with_another_torch(
    wheel: Path, second_python: str, tmp_path: Path
) -> None:
    import torch

    python, other_torch, level = installed(wheel, second_python, tmp_path).split()
    assert "avx" in level or level == "baseline"
    mine = (sysconfig.get_python_version(), torch.__version__.split("+")[0])
    assert (python.rpartition(".")[0], other_torch.split("+")[0]) != mine
    print(f"python {python}, torch {other_torch}, {level}")
