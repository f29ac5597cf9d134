"""Build and run the kernels' sanitized fuzzers (`make fuzz`) for each instruction set that this processor has.

    python benchmarks/fuzz.py FOLDER SECONDS CMAKE     FOLDER is configured from csrc/tests

Each gets another seed each time; it is printed, so that a finding can be had again.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

NEEDS = {
    "baseline": set(),
    "avx2": {"avx2", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "f16c"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "f16c", "avx512_bf16"},
}


def main() -> None:
    folder, seconds, cmake = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    failed = []
    for level, needs in NEEDS.items():
        program = folder / f"fuzz_{level}"
        if not needs <= flags:
            print(f"{level}: not on this processor")
            continue
        subprocess.run([cmake, "--build", folder, "--target", program.name], check=True)
        seed = str(random.SystemRandom().randrange(2**32))
        print(f"{level}, seed {seed}: ", end="", flush=True)
        if subprocess.run([program.absolute(), seconds, seed]).returncode:
            failed.append(level)
    if failed:
        sys.exit(f"findings at {', '.join(failed)}")


if __name__ == "__main__":
    main()
