"""QKNorm: queries and keys normalized before their product."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from normkit.checks import check_floating
from normkit.functional import norm
from normkit.nn._shared import Device, count, empty, fill
from normkit.spec import NormSpec, OutputDtype, Rounding

Scope = Literal["head", "per_head", "full"]
Layout = Literal["BTHD", "BHTD"]


class HeadNorm(nn.Module):
    """The norm of queries, or of keys: one half of `QKNorm`, which makes it."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        spec: NormSpec,
        heads: int | None,
        features: int,
        layout: Layout,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.features = features
        self.heads = heads
        self.layout: Layout = layout
        shape = (features,) if heads is None else (heads, features)
        self.register_parameter("weight", empty(shape, device, dtype) if spec.has_weight else None)
        self.register_parameter("bias", empty((features,), device, dtype) if spec.has_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gain 1 (a stored weight of 1 - weight_offset), bias 0."""
        fill(self.weight, 1.0 - self.spec.weight_offset)
        fill(self.bias, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        check_floating("q or k", x)
        if x.dim() < 1 or x.shape[-1] != self.features:
            raise ValueError(f"the last dim must have {self.features} features; got shape {tuple(x.shape)}")
        weight = self.weight
        if self.heads is not None:
            dim = -2 if self.layout == "BTHD" else -3
            if x.dim() < -dim or x.shape[dim] != self.heads:
                raise ValueError(f"dim {dim} must have {self.heads} heads ({self.layout}); got shape {tuple(x.shape)}")
            if weight is not None and self.layout == "BHTD":
                weight = weight.unsqueeze(-2)
        return norm(x, self.spec, weight, self.bias)

    def extra_repr(self) -> str:
        heads = "" if self.heads is None else f"{self.heads}, "
        return f"{heads}{self.features}, eps={self.spec.eps}, centered={self.spec.centered}"


class QKNorm(nn.Module):
    r"""Normalizes queries and keys, which bounds the attention logits (Henry et al. 2020, arXiv:2010.04245).

    ``q = x_q / sqrt(mean(x_q^2) + eps) * (weight_offset + weight_q)``, and the same for k with a weight of its own.
    The mean runs over the features of one head, or of all heads.

    Args:
        head_dim: D, the features of one head.
        heads: H, the number of query heads; needed for every scope but ``"head"``.
        kv_heads: the number of key heads, where it differs (grouped queries).
        scope: ``"head"``: a statistic for each head, one gain ``[D]`` for all (Qwen 3, Gemma 3); ``"per_head"``: a
            statistic for each head and a gain for each, ``[H, D]`` (Cohere); ``"full"``: one statistic over all heads,
            before the split into heads (OLMo 2).
        eps: added to the mean square (or variance).
        elementwise_affine: whether to learn gains.
        centered: True for LayerNorm in place of RMSNorm (ViT-22B, arXiv:2302.05442).
        bias: whether to learn a bias (not with ``"per_head"``).
        weight_offset: 1.0 for Gemma's convention.
        rounding: where a half-precision result is rounded: ``"before_gain"`` for Qwen 3; see `normkit.NormSpec`.
        output_dtype: ``"input"``, ``"promoted"`` or ``"weight"``; see `normkit.NormSpec`.
        layout: ``"BTHD"`` or ``"BHTD"``, where ``"per_head"`` finds the heads.
        device: where the parameters live.
        dtype: their dtype.

    Shape:
        q ``(B, T, H, D)`` and k ``(B, S, H_kv, D)``, or ``(B, H, T, D)`` with ``layout="BHTD"``; with
        ``scope="full"`` ``(B, T, H * D)`` and ``(B, S, H_kv * D)``. Returned in the same shapes.

    Raises:
        ValueError, TypeError: an argument outside its domain, or q or k of another shape.

    Apply it before rotary embedding: a gain after it would break the rotation. (Weightless it commutes with rotary.)
    Half precision: statistics in float32. torch.nn has no such layer; the state_dict keys are ``q_norm.weight`` and
    ``k_norm.weight``, as in the model families' attention. ``spec`` is that of both norms.
    """

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        scope: Scope = "head",
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        centered: bool = False,
        bias: bool = False,
        weight_offset: float = 0.0,
        rounding: Rounding = "after_gain",
        output_dtype: OutputDtype = "input",
        layout: Layout = "BTHD",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if scope not in get_args(Scope):
            raise ValueError(f"scope must be one of {get_args(Scope)}; got {scope!r}")
        if layout not in get_args(Layout):
            raise ValueError(f"layout must be one of {get_args(Layout)}; got {layout!r}")
        if scope == "head" and (heads is not None or kv_heads is not None):
            raise ValueError(
                f"scope='head' has one gain for any number of heads, so heads={heads} and kv_heads={kv_heads} mean "
                "nothing; leave them away, or choose scope='per_head' or 'full'"
            )
        if scope != "head" and heads is None:
            raise ValueError(f"scope={scope!r} needs heads; got None")
        if scope == "per_head" and bias:
            raise ValueError("bias=True is not defined for scope='per_head': a NormSpec bias has the features' shape")
        self.head_dim = count("head_dim", head_dim)
        self.scope: Scope = scope
        self.spec = NormSpec(
            centered=centered,
            eps=eps,
            has_weight=elementwise_affine,
            weight_offset=weight_offset if elementwise_affine else 0.0,
            has_bias=elementwise_affine and bias,
            weight_shape="per_head" if scope == "per_head" and elementwise_affine else "features",
            rounding=rounding,
            output_dtype=output_dtype,
        )
        queries = 1 if heads is None else count("heads", heads)
        keys = queries if kv_heads is None else count("kv_heads", kv_heads)

        def half(n: int) -> HeadNorm:
            features = n * head_dim if scope == "full" else head_dim
            return HeadNorm(self.spec, n if scope == "per_head" else None, features, layout, device, dtype)

        self.q_norm = half(queries)
        self.k_norm = half(keys)

    def reset_parameters(self) -> None:
        """Gain 1, bias 0."""
        self.q_norm.reset_parameters()
        self.k_norm.reset_parameters()

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The normalized (q, k)."""
        return self.q_norm(q), self.k_norm(k)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, scope={self.scope!r}"
