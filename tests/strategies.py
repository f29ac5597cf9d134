"""Hypothesis strategies shared by the suites."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from normkit.spec import NormSpec

GATES = st.tuples(st.sampled_from(["silu", "sigmoid"]), st.sampled_from(["before", "after"]))
EPS = st.sampled_from([0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3, 1e-2])


@st.composite
def specs(draw: st.DrawFn, **fixed: Any) -> NormSpec:
    """Specs over every field's whole domain; ``fixed`` fields are not drawn."""

    def pick(name: str, strategy: st.SearchStrategy[Any]) -> Any:
        return fixed[name] if name in fixed else draw(strategy)

    axes = pick("axes", st.sampled_from(["features", "batch", "instance", "group"]))
    rows = axes == "features"
    channel_dim = pick("channel_dim", st.sampled_from([-1, 1, (-2, -1), (-3, -2, -1)] if rows else [1, -1]))
    single = isinstance(channel_dim, int)
    groups = pick("groups", st.sampled_from([1, 2, 3] if (rows and single) or axes == "group" else [1]))
    partial = pick("partial", st.sampled_from([1.0, 0.5, 0.25]) if rows and single and groups == 1 else st.just(1.0))
    heads = rows and channel_dim == -1 and groups == 1
    frozen = pick("frozen", st.booleans() if axes == "batch" else st.just(False))
    tracked = axes in ("batch", "instance") and not frozen
    statistics = ["mean_square", "sum"] + (["unbiased"] if partial > 0.25 else [])  # n - 1 needs two of them
    return NormSpec(
        axes=axes,
        channel_dim=channel_dim,
        groups=groups,
        partial=partial,
        centered=pick("centered", st.booleans()),
        statistic=pick("statistic", st.sampled_from(statistics)),
        eps=pick("eps", EPS),
        eps_at=pick("eps_at", st.sampled_from(["variance", "std", "floor"])),
        has_weight=pick("has_weight", st.booleans()),
        weight_offset=pick("weight_offset", st.sampled_from([0.0, 1.0, 0.5])),
        has_bias=pick("has_bias", st.booleans()),
        weight_shape=pick("weight_shape", st.sampled_from(["features", "scalar"] + (["per_head"] if heads else []))),
        gain_dtype=pick("gain_dtype", st.sampled_from(["float32", "input"])),
        rounding=pick("rounding", st.sampled_from(["before_gain", "after_gain", "none"])),
        output_dtype=pick("output_dtype", st.sampled_from(["input", "promoted", "weight"])),
        gate=pick("gate", st.none() | GATES),
        running=pick("running", st.sampled_from([None, 0.1, 0.25, "cumulative"]) if tracked else st.none()),
        frozen=frozen,
    )  # fmt: skip
