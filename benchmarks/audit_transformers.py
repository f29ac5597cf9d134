"""Audit the default config of every transformers model type, each in a process of its own, and table what came out.

Run: python benchmarks/audit_transformers.py --text --page     every text type on meta, then docs/audit-coverage.md
     python benchmarks/audit_transformers.py --page            the same for every type there is
     python benchmarks/audit_transformers.py llama t5          only these; --layers 2 cuts stacks, --out FILE keeps rows

A type that takes too long at its default depth is run once more with its stacks cut, and the page says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import resource
import signal
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "audit-coverage.md"
SECONDS, GIB, SHORT = 120, 12, 4
MODALITIES = ("text", "vision", "audio", "several", "unknown")


def audit_type(kind: str, layers: int | None, device: str) -> dict[str, Any]:
    """One row: how the audit of a model type went, and what it found."""
    from normkit.audit import AuditError, audit, load
    from normkit.audit.shallow import shallow

    row: dict[str, Any] = {"type": kind, "modality": _listed_modality(kind)}
    started = time.process_time()
    try:
        config = shallow(kind, layers) if layers else load.default_config(kind)
        loaded = load.from_config(kind, config, None if device == "meta" else device)
        row |= {"modality": modality(loaded.kwargs), "parameters": _size(loaded.model), "inputs": shapes(loaded.kwargs)}
        result = audit(loaded.model, *loaded.args, **loaded.kwargs)
    except load.ModelError as error:
        built = "no guess for the inputs" in str(error)
        return row | {"status": "no inputs" if built else "not built", "reason": str(error)}
    except AuditError as error:
        return row | {"status": "failed", "reason": str(error)}
    groups: Counter[str] = Counter()
    for norm in result.norms:
        spec = norm.spec
        what = "" if spec is None else f"{spec.axes} eps={spec.eps:.3g} w{spec.weight_offset:+g} {spec.rounding}"
        what += "" if spec is None or spec.gate is None else f" {spec.gate}"
        groups[f"{re.sub(r'[0-9]+', '*', norm.name)} | {norm.class_name} | {norm.kind} {what} | {norm.placement}"] += 1
    guesses = Counter(re.sub(r" in .* was", " was", guess) for guess in result.guesses)
    return row | {
        "status": "ran",
        "device": result.device,
        "seconds": round(time.process_time() - started, 1),
        "norms": len(result.norms),
        "other": sum(norm.kind == "other" for norm in result.norms),
        "groups": [f"{n} x {text}" for text, n in groups.items()],
        "branches": dict(Counter(f"{b.placement} (stream {b.stream})" for b in result.branches)),
        "failures": list(result.failures),
        "guesses": dict(guesses),
        "findings": sorted({f.rule for f in result.findings}),
    }


def _size(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def shapes(inputs: dict[str, Any]) -> dict[str, str]:
    """The inputs that were guessed, as ``--inputs`` takes them."""
    tensors = {name: value for name, value in inputs.items() if hasattr(value, "shape")}
    return {
        name: "x".join(map(str, t.shape)) + f":{str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()
    }


def modality(inputs: dict[str, Any]) -> str:
    """By the inputs that the model takes."""
    names = {n for n in inputs if not n.startswith(("decoder_", "use_", "attention_", "bbox")) and "mask" not in n}
    seen = {
        "text": bool(names & {"input_ids", "inputs_embeds"}),
        "vision": any("pixel" in n or "image" in n or "patches" in n or "visual" in n for n in names),
        "audio": any("input_values" in n or "features" in n or "audio" in n or "spectrogram" in n for n in names),
    }
    kinds = [name for name, present in seen.items() if present]
    return kinds[0] if len(kinds) == 1 else "several" if kinds else "unknown"


def _listed_modality(kind: str) -> str:
    """For a model that was not built: by the tasks that it is listed under."""
    from transformers.models.auto import modeling_auto as auto

    text = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "QUESTION_ANSWERING", "SEQUENCE_CLASSIFICATION")
    if any(kind in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in text):
        return "text"
    return "unknown"


def _worker(kind: str, layers: int | None, device: str, seconds: int, gib: int, to: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (gib << 30, gib << 30))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        to.send(audit_type(kind, layers, device))
    except BaseException as error:
        to.send({"type": kind, "status": "crashed", "reason": f"{type(error).__name__}: {str(error)[:300]}"})


def run(kind: str, layers: int | None, device: str, seconds: int, gib: int) -> dict[str, Any]:
    """One type within its processor time and memory; cut where it takes too long as it is."""
    row = _run(kind, layers, device, seconds, gib)
    if row.get("late") and layers is None:
        return _run(kind, SHORT, device, seconds, gib) | {"layers": SHORT}
    return row


def _run(kind: str, layers: int | None, device: str, seconds: int, gib: int) -> dict[str, Any]:
    """One type in a forked process, which shares the imported libraries."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_worker, args=(kind, layers, device, seconds, gib, sending))
    process.start()
    sending.close()
    row: dict[str, Any] = {"type": kind, "status": "crashed", "reason": f"the process died (within {gib} GiB)"}
    with contextlib.suppress(EOFError):
        row = receiving.recv()
    process.join()
    if process.exitcode == -signal.SIGXCPU:
        row |= {"reason": f"over {seconds} s", "late": True}
    return row


