"""docs/accuracy.md says what benchmarks/accuracy.py measures, and the claims in it hold here."""

import math

from tests.pages import ROOT, script


def test_the_page_and_its_claims():
    rows = script("benchmarks/accuracy.py").cases()
    written = (ROOT / "docs" / "accuracy.md").read_text()
    for case in rows:
        assert f"| {case.name} |" in written, "run python benchmarks/accuracy.py --write"
        # bfloat16 rounds the gradient once, 2^-9; float32 some 30 roundings of 6e-8; float64 stays float64
        limit = {"bfloat16": 2**-8, "float64": 1e-10}.get(case.name.split(", ")[1], 2e-6)
        assert case.normkit <= limit, case
    assert len(rows) == sum(line.startswith("| ") for line in written.splitlines()) - 1
    worse = [case for case in rows if math.isnan(case.torch) or case.torch > 10 * case.normkit]
    assert len(worse) >= 8, "cases that torch gets right do not belong here"
