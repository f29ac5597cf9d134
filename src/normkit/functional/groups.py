"""group_norm."""

from __future__ import annotations

import numbers

from torch import Tensor

from normkit.checks import check_floating
from normkit.functional import short
from normkit.functional.core import make_spec, norm
from normkit.spec import Gate, OutputDtype, Rounding


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mask: Tensor | None = None,
    weight_offset: float = 0.0,
    rounding: Rounding = "after_gain",
    output_dtype: OutputDtype = "input",
    channel_dim: int = 1,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    gate_kind: Gate = ("silu", "after"),
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Group normalization (Wu and He 2018, arXiv:1803.08494).

    ``y = (x - mean) / sqrt(var + eps) * (weight_offset + weight) + bias``, mean and biased variance per sample over
    space and one of ``num_groups`` equal parts of the channels.

    Args:
        input: ``(N, C)`` or ``(N, C, ...)``; ``(N, ..., C)`` with ``channel_dim=-1``.
        num_groups: divides C. 1 is LayerNorm over channels and space, C is instance norm.
        weight: gain ``(C,)`` or None.
        bias: ``(C,)`` or None.
        eps: added to the variance.
        mask: input's shape without the channel dim, True (or 1) at valid positions. Others do not count, have output
            zero and get no gradient.
        weight_offset: added to the stored gain.
        rounding: where a half-precision result is rounded; see `normkit.NormSpec`.
        output_dtype: ``"input"``, ``"promoted"`` or ``"weight"``; see `normkit.NormSpec`.
        channel_dim: 1 or -1.
        residual: added first; then ``(y, stream)`` is returned.
        gate: multiplies as ``gate_kind`` says.
        gate_kind: (``"silu"`` or ``"sigmoid"``, ``"before"`` or ``"after"``).
        out: receives the result.

    Returns:
        The result, or ``(y, stream)`` with ``residual``.

    Raises:
        ValueError: num_groups that does not divide C; a shape, eps or device that does not fit; the message names
            argument, values and fix.
        TypeError: integer input.

    Differs from `torch.nn.functional.group_norm`: channels-last float32 input with a large mean comes out right (torch
    errs by 1.9 at mean 1000); any pair of input and parameter dtypes; one value per group gives the bias, where
    torch raises for a batch of one only; a negative eps is refused.
    """
    ordinary = mask is None and residual is None and gate is None and out is None
    if ordinary and short.as_torch(weight_offset, rounding, output_dtype, channel_dim):
        y = short.group(input, weight, bias, num_groups, eps)
        if y is not None:
            return y
    check_floating("input", input)
    if isinstance(num_groups, bool) or not isinstance(num_groups, numbers.Integral) or num_groups < 1:
        raise ValueError(f"num_groups must be an integer >= 1; got {num_groups!r}")
    if input.dim() < 2:
        raise ValueError(f"expected at least 2 dims, (N, C, ...); got input of shape {tuple(input.shape)}")
    channels = input.shape[channel_dim] if channel_dim in (1, -1) else 0
    if channels % num_groups:
        fits = next(g for g in range(num_groups, 0, -1) if channels % g == 0)
        raise ValueError(
            f"num_groups={num_groups} does not divide the {channels} channels of input, shape {tuple(input.shape)}; "
            f"num_groups={fits} does"
        )
    spec = make_spec(
        axes="group",
        channel_dim=channel_dim,
        groups=int(num_groups),
        eps=eps,
        has_weight=weight is not None,
        weight_offset=weight_offset if weight is not None else 0.0,
        has_bias=bias is not None,
        rounding=rounding,
        output_dtype=output_dtype,
        gate=None if gate is None else gate_kind,
    )
    return norm(input, spec, weight, bias, residual=residual, gate=gate, mask=mask, out=out)  # type: ignore[arg-type]
