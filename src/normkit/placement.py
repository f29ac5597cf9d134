"""Placement: where a norm sits on the residual stream, and the table of published wirings.

One equation describes one residual branch::

    y = N_stream(alpha * x + lambda * N_output(F(g * N_input(x))))        F may hold N_inner before its last projection
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Stack = Literal["encoder", "decoder", "encoder_of_pair", "decoder_of_pair"]
BranchScale = Literal["fixed", "scalar", "channel"]
Role = Literal["query", "key", "value", "output", "ffn_in", "ffn_out"]

VALUE_PATH: tuple[Role, ...] = ("value", "output", "ffn_in", "ffn_out")
WRITES: tuple[Role, ...] = ("output", "ffn_out")

NormPosition = Literal["pre", "post", "output", "final", "embedding", "qk", "inner", "conv", "head"]
"""Where an audit finds a norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How one residual branch is wired.

    Args:
        name: the key in the table of wirings.
        input_norm, inner_norm, output_norm, stream_norm: which slots of the equation hold a norm.
        alpha: the factor on the identity path.
        branch_scale: lambda at initialization.
        branch_scale_kind: whether lambda is a fixed number, a learned scalar or a learned vector of channels.
        input_gain: g, the factor on the normalized input.
        init_gain: the factor that initialization puts on the matrices named by ``init_roles``.
        init_roles: the matrices that ``init_gain`` scales.
        final_norm: whether a norm is due after the last block.
        source: the paper.
    """

    name: str
    input_norm: bool = False
    inner_norm: bool = False
    output_norm: bool = False
    stream_norm: bool = False
    alpha: float = 1.0
    branch_scale: float = 1.0
    branch_scale_kind: BranchScale = "fixed"
    input_gain: float = 1.0
    init_gain: float = 1.0
    init_roles: tuple[Role, ...] = ()
    final_norm: bool = False
    source: str = ""

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots in use, in the order of the equation."""
        names = ("input_norm", "inner_norm", "output_norm", "stream_norm")
        return tuple(name.removesuffix("_norm") for name in names if getattr(self, name))


PLACEMENTS: dict[str, Placement] = {
    p.name: p
    for p in (
        Placement(name="none", source="He et al. 2016, arXiv:1512.03385"),
        Placement(name="pre", input_norm=True, final_norm=True, source="Xiong et al. 2020, arXiv:2002.04745"),
        Placement(name="post", stream_norm=True, source="Vaswani et al. 2017, arXiv:1706.03762"),
        Placement(
            name="sandwich",
            input_norm=True,
            output_norm=True,
            final_norm=True,
            source="Ding et al. 2021, arXiv:2105.13290; Kim et al. 2025 (Peri-LN), arXiv:2502.02732",
        ),
        Placement(
            name="output",
            output_norm=True,
            final_norm=True,
            source="Liu et al. 2022 (Swin V2), arXiv:2111.09883; OLMo 2, arXiv:2501.00656",
        ),
        Placement(
            name="deepnorm", stream_norm=True, init_roles=VALUE_PATH, source="Wang et al. 2022, arXiv:2203.00555"
        ),
        Placement(
            name="sub",
            input_norm=True,
            inner_norm=True,
            init_roles=VALUE_PATH,
            final_norm=True,
            source="Wang et al. 2022 (Magneto), arXiv:2210.06423",
        ),
        Placement(
            name="normformer",
            input_norm=True,
            inner_norm=True,
            output_norm=True,
            final_norm=True,
            source="Shleifer et al. 2021, arXiv:2110.09456",
        ),
        Placement(name="scaled", input_norm=True, final_norm=True, source="Sun et al. 2025, arXiv:2502.05795"),
        Placement(
            name="layerscale",
            input_norm=True,
            branch_scale=1e-5,
            branch_scale_kind="channel",
            final_norm=True,
            source="Touvron et al. 2021, arXiv:2103.17239",
        ),
        Placement(
            name="rezero",
            branch_scale=0.0,
            branch_scale_kind="scalar",
            source="Bachlechner et al. 2020, arXiv:2003.04887",
        ),
    )
}
"""The wirings whose row says all; `placement` fills in the constants that depend on depth."""


def placement(
    name: str,
    *,
    depth: int | None = None,
    other_depth: int | None = None,
    layer: int | None = None,
    stack: Stack = "decoder",
) -> Placement:
    """Look up a wiring, with the constants that its depth decides.

    Args:
        name: a key of `PLACEMENTS`.
        depth: the number of layers of this stack (``deepnorm``, ``sub``).
        other_depth: the number of layers of the other stack of an encoder-decoder pair.
        layer: this layer's number, from 1 (``scaled``).
        stack: which stack the branch belongs to.

    Raises:
        ValueError: an unknown name, or a constant that is needed and missing.
    """
    if name not in PLACEMENTS:
        raise ValueError(f"unknown placement {name!r}; known are {', '.join(sorted(PLACEMENTS))}")
    row = PLACEMENTS[name]
    if name == "scaled":
        return replace(row, input_gain=1 / math.sqrt(_positive("layer", layer, name)))
    if name == "deepnorm":
        alpha, beta = deepnorm_constants(_positive("depth", depth, name), other_depth, stack)
        return replace(row, alpha=alpha, init_gain=beta)
    if name == "sub":
        return replace(row, init_gain=sub_ln_gain(_positive("depth", depth, name), other_depth, stack))
    return row


def deepnorm_constants(depth: int, other_depth: int | None = None, stack: Stack = "decoder") -> tuple[float, float]:
    """(alpha, beta) of DeepNorm, table 2 of arXiv:2203.00555.

    Alone, with N layers: ``(2N)^(1/4)`` and ``(8N)^(-1/4)``. In a pair of N encoder and M decoder layers: encoder
    ``0.81 (N^4 M)^(1/16)`` and ``0.87 (N^4 M)^(-1/16)``, decoder ``(3M)^(1/4)`` and ``(12M)^(-1/4)``.
    """
    if stack == "encoder_of_pair":
        mixed = (depth**4 * _positive("other_depth", other_depth, "deepnorm")) ** (1 / 16)
        return 0.81 * mixed, 0.87 / mixed
    if stack == "decoder_of_pair":
        return (3 * depth) ** 0.25, (12 * depth) ** -0.25
    return (2 * depth) ** 0.25, (8 * depth) ** -0.25


def sub_ln_gain(depth: int, other_depth: int | None = None, stack: Stack = "decoder") -> float:
    """The initialization gain of Sub-LN, arXiv:2210.06423.

    Alone, with N layers: ``sqrt(log 2N)``. In a pair of N encoder and M decoder layers: encoder
    ``sqrt(log(3M) log(2N) / 3)``, decoder ``sqrt(log 3M)``.
    """
    if stack == "encoder_of_pair":
        return math.sqrt(math.log(3 * _positive("other_depth", other_depth, "sub")) * math.log(2 * depth) / 3)
    if stack == "decoder_of_pair":
        return math.sqrt(math.log(3 * depth))
    return math.sqrt(math.log(2 * depth))


def _positive(name: str, value: int | None, placement_name: str) -> int:
    if value is None or value < 1:
        raise ValueError(f"placement {placement_name!r} needs {name} >= 1; got {value!r}")
    return value
