"""Imports point down: cli -> lab, bench, audit, convert -> residual, nn -> functional -> ops, reference -> spec."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "normkit"
RANKS = {
    "spec": 0,
    "errors": 0,
    "placement": 0,
    "checks": 1,
    "ops": 2,
    "reference": 1,
    "reference_backward": 1,
    "functional": 3,
    "nn": 4,
    "residual": 5,
    "audit": 6,
    "convert": 6,
    "explain": 7,
    "advise": 8,
    "bench": 6,
    "lab": 7,
    "cli": 9,
}


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "normkit":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("normkit.")}
    return found


def violations(imports: dict[str, set[str]]) -> list[str]:
    """Rooms that import a higher one."""
    return [f"{room} imports {other}" for room, others in imports.items() for other in sorted(others)
            if room in RANKS and other in RANKS and RANKS[other] > RANKS[room]]  # fmt: skip


def test_imports_point_downwards() -> None:
    imports: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        if _room(path) not in ("__init__", "__main__"):
            assert _room(path) in RANKS, f"{path.name} is in no room of the design"
            imports.setdefault(_room(path), set()).update(_imports(path))
    assert "reference" in imports["functional"]  # the walk does see imports
    assert violations(imports) == []


def test_an_upward_import_is_seen() -> None:
    assert violations({"spec": {"nn"}, "nn": {"spec"}}) == ["spec imports nn"]


def test_no_file_is_past_about_500_lines() -> None:
    long = {p.name: n for p in ROOT.rglob("*.py") if (n := len(p.read_text().splitlines())) > 520}
    assert long == {}


@pytest.mark.parametrize("heavy", ["transformers", "rich", "typer", "safetensors", "jinja2", "torch._dynamo"])
def test_import_is_light(heavy: str) -> None:
    code = (
        f"import torch, sys; had = {heavy!r} in sys.modules; import normkit; print(had or {heavy!r} not in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"
