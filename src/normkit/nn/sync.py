"""SyncBatchNorm: one set of batch statistics for all processes of a group, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from normkit.nn.batch import BatchNorm
from normkit.nn.running import Single, normalize_batch
from normkit.reference import Measured, align_mask, compute_dtype, normalize_measured, standardize
from normkit.reference_backward import normalize_backward
from normkit.spec import NormSpec, Rounding


class SyncBatchNorm(BatchNorm):
    r"""Batch normalization over the batches of all processes of a group, for input of any rank.

    ``y = (x - mean) / sqrt(var + eps) * (weight_offset + weight) + bias``, mean and biased variance per channel over
    all other dims and all processes, merged pairwise (Chan et al. 1983) from each process's own mean and variance in
    float64.

    Args:
        num_features: C, the number of channels.
        eps: added to the variance.
        momentum: the weight of a batch in the running statistics; None for a plain average over batches.
        affine: whether to learn a gain and a bias.
        track_running_stats: whether to keep running statistics and evaluate by them.
        process_group: who shares statistics; None is the default group.
        device: where parameters and buffers live.
        dtype: their dtype.
        bias, weight_offset, rounding, channel_dim, single, skip_nonfinite: as `BatchNorm`.

    Shape:
        ``(N, C)`` or ``(N, C, ...)`` in and out; ``(N, ..., C)`` with ``channel_dim=-1``. N may differ between
        processes and be 0.

    Raises:
        ValueError: as `BatchNorm`; one value per channel in the whole group (on every process alike).

    Without an initialized process group, in a group of one and in evaluation it is `BatchNorm`. In training each
    forward is one all_gather of 2 C + 1 numbers and each backward one all_reduce of 2 C: every process must run both,
    those with an empty batch too.

    Differs from `torch.nn.SyncBatchNorm`: it takes CPU tensors (over gloo), masks, and batches whose sizes differ or
    are 0; the variance does not lose digits for a large mean. Gradients of gain and bias are each process's own part,
    as torch's: DistributedDataParallel averages them. Same state_dict.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        weight_offset: float = 0.0,
        rounding: Rounding = "after_gain",
        channel_dim: int = 1,
        single: Single = "error",
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            bias=bias,
            weight_offset=weight_offset,
            rounding=rounding,
            channel_dim=channel_dim,
            single=single,
            skip_nonfinite=skip_nonfinite,
        )
        self.process_group = process_group
        self.local_class: type[nn.Module] = BatchNorm

    def _normalize_batch(self, input: Tensor, mask: Tensor | None) -> Tensor:
        if not is_shared(self.process_group):
            return super()._normalize_batch(input, mask)
        spec = self.spec
        measured = measure_shared(input, spec, mask, self.process_group)

        def evaluate(x: Tensor, spec: NormSpec, *parameters: Tensor | None, gate: None, mask: Tensor | None) -> Any:
            y = SharedClosedForm.apply(x, *parameters, mask, spec, measured, self.process_group)
            return y, measured.statistics()

        return normalize_batch(
            self,  # type: ignore[arg-type]
            input,
            spec,
            mask=mask,
            momentum=self.momentum,
            single=self.single,
            skip_nonfinite=self.skip_nonfinite,
            alone=bool(measured.count == 1),
            evaluate=evaluate,
        )

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """As `normkit.nn.convert_sync_batchnorm`."""
        from normkit.nn.sync_convert import convert_sync_batchnorm

        return convert_sync_batchnorm(module, process_group)


def is_shared(group: Any) -> bool:
    """Whether there is anyone to share statistics with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def measure_shared(x: Tensor, spec: NormSpec, mask: Tensor | None, group: Any) -> Measured:
    """The statistics of all processes' batches together: shape ``[1, C, 1, ...]``, the same bits on every process."""
    assert isinstance(spec.channel_dim, int)
    channel = spec.channel_dim % x.dim()
    compute = compute_dtype(x.dtype, spec)
    count, mean, square = 0, *torch.zeros(2, x.shape[channel], dtype=torch.float64, device=x.device)
    if x.numel() > 0:
        with torch.no_grad():
            z = x.to(compute)
            z = z if mask is None else torch.where(align_mask(mask, spec, x.dim()), z, 0)
            own = standardize(z, spec, mask)[1]
        scale = torch.ones((), device=x.device) if own.scale is None else own.scale.double()
        count = int(own.count)
        mean = ((own.mean.double() + own.correction.double()) / scale).flatten()
        square = (own.square.double() / scale / scale).flatten() * count
    packed = torch.cat([mean, square, mean.new_tensor([count])])
    parts = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, packed, group=group)
    means, squares, counts = torch.stack(parts).split([x.shape[channel], x.shape[channel], 1], dim=1)
    total = int(counts.sum())
    n = max(total, 1)
    mean = (counts * means).sum(0) / n
    square = (squares + counts * (means - mean).square()).sum(0) / n
    shape = [-1 if d == channel else 1 for d in range(x.dim())]
    high = mean.to(compute)
    low = (mean - high.double()).to(compute)  # what one float32 cannot hold of it
    return Measured(high.view(shape), low.view(shape), square.to(compute).view(shape), total, None)


class SharedClosedForm(torch.autograd.Function):
    """`normkit.functional.evaluate.ClosedForm` with statistics, and the two sums of its backward, over a group.

    A Function because autograd does not follow a collective. It is differentiable once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mask: Tensor | None,
        spec: NormSpec,
        measured: Measured,
        group: Any,
    ) -> Tensor:
        ctx.spec, ctx.count, ctx.group = spec, measured.count, group
        ctx.save_for_backward(x, weight, bias, mask, measured.mean, measured.correction, measured.square)
        return normalize_measured(x, spec, weight, bias, mask=mask, measured=measured)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias, mask, mean, correction, square = ctx.saved_tensors

        def total(along: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor | None]:
            assert sums is not None
            both = torch.stack([along, sums]).double()
            dist.all_reduce(both, group=ctx.group)
            return both[0].to(along.dtype), both[1].to(sums.dtype)

        out = normalize_backward(
            grads[0],
            x,
            ctx.spec,
            weight,
            bias,
            mask=mask,
            measured=Measured(mean, correction, square, ctx.count, None),
            needed=ctx.needs_input_grad[:3],
            total=total,
        )
        return *out, None, None, None, None
