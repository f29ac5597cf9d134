"""Processor time and memory of an audit of large models on the meta device, each in a process of its own.

Run: python benchmarks/audit_large.py           print the table
     python benchmarks/audit_large.py --page    and write docs/audit-cost.md
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "audit-cost.md"
LAYERS = (8, 16, 32, 64, 128)
WIDTH = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
WHOLE = ("deepseek_v3",)
"""Model types at their default config."""


def measure(kind: str, layers: int | None) -> dict[str, Any]:
    """Build, audit, and say how long it took and how much memory the process had at most."""
    import torch
    import transformers

    from normkit.audit import audit

    changes = {} if layers is None else {"num_hidden_layers": layers, **WIDTH}
    config = transformers.AutoConfig.for_model(kind, **changes)
    started = time.process_time()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        tokens = torch.ones(2, 128, dtype=torch.int64)
    built = time.process_time()
    result = audit(model, input_ids=tokens, use_cache=False)
    return {
        "type": kind,
        "layers": config.num_hidden_layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "norms": len(result.norms),
        "build_s": built - started,
        "audit_s": time.process_time() - built,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text."""
    return [
        row["type"], str(row["layers"]), f"{row['parameters'] / 1e9:.1f} B", str(row["norms"]),
        f"{row['build_s']:.1f}", f"{row['audit_s']:.1f}", f"{1000 * row['audit_s'] / row['layers']:.0f}",
        f"{row['peak_mib']:.0f}",
    ]  # fmt: skip


HEADER = ["type", "layers", "parameters", "norms", "build s", "audit s", "audit ms a layer", "peak MiB"]


def page(rows: list[dict[str, Any]]) -> str:
    """docs/audit-cost.md."""
    import torch
    import transformers

    table = ["| " + " | ".join(line) + " |" for line in (HEADER, ["---"] * len(HEADER), *map(cells, rows))]
    ladder = [row for row in rows if row["type"] == "llama"]
    times = [1000 * row["audit_s"] / row["layers"] for row in ladder]
    return "\n".join([
        "# What an audit costs",
        "",
        "Models without weights, on the meta device, 2 x 128 tokens; each in a process of its own, whose peak memory "
        "holds",
        "Python, torch and transformers too. Made by `python benchmarks/audit_large.py --page` with torch "
        f"{torch.__version__.split('+')[0]},",
        f"transformers {transformers.__version__}, one thread, on {platform.machine()}. Seconds are of processor time.",
        "",
        *table,
        "",
        f"Over {ladder[0]['layers']} to {ladder[-1]['layers']} layers of one width the time a layer stays between "
        f"{min(times):.0f} and {max(times):.0f} ms: cost grows linearly.",
        "",
    ])  # fmt: skip


def main() -> None:
    """One row a model; cost should grow in proportion to depth."""
    print("".join(f"{name:>17}" for name in HEADER))
    rows = []
    for kind, layers in [("llama", n) for n in LAYERS] + [(kind, None) for kind in WHOLE]:
        command = [sys.executable, __file__, kind, str(layers or "")]
        rows.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        print("".join(f"{cell:>17}" for cell in cells(rows[-1])), flush=True)
    if "--page" in sys.argv:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]) if sys.argv[2] else None)))
    else:
        main()
