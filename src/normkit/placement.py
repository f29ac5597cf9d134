"""Placement: where a norm sits on the residual stream, and the tables of published wirings.

One equation describes one residual branch::

    y = N_stream(alpha * x + lambda * N_output(F(g * N_input(x))))        F may hold N_inner before its last projection

`PLACEMENTS` has the wirings that are the same in every layer and sublayer, `SCHEDULES` those that are not. nGPT and
KEEL are in neither: nGPT's definition reaches beyond the branch (all weights are renormalized after every step, and
logits and feed-forward states carry scales of their own), and for KEEL's factor on the identity path no published
value could be established. A `Placement` of one's own states such a branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

Stack = Literal["encoder", "decoder", "encoder_of_pair", "decoder_of_pair"]
Sublayer = Literal["attention", "cross_attention", "ffn"]
BranchScale = Literal["fixed", "scalar", "channel"]
Role = Literal["query", "key", "value", "output", "ffn_in", "ffn_gate", "ffn_out"]

VALUE_PATH: tuple[Role, ...] = ("value", "output", "ffn_in", "ffn_out")
"""What a branch's output is linear in; a gate's matrix is not among them, so that a gated branch scales alike."""
WRITES: tuple[Role, ...] = ("output", "ffn_out")
"""The last projection of each branch."""

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
        scalar_bias: a learned scalar, 0 at first, is added before and after F (Fixup).
        head_scale: each attention head's output has a learned factor, 1 at first (NormFormer).
        qkv_norm: queries, keys and values are normalized within each head (HybridNorm).
        second_stream: the branch outputs are also summed, unnormalized, on a second stream (ResiDual).
        init_gain: the factor that initialization puts on the matrices named by ``init_roles``.
        init_roles: the matrices that ``init_gain`` scales.
        zero_roles: the matrices that start at zero.
        final_norm: whether a norm is due after the last block.
        source: the paper.

    Raises:
        ValueError: a factor that is not finite, a negative one on the identity path or the initialization, an unknown
            kind or role.
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
    scalar_bias: bool = False
    head_scale: bool = False
    qkv_norm: bool = False
    second_stream: bool = False
    init_gain: float = 1.0
    init_roles: tuple[Role, ...] = ()
    zero_roles: tuple[Role, ...] = ()
    final_norm: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a string that is not empty; got {self.name!r}")
        lowest = {"alpha": " > 0", "init_gain": " >= 0"}
        for field in ("alpha", "branch_scale", "input_gain", "init_gain"):
            value = getattr(self, field)
            low = (field == "alpha" and value <= 0) or (field == "init_gain" and value < 0)
            if not math.isfinite(value) or low:
                raise ValueError(f"{field} must be a finite number{lowest.get(field, '')}; got {value!r}")
        if self.branch_scale_kind not in get_args(BranchScale):
            choices = ", ".join(map(repr, get_args(BranchScale)))
            raise ValueError(f"branch_scale_kind must be one of {choices}; got {self.branch_scale_kind!r}")
        for field in ("init_roles", "zero_roles"):
            for role in getattr(self, field):
                if role not in get_args(Role):
                    choices = ", ".join(map(repr, get_args(Role)))
                    raise ValueError(f"{field} may hold {choices}; got {role!r}")

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
            name="resi_dual",
            stream_norm=True,
            second_stream=True,
            final_norm=True,
            source="Xie et al. 2023, arXiv:2304.14802",
        ),
        Placement(name="scaled", input_norm=True, final_norm=True, source="Sun et al. 2025, arXiv:2502.05795"),
        Placement(
            name="parallel",
            input_norm=True,
            final_norm=True,
            source="Wang and Komatsuzaki 2021 (GPT-J); Chowdhery et al. 2022 (PaLM), arXiv:2204.02311",
        ),
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
        Placement(
            name="skipinit",
            branch_scale=0.0,
            branch_scale_kind="scalar",
            source="De and Smith 2020, arXiv:2002.10444",
        ),
        Placement(
            name="fixup",
            branch_scale_kind="scalar",
            scalar_bias=True,
            init_roles=("value", "ffn_in"),
            zero_roles=WRITES,
            source="Zhang et al. 2019, arXiv:1901.09321",
        ),
    )
}
"""The wirings whose row says all; `placement` fills in the constants that depend on depth."""

_NORMFORMER = Placement(name="normformer", input_norm=True, final_norm=True, source="")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRow:
    """A wiring that differs by layer or sublayer; ``rule`` gives the placement of a (layer, depth, sublayer)."""

    name: str
    rule: Callable[[int, int, Sublayer], Placement]
    needs: tuple[str, ...]
    final_norm: bool
    source: str


def _mix(layer: int, depth: int, sublayer: Sublayer) -> Placement:
    return PLACEMENTS["post" if layer <= depth // 4 else "pre"]


def _hybrid(layer: int, depth: int, sublayer: Sublayer) -> Placement:
    """Attention on the raw stream with QKV-norm; the norm before the feed-forward layer stays on its identity path."""
    if sublayer == "ffn":
        return PLACEMENTS["none"]
    return replace(PLACEMENTS["post"], qkv_norm=True)


def _hybrid_first(layer: int, depth: int, sublayer: Sublayer) -> Placement:
    if layer > 1:
        return _hybrid(layer, depth, sublayer)
    return PLACEMENTS["pre"] if sublayer == "ffn" else replace(PLACEMENTS["pre"], qkv_norm=True)


def _normformer(layer: int, depth: int, sublayer: Sublayer) -> Placement:
    if sublayer == "ffn":
        return replace(_NORMFORMER, inner_norm=True)
    if sublayer == "attention":
        return replace(_NORMFORMER, output_norm=True, head_scale=True)
    return _NORMFORMER


SCHEDULES: dict[str, ScheduleRow] = {
    s.name: s
    for s in (
        ScheduleRow(
            name="mix",
            rule=_mix,
            needs=("layer", "depth"),
            final_norm=True,
            source="Li et al. 2024 (Mix-LN), arXiv:2412.13795: post in the first quarter of the layers, pre after it",
        ),
        ScheduleRow(
            name="hybrid",
            rule=_hybrid,
            needs=("kind",),
            final_norm=True,
            source="Zhuo et al. 2025 (HybridNorm), arXiv:2503.04598",
        ),
        ScheduleRow(
            name="hybrid_first_pre",
            rule=_hybrid_first,
            needs=("layer", "kind"),
            final_norm=True,
            source="Zhuo et al. 2025 (HybridNorm*), arXiv:2503.04598: the first block is pre",
        ),
        ScheduleRow(
            name="normformer",
            rule=_normformer,
            needs=("kind",),
            final_norm=True,
            source="Shleifer et al. 2021, arXiv:2110.09456",
        ),
    )
}
"""The wirings that differ by layer or sublayer."""


def placement(
    name: str,
    *,
    depth: int | None = None,
    other_depth: int | None = None,
    layer: int | None = None,
    stack: Stack = "decoder",
    kind: Sublayer | None = None,
) -> Placement:
    """Look up the wiring of one branch, with the constants that its depth decides.

    Args:
        name: a key of `PLACEMENTS` or `SCHEDULES`.
        depth: the number of layers of this stack (``deepnorm``, ``sub``, ``fixup``, ``mix``; ``layerscale`` if given).
        other_depth: the number of layers of the other stack of an encoder-decoder pair.
        layer: this layer's number, from 1 (``scaled``, ``mix``, ``hybrid_first_pre``).
        stack: which stack the branch belongs to.
        kind: what the branch holds (``hybrid``, ``normformer``; ``sub`` treats cross-attention as ``pre``).

    Raises:
        ValueError: an unknown name, or a constant that is needed and missing.
    """
    if name not in PLACEMENTS and name not in SCHEDULES:
        raise ValueError(f"unknown placement {name!r}; known are {', '.join(known())}")
    for argument, value, choices in (("stack", stack, get_args(Stack)), ("kind", kind, get_args(Sublayer))):
        if value is not None and value not in choices:
            raise ValueError(f"{argument} must be one of {', '.join(map(repr, choices))}; got {value!r}")
    for argument, number in (("layer", layer), ("depth", depth), ("other_depth", other_depth)):
        if number is not None:
            _positive(argument, number, name)
    if layer is not None and depth is not None and layer > depth:
        raise ValueError(f"layer {layer} lies past depth {depth}; layers count from 1")
    if name in SCHEDULES:
        row = SCHEDULES[name]
        layer = _positive("layer", layer, name) if "layer" in row.needs else layer
        depth = _positive("depth", depth, name) if "depth" in row.needs else depth
        if kind is None and "kind" in row.needs:
            raise ValueError(f"placement {name!r} needs kind, one of {', '.join(map(repr, get_args(Sublayer)))}")
        found = row.rule(layer or 1, depth or 1, kind or "ffn")
        return found if found.source else replace(found, source=row.source)
    found = PLACEMENTS[name]
    if name == "scaled":
        return replace(found, input_gain=1 / math.sqrt(_positive("layer", layer, name)))
    if name == "deepnorm":
        alpha, beta = deepnorm_constants(_positive("depth", depth, name), other_depth, stack)
        return replace(found, alpha=alpha, init_gain=beta)
    if name == "sub":
        gain = sub_ln_gain(_positive("depth", depth, name), other_depth, stack)
        if kind == "cross_attention":
            return replace(found, inner_norm=False, init_roles=())
        return replace(found, init_gain=gain)
    if name == "fixup":
        return replace(found, init_gain=fixup_gain(_positive("depth", depth, name), other_depth, stack))
    if name == "layerscale" and depth is not None:
        return replace(found, branch_scale=0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The placement of every branch of one stack; see `schedule`."""

    name: str
    depth: int
    other_depth: int | None = None
    stack: Stack = "decoder"
    own: Placement | None = None

    def branch(self, layer: int, kind: Sublayer) -> Placement:
        """The wiring of one sublayer of one layer, counted from 1."""
        if self.own is not None:
            return self.own
        return placement(
            self.name,
            depth=self.depth,
            other_depth=self.other_depth,
            layer=layer,
            stack=self.stack,
            kind=kind,
        )

    @property
    def final_norm(self) -> bool:
        """Whether a norm is due after the last block."""
        if self.own is not None:
            return self.own.final_norm
        return (SCHEDULES.get(self.name) or PLACEMENTS[self.name]).final_norm

    @property
    def second_stream(self) -> bool:
        """Whether branch outputs are also summed on a second stream."""
        found = self.own or PLACEMENTS.get(self.name)
        return found is not None and found.second_stream

    @property
    def parallel(self) -> bool:
        """Whether attention and feed-forward layer read the same stream and are added together."""
        return self.name == "parallel"


