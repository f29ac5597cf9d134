"""Attention logits at a high learning rate, with and without QK-norm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.attention import largest_attention_logit
from normkit.lab.setups.judging import NOT_SEEN, numbers
from normkit.lab.setups.language import language_model, train_language
from normkit.lab.setups.plotting import lines
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import over_seeds, select, settings, t_interval, values
from normkit.lab.setups.text import fixed_windows, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    """With and without, by learning rate."""
    depth, steps, rates = (1, 10, (3e-2,)) if quick else (4, 200, (3e-3, 3e-2))
    return [{"qk_norm": q, "rate": r, "depth": depth, "steps": steps} for q in ("none", "head") for r in rates]


def measure(seed: int, qk_norm: str, rate: float, depth: int, steps: int) -> dict[str, Any]:
    """The largest attention logit after training, and the validation loss."""
    with seeded(seed):
        norm: Any = None if qk_norm == "none" else qk_norm
        model = language_model(qk_norm=norm, depth=depth, positions="learned", max_positions=64)
        loss = train_language(model, steps=steps, rate=rate).validation
        return {
            "largest_logit": largest_attention_logit(model, fixed_windows(text().validation, 32, 16)[0]),
            "loss": loss,
        }


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    high, low = max(settings(rows, "rate")), min(settings(rows, "rate"))

    def log_ratio(found: list[Row]) -> float:
        logit = {r.cell["qk_norm"]: r.result["largest_logit"] for r in found}
        return math.log(logit["none"] / logit["head"])

    ratio = over_seeds(select(rows, rate=high), log_ratio)
    sizes = {n: t_interval(values(rows, "largest_logit", qk_norm=n, rate=high)) for n in ("none", "head")}
    losses = {n: t_interval(values(rows, "loss", qk_norm=n, rate=high)) for n in ("none", "head")}
    outcome = "holds" if ratio.low > math.log(2) else "holds within limits" if ratio.low > 0 else NOT_SEEN
    gentle = over_seeds(select(rows, rate=low), log_ratio)
    return Verdict(
        outcome,
        f"at a rate of {high:g} the largest attention logit is {sizes['none']} without QK-norm and {sizes['head']} with, "
        f"{math.exp(ratio.mean):.3g} times as large (at {low:g}: {math.exp(gentle.mean):.3g}); losses {losses['none']} and "
        f"{losses['head']}",
        numbers(log_ratio=ratio, without=sizes["none"], with_norm=sizes["head"]),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """Largest logit against learning rate."""
    lines(axes, rows, "rate", "largest_logit", "qk_norm", log="xy")


CLAIM = Claim(
    id="qk-norm",
    kind="measured",
    statement="QK-norm bounds the attention logits at a high learning rate.",
    source="Henry et al. 2020, arXiv:2010.04245; Dehghani et al. 2023, arXiv:2302.05442; a tutorial",
    criterion="at the highest rate the largest attention logit after training is more than twice as large without "
    "QK-norm (lower end of the 95 % t-interval of the ratio's logarithm over seeds); within limits if clearly larger",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
