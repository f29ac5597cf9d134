"""Checkpoints rewritten: whole or not at all, bit for bit, and one clear line for what cannot be read or written."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from normkit.convert import ConversionError
from normkit.convert import stream as stream_module
from normkit.convert.checkpoint import open_checkpoint
from normkit.convert.stream import Part, assembled, copied, write_checkpoint
from tests.convert.checkpoints import digest, sharded, trained


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return sharded(tmp_path / "source", trained(24))


def rewrite(source: Path, out: Path, **how: object) -> tuple[str, ...]:
    """A copy of every tensor."""
    checkpoint = open_checkpoint(source)
    return write_checkpoint(checkpoint, out, [copied(t) for t in checkpoint.tensors.values()], **how)


def leftovers(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.name.startswith(".")]


def test_tensors_metadata_and_other_files_are_kept(source: Path, tmp_path: Path) -> None:
    before = digest(source)
    assert rewrite(source, tmp_path / "out", metadata={"model-00001-of-00002.safetensors": {"mine": "1"}}) == ()
    assert digest(source) == before
    out = tmp_path / "out"
    assert set(digest(out)) == set(before)
    for file in out.glob("*.safetensors"):
        want, got = load_file(source / file.name), load_file(file)
        assert want.keys() == got.keys()
        for name in want:
            assert got[name].dtype == want[name].dtype and torch.equal(got[name], want[name]), name
        with safe_open(file, "pt") as opened:
            extra = {"mine": "1"} if "00001" in file.name else {}
            assert opened.metadata() == {"format": "pt", **extra}
    for name in ("tokenizer.json", "1_Pooling/config.json"):
        assert digest(out)[name] == before[name]
    assert json.loads((out / "model.safetensors.index.json").read_text()) == json.loads(
        (source / "model.safetensors.index.json").read_text()
    ) | {
        "weight_map": dict(
            sorted(json.loads((source / "model.safetensors.index.json").read_text())["weight_map"].items())
        )
    }
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE(source.stat().st_mode)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64],
)
def test_every_dtype_is_copied_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randint(0, 2, (7, 3)).to(dtype) if dtype == torch.bool else torch.randn(7, 3).mul(9).to(dtype)
    save_file({"x": values, "scalar": values[0, 0].clone()}, tmp_path / "a.safetensors")
    rewrite(tmp_path / "a.safetensors", tmp_path / "out")
    got = load_file(tmp_path / "out" / "a.safetensors")["x"]
    assert got.dtype == dtype and torch.equal(got.view(torch.uint8), values.view(torch.uint8))
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["a.safetensors"]


def test_matrices_are_turned_and_cut_in_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "CHUNK", 64)  # several panels a matrix, the last one ragged
    matrix, bias = torch.randn(5, 21), torch.randn(21)
    save_file({"w": matrix, "b": bias}, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    w, b = checkpoint.tensors["w"], checkpoint.tensors["b"]
    cut = [assembled(f"w{n}", "a.safetensors", [Part(w, True, (n, 3))]) for n in range(3)]
    cut += [assembled(f"b{n}", "a.safetensors", [Part(b, False, (n, 3))]) for n in range(3)]
    write_checkpoint(checkpoint, tmp_path / "cut", cut)
    got = load_file(tmp_path / "cut" / "a.safetensors")
    for n in range(3):
        assert torch.equal(got[f"w{n}"], matrix.T.chunk(3)[n]) and torch.equal(got[f"b{n}"], bias.chunk(3)[n])
    parts = open_checkpoint(tmp_path / "cut")
    back = [
        assembled("w", "a.safetensors", [Part(parts.tensors[f"w{n}"]) for n in range(3)], transposed=True),
        assembled("b", "a.safetensors", [Part(parts.tensors[f"b{n}"]) for n in range(3)]),
    ]
    write_checkpoint(parts, tmp_path / "back", back)
    again = load_file(tmp_path / "back" / "a.safetensors")
    assert torch.equal(again["w"], matrix) and torch.equal(again["b"], bias)


def test_linked_files_are_read_through_and_other_weights_named(source: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    shutil.move(source / "model-00001-of-00002.safetensors", blob)
    (source / "model-00001-of-00002.safetensors").symlink_to(blob)
    (source / "pytorch_model.bin").write_bytes(b"old")
    (source / ".cache").mkdir()
    (source / "dangling").symlink_to("nowhere")
    os.mkfifo(source / "pipe")
    left = rewrite(source, tmp_path / "out")
    assert len(left) == 4 and any("pytorch_model.bin was not copied: other weights" in line for line in left)
    assert not (tmp_path / "out" / "model-00001-of-00002.safetensors").is_symlink()
    assert open_checkpoint(tmp_path / "out").tensors.keys() == open_checkpoint(source).tensors.keys()


LIMITED = """
import signal, sys
from normkit.convert.checkpoint import open_checkpoint
from normkit.convert.stream import copied, write_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
source = open_checkpoint(sys.argv[1])
write_checkpoint(source, sys.argv[2], [copied(t) for t in source.tensors.values()])
"""


def test_killed_at_random_points(tmp_path: Path) -> None:
    """Each run is killed a random time after it began to write; the times cover the whole of an undisturbed run."""
    shards = [{f"{n}.{m}": torch.randn(256, 1024) for m in range(8)} for n in range(8)]
    source, out = sharded(tmp_path / "source", shards), tmp_path / "out"
    before = digest(source)
    forking = multiprocessing.get_context("fork")

    def run_until(seconds: float | None) -> tuple[int | None, float]:
        began = forking.Event()

        def work() -> None:
            began.set()
            rewrite(source, out)

        process = forking.Process(target=work)
        process.start()
        began.wait()
        start = time.monotonic()
        if seconds is None:
            process.join()
        else:
            time.sleep(seconds)
            process.kill()
            process.join()
        return process.exitcode, time.monotonic() - start

    code, writing = run_until(None)
    assert code == 0
    complete = digest(out)
    shutil.rmtree(out)
    generator, midway = random.Random(0), 0
    for kill in range(100):
        if kill >= 20 and midway >= 5:
            break
        code, _ = run_until(generator.random() * writing)
        assert digest(source) == before
        left = [p for p in tmp_path.iterdir() if p.name not in ("source", "out")]
        midway += bool(left)
        assert all(p.name.startswith(".out.normkit-partial-") for p in left) and len(left) <= 1
        if out.exists():  # renamed before the kill: then it is whole
            assert digest(out) == complete
            shutil.rmtree(out)
        else:
            assert code == -signal.SIGKILL
    assert midway >= 5  # of 20 kills or more: how many hit a run while it was writing is a matter of the machine's load
    rewrite(source, out)
    assert digest(out) == complete
    assert leftovers(tmp_path) == []


def test_a_living_run_is_not_cleaned_up(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)

    def second() -> list[bytearray]:
        with pytest.raises(ConversionError, match="another run is writing this output"):
            rewrite(source, tmp_path / "out")
        return []

    outputs = [copied(t) for t in checkpoint.tensors.values()]
    empty = next(n for n, o in enumerate(outputs) if o.nbytes == 0)
    outputs[empty] = stream_module.Output("empty", "F32", (0, 3), 0, outputs[empty].file, lambda: iter(second()))
    write_checkpoint(checkpoint, tmp_path / "out", outputs)
    assert (tmp_path / "out").is_dir()


def refused(message: str, source: Path, out: Path) -> None:
    """One line, nothing written, nothing changed."""
    before = digest(source) if source.is_dir() else None
    with pytest.raises(ConversionError, match=message) as caught:
        rewrite(source, out)
    assert "\n" not in str(caught.value)
    assert before is None or digest(source) == before
    if out.parent.is_dir():
        assert [p.name for p in out.parent.iterdir() if ".normkit-partial-" in p.name] == []


def first_shard(source: Path) -> Path:
    return source / "model-00001-of-00002.safetensors"


def with_header(change: object) -> object:
    """A function that rewrites the first shard's header."""

    def apply(source: Path) -> None:
        data = first_shard(source).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        change(header)  # type: ignore[operator]
        text = json.dumps(header).encode()
        first_shard(source).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return apply


