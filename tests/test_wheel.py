"""The wheel: one for every Python and torch, no Python linkage, small; installed elsewhere, it computes the same.

The second environment is any Python that has a torch >= 2.10 and is not the one that runs the tests: name it in
NORMKIT_SECOND_PYTHON. Without one the wheel is still installed into a fresh environment that borrows this torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_serves_every_python_and_holds_what_it_should(wheel: Path) -> None:
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    assert wheel.stat().st_size < 2 * 2**20
    names = zipfile.ZipFile(wheel).namelist()
    assert {"normkit/ops/normkit_native.so", "normkit/ops/_build.json"} <= set(names)
    assert not [n for n in names if n.startswith(("csrc/", "tests/"))]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", ["this", "second"])
def test_the_wheel_computes_in_another_environment(wheel: Path, which: str, tmp_path: Path) -> None:
    python = sys.executable if which == "this" else os.environ.get("NORMKIT_SECOND_PYTHON", "")
    if not python:
        pytest.skip("NORMKIT_SECOND_PYTHON names no Python with another torch >= 2.10")
    run(python, "-m", "venv", tmp_path / "venv")
    second = tmp_path / "venv" / "bin" / "python"
    purelib = run(second, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    lender = sysconfig.get_paths()["purelib"]
    if which == "second":
        lender = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    run(second, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    # A plain path line lends the packages without their .pth files, so that no editable normkit comes along.
    Path(purelib, "lender.pth").write_text(f"{lender}\n")
    told = run(second, "-P", "-c", SMOKE, purelib, cwd=tmp_path)
    assert "avx" in told or "baseline" in told
