"""Gemma's (1 + w) weights loaded into a plain RMSNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normkit.lab.claim import Cell, Claim, Row, Verdict
from normkit.lab.setups.judging import NOT_SEEN, numbers
from normkit.lab.setups.language import language_model, train_language, validate
from normkit.lab.setups.plotting import bars
from normkit.lab.setups.seeds import seeded
from normkit.lab.setups.statistics import difference, t_interval, values
from normkit.lab.setups.text import fixed_windows, text
from normkit.spec import NormSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def cells(quick: bool) -> list[Cell]:
    """One model, trained with a gain of 1 + w."""
    return [{"steps": 10 if quick else 200, "depth": 1 if quick else 4}]


def measure(seed: int, steps: int, depth: int) -> dict[str, Any]:
    """The validation loss before and after its weights go into a plain RMSNorm, as they are and with 1 added."""
    offset = NormSpec(centered=False, eps=1e-6, weight_offset=1.0)
    with seeded(seed):
        model = language_model(norm=offset, depth=depth)
        before = train_language(model, steps=steps, rate=3e-3, weight_decay=0.1).validation
        plain = language_model(norm=offset.replace(weight_offset=0.0), depth=depth)
    tokens, _ = fixed_windows(text().validation, 16, 16)
    state = model.state_dict()
    gains = torch.cat([v for k, v in state.items() if k.endswith("_norm.weight")])
    found = {"original": before, "stored_mean": gains.mean().item()}
    with torch.no_grad():
        logits = model(tokens)
        for name, added in (("as_they_are", 0.0), ("with_1_added", 1.0)):
            plain.load_state_dict({k: v + added if k.endswith("_norm.weight") else v for k, v in state.items()})
            found[name] = validate(plain)
            found[f"logits_{name}"] = ((plain(tokens) - logits).norm() / logits.norm()).item()
    return found


def judge(rows: list[Row]) -> Verdict:
    """See ``CLAIM.criterion``."""
    worse = difference(values(rows, "as_they_are"), values(rows, "original"))
    mended = max(map(abs, difference(values(rows, "with_1_added"), values(rows, "original"))))
    logits = t_interval(values(rows, "logits_as_they_are"))
    return Verdict(
        "holds" if worse.low > 0.5 and mended < 1e-3 else NOT_SEEN,
        f"loaded as they are the weights raise the validation loss by {worse} nats and change the logits by {logits} of "
        f"their size; with 1 added the loss is the original's within {mended:.1e}",
        numbers(loss_rise=worse, logits=logits) | {"with_1_added": mended},
    )


def plot(rows: list[Row], axes: Axes) -> None:
    """The three losses."""
    bars(axes, rows, "depth", "original", "as_they_are", "with_1_added")


CLAIM = Claim(
    id="gemma-offset-port",
    kind="measured",
    statement="Loading (1 + w) weights into a plain RMSNorm ruins the scale of the whole model.",
    source="a tutorial's statement",
    criterion="the validation loss of a trained model rises by more than 0.5 nats (lower end of the 95 % t-interval "
    "over seeds), and is back within 0.001 when 1 is added to the weights",
    cells=cells,
    measure=measure,
    judge=judge,
    plot=plot,
)
