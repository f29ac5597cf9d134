"""How far a kernel may be from float64, per dtype, and why.

One rounding to a type of precision p errs by at most u = 2^-p of the value (8 bits for bfloat16, 11 for float16, 24 for
float32, 53 for float64).

- forward, half types: everything is float32, rounded once at the end: u of the value, and a hair for a float32 result
  on the other side of a rounding boundary.
- forward, float32: x - mean, times rstd, times gain, plus bias: four roundings, and rstd itself is off by about two:
  6 u of the largest term of the sum, which |y| + |bias| bounds. (Channels take rstd * gain, and the bias less the
  mean's lower part times that, as one number each: as many roundings.)
- forward, float64: the value compared with is float64 too and errs as much again, more for long rows: 24 u.
- dx: three terms that may cancel, each with the forward's error: 16 u of the largest |dx|.
- column sums: n float32 terms added in short sums: the errors average out; 4 sqrt(n) u of the largest sum bounds all
  that was ever seen with a margin of 3. A half-typed gradient adds its own final rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def compute_unit(dtype: torch.dtype) -> float:
    return UNIT[torch.float64] if dtype == torch.float64 else UNIT[torch.float32]


def assert_forward(y: Tensor, exact: Tensor, bias: Tensor | None = None) -> None:
    """y against its float64 value; ``bias`` is what was added last, if it may cancel."""
    size = exact.abs() + (0 if bias is None else bias.abs().double())
    subnormal = 2.0**-25 if y.dtype == torch.float16 else 0.0
    rounding = UNIT[y.dtype] * 1.001 if y.element_size() == 2 else 0.0
    arithmetic = (24 if y.dtype == torch.float64 else 6) * compute_unit(y.dtype)
    bound = size * (rounding + arithmetic) + subnormal + 1e-30
    worst = ((y.double() - exact).abs() / bound).max().item() if y.numel() else 0.0
    assert worst <= 1, f"{worst:.3g} times the tolerance"


def assert_gradient(d: Tensor, exact: Tensor, x_dtype: torch.dtype, terms: int = 1) -> None:
    if exact.numel() == 0:
        assert d.shape == exact.shape
        return
    scale = exact.abs().max().item()
    bound = scale * 16 * compute_unit(x_dtype) * max(1.0, terms**0.5 / 4) + exact.abs() * UNIT[d.dtype] * 1.001
    bound = bound + (2.0**-25 if d.dtype == torch.float16 else 1e-30)
    worst = ((d.double() - exact).abs() / bound).max().item()
    assert worst <= 1, f"{worst:.3g} times the tolerance"