def schedule(
    wiring: str | Placement, depth: int, *, other_depth: int | None = None, stack: Stack = "decoder"
) -> Schedule:
    """The placement of every branch of a stack of ``depth`` layers.

    Args:
        wiring: a key of `PLACEMENTS` or `SCHEDULES`, or one's own `Placement`, which is then every branch's.
        depth, other_depth, stack: see `placement`.

    Raises:
        ValueError: as `placement`.
    """
    own, name = (wiring, wiring.name) if isinstance(wiring, Placement) else (None, wiring)
    made = Schedule(name=name, depth=_positive("depth", depth, name), other_depth=other_depth, stack=stack, own=own)
    made.branch(1, "attention")
    return made


def known() -> tuple[str, ...]:
    """Every name that `placement` and `schedule` accept."""
    return tuple(sorted({*PLACEMENTS, *SCHEDULES}))


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
    ``sqrt(log(3M) log(2N) / 3)``, decoder ``sqrt(log 3M)``. Cross-attention is left as it is.
    """
    if stack == "encoder_of_pair":
        return math.sqrt(math.log(3 * _positive("other_depth", other_depth, "sub")) * math.log(2 * depth) / 3)
    if stack == "decoder_of_pair":
        return math.sqrt(math.log(3 * depth))
    return math.sqrt(math.log(2 * depth))


def fixup_gain(depth: int, other_depth: int | None = None, stack: Stack = "decoder", *, matrices: int = 2) -> float:
    """The factor of Fixup, ``B^(-1/(2m - 2))`` with B residual branches of m matrices, arXiv:1901.09321.

    A layer has two branches (a decoder's in a pair has three), and a branch two matrices in a row: value and output,
    or in and out. With m = 2 the factor is ``B^(-1/2)``.
    """
    if matrices < 2:
        raise ValueError(f"matrices must be >= 2, since the last one starts at zero; got {matrices}")
    if stack == "encoder_of_pair":
        branches = 2 * depth + 3 * _positive("other_depth", other_depth, "fixup")
    elif stack == "decoder_of_pair":
        branches = 3 * depth + 2 * _positive("other_depth", other_depth, "fixup")
    else:
        branches = 2 * depth
    return branches ** (-1 / (2 * matrices - 2))


def _positive(name: str, value: int | None, placement_name: str) -> int:
    if value is None:
        raise ValueError(f"placement {placement_name!r} needs {name}; give {name}=, an integer >= 1")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1; got {value!r}")
    return value
