"""``normkit convert`` on files that were made to break it, and on terminals that cannot show them."""

from __future__ import annotations

import io
import json
import struct
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from normkit.cli import main
from normkit.convert.gains import Gain, decide
from tests.cli.test_audit import refused
from tests.cli.test_convert import run


def written(folder: Path, name: str, values: list[float]) -> Path:
    """A file whose one tensor has any name at all."""
    entry = {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, 4 * len(values)]}
    header = json.dumps({name: entry}).encode()
    folder.mkdir(exist_ok=True)
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack(f"<{len(values)}f", *values))
    return file


HOSTILE = ["[red]x[/nope].norm.weight", "\x1b[31mred\x07\nline.norm.weight", "\ud800.norm.weight", "层é.norm.weight"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("name", HOSTILE, ids=["markup", "escapes", "surrogate", "letters"])
def test_names_that_a_terminal_cannot_show(
    name: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No markup, no colours, no crash: such names stand escaped, and go through unchanged."""
    source, out = written(tmp_path / "source", name, [1.0, 1.25]), tmp_path / "out"
    shown = io.BytesIO()
    command = ["normkit", "convert", "gains", str(source), str(out), "--to", "1+w", "--stored", "*=w"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding=encoding))
    with pytest.raises(SystemExit) as ended:
        main()
    sys.stdout.flush()
    assert ended.value.code == 0
    text = shown.getvalue().decode(encoding)
    assert ".norm.weight" in text and "Traceback" not in text and "\x1b" not in text and "\x07" not in text
    size = struct.unpack("<Q", (out / "model.safetensors").read_bytes()[:8])[0]
    header = json.loads((out / "model.safetensors").read_bytes()[8 : 8 + size])
    assert set(header) == {"__metadata__", name}
    assert json.loads(header["__metadata__"]["normkit.gains"]) == {name: "1+w"}


def test_refusals_do_not_colour_the_terminal(tmp_path: Path) -> None:
    message = refused(run("gains", tmp_path / "a\x1b[31m", tmp_path / "out"))
    assert "\\x1b[31m" in message and "\x1b" not in message


def test_empty_and_broken_gains(tmp_path: Path) -> None:
    """A gain without elements has no largest error; one that is NaN stays NaN beside those that are not."""
    tensors = {"a.norm.weight": torch.zeros(0), "b.norm.weight": torch.tensor([1.5, float("nan")])}
    save_file(tensors, tmp_path / "a.safetensors")
    result = run("gains", tmp_path / "a.safetensors", tmp_path / "out", "--to", "1+w", "--stored", "*=w")
    assert result.exit_code == 0, result.output
    assert "w to 1+w" in result.stdout and "off by nan" not in result.stdout
    new = load_file(tmp_path / "out" / "a.safetensors")
    assert new["a.norm.weight"].shape == (0,) and new["b.norm.weight"].nan_to_num(7).tolist() == [0.5, 7]


def test_an_index_with_odd_metadata(tmp_path: Path) -> None:
    written(tmp_path / "source", "a.norm.weight", [1.0, 1.25])
    index = {"metadata": [1], "weight_map": {"a.norm.weight": "model.safetensors"}}
    (tmp_path / "source" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "has metadata that is no object; restore it" in refused(
        run("gains", tmp_path / "source", tmp_path / "out", "--to", "w")
    )


def test_columns_that_nothing_was_measured_for_are_not_shown(tmp_path: Path) -> None:
    source = written(tmp_path / "source", "a.norm.weight", [1.0, 1.25])
    result = run("gains", source, tmp_path / "out", "--to", "1+w", "--stored", "*=w")
    assert "w to 1+w" in result.stdout and "speed" not in result.stdout and "gradients" not in result.stdout


def test_the_time_for_many_norms_grows_as_their_number() -> None:
    """Ten times as many norms of one group take about ten times as long, not a hundred."""

    def seconds(count: int) -> float:
        gains = [Gain(name=str(n), score=8.0, median=1.0, group="x") for n in range(count)]
        start = time.perf_counter()
        assert all(g.stored == "w" for g in decide(gains))
        return time.perf_counter() - start

    few = min(seconds(1000) for _ in range(3))
    assert seconds(10_000) < 40 * few  # a hundred times where each verdict looks at all the others
