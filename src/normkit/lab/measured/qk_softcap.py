"""QK-norm, soft-caps and z-loss: what each bounds, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.attention import largest_attention_logit
from normkit.lab.setups.judging import graded, numbers
from normkit.lab.setups.language import language_loss, language_model, train_language
from normkit.lab.setups.plotting import bars
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import difference, t_interval, values
from normkit.lab.setups.text import fixed_windows, text
from normkit.lab.setups.timing import median_times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "qk-norm": {"qk_norm": "head"},
    "attention soft-cap": {"attention_softcap": 10.0},
    "logit soft-cap": {"logit_softcap": 10.0},
    "z-loss": {},
}
BOUNDS = {
    "qk-norm": "largest_attention_logit",
    "attention soft-cap": "largest_attention_logit",
    "logit soft-cap": "largest_output_logit",
    "z-loss": "normalizer",
}
"""What each method is meant to bound; the normalizer is |log Z| of the output's softmax."""
Z_LOSS = 1e-2  # a hundred times PaLM's 1e-4, for a run a thousand times shorter


def cells(quick: bool) -> list[Cell]:
    """Methods at one high learning rate."""
    depth, steps = (1, 10) if quick else (4, 200)
    return [{"method": m, "rate": 3e-2, "depth": depth, "steps": steps} for m in METHODS]


def measure(seed: int, method: str, rate: float, depth: int, steps: int) -> dict[str, Any]:
    """The largest logits after training, the validation loss, and a step's time over that without the method."""
    z_loss = Z_LOSS if method == "z-loss" else 0.0
    options: dict[str, Any] = {"depth": depth, "positions": "learned", "max_positions": 64}
    with seeded(seed):
        model = language_model(**options, **METHODS[method])
        plain = language_model(**options)
        loss = train_language(model, steps=steps, rate=rate, z_loss=z_loss).validation
    tokens, targets = fixed_windows(text().validation, 32, 16)
    with torch.no_grad():
        scores = model(tokens)

    def step(of: torch.nn.Module, z: float) -> None:
        of.zero_grad()
        language_loss(of, tokens[:8], targets[:8], z).backward()

    times = median_times({"plain": lambda: step(plain, 0.0), "own": lambda: step(model, z_loss)}, rounds=9)
    return {
        "largest_attention_logit": largest_attention_logit(model, tokens),
        "largest_output_logit": scores.abs().max().item(),
        "normalizer": scores.logsumexp(-1).abs().max().item(),
        "loss": loss,
        "time": times["own"] / times["plain"],
    }


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    bounded, told = {}, []
    for method, name in BOUNDS.items():
        without, own = values(rows, name, method="none"), values(rows, name, method=method)
        bounded[method] = difference([1.0] * len(own), [b / a for a, b in zip(without, own, strict=True)])
        cost = difference(values(rows, "loss", method=method), values(rows, "loss", method="none"))
        slower = t_interval(values(rows, "time", method=method))
        told.append(
            f"{method}: {name.replace('_', ' ')} {t_interval(own)} against {t_interval(without)}, loss {cost} higher, "
            f"{slower} times the time"
        )
    return Verdict(
        graded(i.low > 0 for i in bounded.values()),
        "; ".join(told),
        numbers(**{m.replace(" ", "_").replace("-", "_"): i for m, i in bounded.items()}),
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """The three figures by method."""
    bars(axes, rows, "method", "largest_attention_logit", "largest_output_logit", "normalizer", log=True)
    axes.tick_params("x", labelrotation=20)


CLAIM = Claim(
    id="qk-softcap",
    kind="measured",
    statement="QK-norm, logit soft-caps and z-loss each bound logits.",
    source="a tutorial's statement; Gemma 2, arXiv:2408.00118; PaLM, arXiv:2204.02311",
    criterion="after training at a high rate what each method acts on (attention logits; output logits; the output's "
    "normalizer log Z) is smaller than without it, by its share (lower end of the 95 % t-interval over seeds above 0); "
    "within limits if for some methods; loss and time are reported",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