def page(rows: list[dict[str, Any]], layers: int | None, text: bool) -> str:
    """The table of docs/audit-coverage.md."""
    import transformers

    cut = f"--layers {layers} " if layers else ""
    depth = f", every stack cut to {layers} layers" if layers else ", at its default depth"
    late = [r["type"] for r in rows if r.get("layers")]
    lines = [
        "# What an audit can run",
        "",
        f"The default config of every {'text ' if text else ''}model type of transformers {transformers.__version__} "
        f"that has one, built on the meta device and audited with guessed inputs{depth}.",
        f"Made by `python benchmarks/audit_transformers.py {'--text ' if text else ''}{cut}--page`.",
        "",
        "Where a model does not run on meta, it is built on the CPU, up to two billion parameters.",
        "A guessed value is one that control flow or a shape asked of a meta tensor.",
        *([f"Cut to {SHORT} layers a stack, because they take over {SECONDS} s: {', '.join(late)}."] if late else []),
        "",
        "| inputs | built | ran on meta | ran on the CPU | share |",
        "|---|---|---|---|---|",
    ]
    for name in MODALITIES:
        built = [r for r in rows if r.get("modality", "unknown") == name and r["status"] != "not built"]
        meta = sum(r["status"] == "ran" and r["device"] == "meta" for r in built)
        ran = sum(r["status"] == "ran" for r in built)
        if built:
            lines.append(f"| {name} | {len(built)} | {meta} | {ran - meta} | {100 * ran / len(built):.0f} % |")
    total = [r for r in rows if r["status"] != "not built"]
    ran = [r for r in total if r["status"] == "ran"]
    on_meta = sum(r["device"] == "meta" for r in ran)
    share = 100 * len(ran) / max(1, len(total))
    lines += [f"| all | {len(total)} | {on_meta} | {len(ran) - on_meta} | {share:.0f} % |"]
    lines += ["", "## Ran", "", "| type | inputs | norms | placements | guessed values |", "|---|---|---|---|---|"]
    for row in sorted((r for r in rows if r["status"] == "ran"), key=lambda r: r["type"]):
        seats: Counter[str] = Counter()
        for group in row["groups"]:
            count, _, text = group.partition(" x ")
            seats[text.rsplit(" | ", 1)[1]] += int(count)
        placed = ", ".join(f"{n} {seat}" for seat, n in seats.items())
        guessed = "; ".join(row["guesses"]).replace("|", "/")
        given = ", ".join(f"{n}={s}" for n, s in row.get("inputs", {}).items() if not n.endswith("attention_mask"))
        lines.append(f"| {row['type']} | {given} | {row['norms']} | {placed} | {guessed[:160]} |")
    lines += ["", "## Did not run", "", "| type | inputs | status | reason |", "|---|---|---|---|"]
    for row in sorted((r for r in rows if r["status"] != "ran"), key=lambda r: r["type"]):
        reason = row["reason"].replace("|", "/")
        lines.append(f"| {row['type']} | {row.get('modality', 'unknown')} | {row['status']} | {reason[:300]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Audit, print a line a type, and write the page when every type was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--text", action="store_true", help="only types that are listed under a text task")
    parser.add_argument("--layers", type=int, help="cut every stack to this many layers")
    parser.add_argument("--device", default="meta", choices=("meta", "cpu"))
    parser.add_argument("--out", type=Path, help="append the rows as JSON lines; types already there are not run again")
    parser.add_argument("--page", action="store_true", help="write docs/audit-coverage.md from the rows")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="processor time of one type")
    parser.add_argument("--gib", type=int, default=GIB)
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    from normkit.audit import load

    library = load.transformers()
    audit_type("llama", 1, "meta")  # what every process needs is imported once, before the forks
    known = (
        [json.loads(line) for line in given.out.read_text().splitlines()] if given.out and given.out.exists() else []
    )
    rows = {row["type"]: row for row in known}
    every = sorted(library.CONFIG_MAPPING.keys())
    for kind in given.types or [k for k in every if not given.text or _listed_modality(k) == "text"]:
        if kind in rows:
            continue
        row = rows[kind] = run(kind, given.layers, given.device, given.seconds, given.gib)
        print(f"{kind:<32}{row['status']:<10}{row.get('seconds', '')} {row.get('reason', '')[:150]}", flush=True)
        if given.out:
            with given.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
    if given.page:
        PAGE.write_text(page(list(rows.values()), given.layers, given.text), encoding="utf-8")


if __name__ == "__main__":
    main()
