"""GroupNorm at both ends of its group count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.functional import norm
from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.exact._shared import EXACT, error, errors, least, randn, worst
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    return [{"shape": shape} for shape in ([2, 6, 5, 3], [3, 12, 7], [1, 4, 3, 5, 2])]


def measure(*, seed: int, shape: list[int]) -> dict[str, Any]:
    x = randn(*shape, seed=seed) * 2 + 1
    channels = shape[1]
    F = torch.nn.functional
    instance = F.instance_norm(x)
    whole = F.layer_norm(x, shape[1:])
    group = NormSpec(axes="group", channel_dim=1, has_weight=False)
    per_position = F.layer_norm(x.movedim(1, -1), (channels,)).movedim(-1, 1)
    return {
        "instance": error(F.group_norm(x, channels), instance),
        "instance_normkit": error(norm(x, group.replace(groups=channels)), instance),
        "layer": error(F.group_norm(x, 1), whole),
        "layer_normkit": error(norm(x, group), whole),
        "token_layer": error(F.group_norm(x, 1), per_position),
        "group_gains": torch.nn.GroupNorm(1, channels).weight.numel(),
        "layer_gains": torch.nn.LayerNorm(shape[1:]).weight.numel(),
    }


def judge(rows: list[Row]) -> Verdict:
    both = max(worst(rows, n) for n in ("instance", "instance_normkit", "layer", "layer_normkit"))
    token = least(rows, "token_layer")
    gains = [(row.result["group_gains"], row.result["layer_gains"]) for row in rows]
    numbers: dict[str, float | str] = {
        "largest error of both limits": both,
        "least distance from a LayerNorm over channels alone": token,
        "gains, GroupNorm and LayerNorm": ", ".join(f"{a} and {b}" for a, b in dict.fromkeys(gains)),
    }
    if both > EXACT:
        return Verdict("wrong as stated", f"a limit is off by {both:.1e}", numbers)
    if all(a == b for a, b in gains):
        return Verdict("holds", f"both limits agree to {both:.1e}, gains included", numbers)
    because = (
        f"the normalization agrees to {both:.1e} in both limits, but with G = 1 the gain is one number a channel where "
        f"LayerNorm over (C, H, W) has one an element ({gains[0][0]} against {gains[0][1]} here); a LayerNorm over "
        f"channels at each position is another norm, {token:.2g} away"
    )
    return Verdict("holds within limits", because, numbers)


def plot(rows: list[Row], axes: Axes) -> None:
    names = {
        "instance": "G = C against InstanceNorm",
        "layer": "G = 1 against LN over (C, H, W)",
        "token_layer": "G = 1 against LN over C",
    }
    errors(axes, list(names.values()), [worst(rows, name) for name in names])


CLAIM = Claim(
    id="group-limits",
    kind="exact",
    statement="GroupNorm with G = C is InstanceNorm; with G = 1 it is LayerNorm.",
    source="Wu and He 2018, arXiv:1803.08494; a tutorial says “close to LayerNorm”",
    criterion=f"Without gains both agree to {EXACT:g} in float64, LayerNorm over (C, H, W); it holds within limits if "
    "the learned gains differ in number.",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
