"""Without the extension everything still runs, says so once, and knows why."""

from __future__ import annotations

import os
import subprocess
import sys

from normkit import ops

CODE = """
import warnings, torch
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from normkit import ops
    assert not ops.LOADED and not seen
    x, w = torch.randn(3, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    for y in (ops.rms_norm(x, w), ops.layer_norm(x, w, w), ops.add_rms_norm(x, x, w)[0], ops.gated_rms_norm(x, x, w),
              ops.layer_norm(x, w, w, weight_offset=1.0), ops.rms_norm(x.bfloat16(), w, round_before_gain=True)):
        y.sum().backward()
    v = torch.randn(2, 16, 4, 4, requires_grad=True)
    y, mean, var, count = ops.batch_norm_train(v, w, w)
    ops.update_running(torch.zeros(16), torch.ones(16), mean, var, count, 0.1)
    for y in (y, ops.group_norm(v, w, w, 4), ops.instance_norm(v), ops.channel_layer_norm(v, w),
              ops.batch_norm(v, mean, var)):
        y.sum().backward()
    out = torch.empty(3, 16)
    ops.rms_norm_out(x, w, out=out)
    assert torch.equal(out, ops.rms_norm(x, w))
    assert len([s for s in seen if "normkit" in str(s.message)]) == 1, seen
report = ops.report()
assert "NORMKIT_NO_NATIVE" in report.reason and report.to_dict()["loaded"] is False
print("fine")
"""


def test_without_the_extension() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**os.environ, "NORMKIT_NO_NATIVE": "1"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_report_says_what_was_built() -> None:
    report = ops.report()
    assert report.loaded == (report.reason == "")
    if report.loaded:
        assert report.instruction_set in ("baseline", "avx2", "avx512", "avx512_bf16")
        assert {"torch", "stable_abi", "compiler", "processor"} <= set(report.built)