def _index(source: Path, change: object) -> None:
    path = source / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content)  # type: ignore[operator]
    path.write_text(json.dumps(content))


def _overlap(header: dict) -> None:
    a, b = [k for k in header if "layernorm" in k][:2]
    header[a]["data_offsets"] = header[b]["data_offsets"]


NORM = "model.layers.0.input_layernorm.weight"
HOSTILE = {
    "missing_shard": (lambda s: first_shard(s).unlink(), "lacks 1 of 2 shards: model-00001-of-00002"),
    "truncated": (lambda s: os.truncate(first_shard(s), first_shard(s).stat().st_size - 5), "is truncated: it has"),
    "truncated_header": (lambda s: os.truncate(first_shard(s), 40), "is truncated or no safetensors file"),
    "empty_file": (lambda s: os.truncate(first_shard(s), 0), "is truncated: it has 0 bytes"),
    "html": (lambda s: first_shard(s).write_text("<!doctype html>" * 9), "corrupt or no safetensors file"),
    "lfs_pointer": (
        lambda s: first_shard(s).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "no safetensors file",
    ),
    "trailing": (lambda s: first_shard(s).write_bytes(first_shard(s).read_bytes() + b"xx"), "2 bytes follow"),
    "no_json": (lambda s: first_shard(s).write_bytes(struct.pack("<Q", 4) + b"{{{{"), "its header is none"),
    "header_list": (lambda s: first_shard(s).write_bytes(struct.pack("<Q", 2) + b"[]"), "is a list"),
    "deep_json": (
        lambda s: first_shard(s).write_bytes(struct.pack("<Q", 200000) + b"[" * 200000),
        "its header is none",
    ),
    "overlap": (with_header(_overlap), "is corrupt: .* starts at byte"),
    "negative": (with_header(lambda h: h[NORM].update(data_offsets=[-96, 0])), "not a dtype, a shape and two"),
    "wrong_size": (with_header(lambda h: h[NORM].update(shape=[25])), "has 96 bytes, not 100"),
    "huge_shape": (with_header(lambda h: h[NORM].update(shape=[2**62, 2**62])), "has 96 bytes, not"),
    "bad_dtype": (with_header(lambda h: h[NORM].update(dtype="F33")), "as F33, a dtype that is not known"),
    "metadata_number": (with_header(lambda h: h.update(__metadata__={"a": 1})), "must map text to text"),
    "index_list": (lambda s: (s / "model.safetensors.index.json").write_text("[]"), "has no weight_map"),
    "index_no_json": (lambda s: (s / "model.safetensors.index.json").write_text("{"), "is no index"),
    "index_binary": (lambda s: (s / "model.safetensors.index.json").write_bytes(b"\xff\xfe\x00"), "is no index"),
    "index_outside": (
        lambda s: _index(s, lambda c: c["weight_map"].update(steps="../source/model-00002-of-00002.safetensors")),
        "no plain file name",
    ),
    "index_wrong": (
        lambda s: _index(s, lambda c: c["weight_map"].update(steps="model-00001-of-00002.safetensors")),
        "says that model-00001-of-00002.safetensors holds 'steps', and it does not",
    ),
    "index_short": (lambda s: _index(s, lambda c: c["weight_map"].pop("steps")), "does not list 'steps'"),
    "twice": (
        lambda s: save_file(load_file(s / "model-00002-of-00002.safetensors"), first_shard(s)),
        "is in model-00001-of-00002.safetensors and in model-00002",
    ),
    "two_indexes": (
        lambda s: shutil.copy(s / "model.safetensors.index.json", s / "other.safetensors.index.json"),
        "holds 2 indexes",
    ),
    "no_index": (lambda s: (s / "model.safetensors.index.json").unlink(), "2 .safetensors files and no index"),
    "pickled": (
        lambda s: [p.unlink() for p in s.glob("model*")] + [(s / "pytorch_model.bin").write_bytes(b"")],
        "holds no .safetensors file; pytorch_model.bin is pickled",
    ),
    "nothing": (lambda s: shutil.rmtree(s), "no file or folder"),
    "shard_is_folder": (lambda s: (first_shard(s).unlink(), first_shard(s).mkdir()), "lacks 1 of 2 shards"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_sources_that_cannot_be_read(case: str, source: Path, tmp_path: Path) -> None:
    break_it, message = HOSTILE[case]
    break_it(source)  # type: ignore[operator]
    refused(message, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_truncated_while_read(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    os.truncate(first_shard(source), first_shard(source).stat().st_size - 5)
    with pytest.raises(ConversionError, match=r"ended at byte .* while it was read"):
        write_checkpoint(checkpoint, tmp_path / "out", [copied(t) for t in checkpoint.tensors.values()])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_places_that_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "alias").symlink_to(source)
    refused("is the source", source, source)
    refused("is the source", source, tmp_path / "alias")
    refused("lies inside the source", source, source / "out")
    refused("exists already", source, tmp_path / "full")
    refused("exists already", source, tmp_path / "link")
    refused("does not exist; make it first", source, tmp_path / "no" / "out")
    refused("cannot write /proc/out", source, Path("/proc/out"))
    assert (tmp_path / "full" / "mine").read_text() == "keep"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full(code: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 4:  # the first shard is whole by then
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    refused("the disk is full: .* needs .*; free some room", source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_too_little_room_is_seen_first(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(100, 99, 1)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused("not enough room in .*: .* kB are needed, 1 bytes are free", source, tmp_path / "out")


def test_a_file_limit_of_the_system(source: Path, tmp_path: Path) -> None:
    """A real failed write: the kernel refuses to let any file grow past 4 kB."""
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(source), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert run.returncode == 1 and "the disk is full" in run.stderr.splitlines()[-1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_an_output_that_appears_meanwhile_is_kept(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    out = tmp_path / "out"
    outputs = [copied(t) for t in checkpoint.tensors.values()]
    with pytest.raises(ConversionError, match="appeared while it was written"):
        write_checkpoint(checkpoint, out, outputs, progress=lambda _: out.mkdir(exist_ok=True))
    assert list(out.iterdir()) == [] and leftovers(tmp_path) == []


def test_no_two_tensors_of_one_name(source: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source)
    with pytest.raises(ConversionError, match="two tensors would be called 'x'"):
        write_checkpoint(checkpoint, tmp_path / "out", [copied(t, "x") for t in checkpoint.tensors.values()])
    assert not (tmp_path / "out").exists()


MEMORY = """
import resource, sys, torch
from normkit.convert.checkpoint import open_checkpoint
from normkit.convert.stream import Part, assembled, copied, write_checkpoint

def peak():
    return int(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmHWM"))) * 1024

source = open_checkpoint(sys.argv[1])
small = [t for t in source.tensors.values() if t.nbytes < 2**20]
write_checkpoint(source, sys.argv[2] + "0", [copied(t) for t in small])  # what the first use of torch costs
open("/proc/self/clear_refs", "w").write("5")
before = peak()
outputs = [copied(t) for t in source.tensors.values() if t.name != "a"]
outputs.append(assembled("a", source.file_of("a"), [Part(source.tensors["a"], transposed=True)]))
write_checkpoint(source, sys.argv[2], outputs)
print(peak() - before, max(t.nbytes for t in source.tensors.values()))
"""


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """Four tensors of 64 MB, one of them transposed: the growth of the peak stays under 1.3 of one."""
    big = {name: torch.rand(4096, 4096) for name in "abcd"}
    source = sharded(tmp_path / "source", [big | {"small": torch.ones(8)}, {"b2": big["b"][:8].clone()}])
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(source), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    grown, largest = map(int, run.stdout.split())
    assert largest == 2**26
    assert grown < 1.3 * largest, f"{grown / largest:.2f}"
    assert torch.equal(load_file(tmp_path / "out" / "model-00001-of-00002.safetensors")["a"], big["a"].T)
