"""Time and memory of an audit of large models on the meta device, each in a process of its own.

Run: python benchmarks/audit_large.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

LAYERS = (8, 16, 32, 64)
WIDTH = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}


def measure(layers: int) -> dict[str, float]:
    """Build, audit, and say how long it took and how much memory the process had at most."""
    import torch
    import transformers

    from normkit.audit import audit

    config = transformers.AutoConfig.for_model("llama", num_hidden_layers=layers, **WIDTH)
    started = time.perf_counter()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        tokens = torch.ones(2, 128, dtype=torch.int64)
    built = time.perf_counter()
    result = audit(model, input_ids=tokens, use_cache=False)
    return {
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "norms": len(result.norms),
        "build_s": built - started,
        "audit_s": time.perf_counter() - built,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """One row a depth; cost should grow in proportion to it."""
    print(f"{'layers':>6} {'parameters':>12} {'norms':>6} {'build s':>8} {'audit s':>8} {'peak MiB':>9}")
    for layers in LAYERS:
        command = [sys.executable, __file__, str(layers)]
        row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        size = f"{row['parameters'] / 1e9:.1f} B"
        print(f"{layers:>6} {size:>12} {row['norms']:>6} {row['build_s']:>8.2f} {row['audit_s']:>8.2f} "
              f"{row['peak_mib']:>9.0f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(int(sys.argv[1]))))
    else:
        main()
