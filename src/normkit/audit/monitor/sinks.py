"""Where a monitor's numbers go."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from normkit.audit.numbers.record import Numbers

Sink = Callable[[int, Numbers], object]


def as_sink(sink: Any) -> Sink:
    """``print``, a TensorBoard writer (anything with ``add_scalar``) or any callable ``(step, numbers)``.

    Raises:
        TypeError: it is none of these.
    """
    if sink is builtins.print:
        return _print
    if callable(getattr(sink, "add_scalar", None)):
        return lambda step, numbers: _write(sink, step, numbers)
    if not callable(sink):
        raise TypeError(
            f"sink must be print, a TensorBoard SummaryWriter or a callable (step, numbers); got {type(sink).__name__}"
        )
    return sink


def scalars(numbers: Numbers) -> dict[str, float]:
    """The numbers as flat tags: ``norm/NAME/input_rms``, ``branch/NAME/share``, ``attention/NAME/logit_max``, ..."""
    found: dict[str, float] = {}
    for norm in numbers.norms:
        values = {
            "input_rms": norm.input_rms,
            "input_max": norm.input_max,
            "output_rms": norm.output_rms,
            "outlier_ratio": norm.outlier_ratio,
            "nonfinite": float(norm.nonfinite),
            "gradient_rms": norm.gradient_rms,
        }
        if norm.gain is not None:
            values |= {"gain_min": norm.gain.min, "gain_median": norm.gain.median, "gain_max": norm.gain.max}
            values |= {"gain_dead": float(len(norm.gain.dead))}
        found |= {f"norm/{norm.name}/{key}": value for key, value in values.items() if value is not None}
    for branch in numbers.branches:
        for key in ("stream_rms", "branch_rms", "share"):
            found[f"branch/{branch.name}/{key}"] = getattr(branch, key)
    for attention in numbers.attentions:
        found[f"attention/{attention.name}/logit_max"] = attention.logit_max
    return {tag: value for tag, value in found.items() if math.isfinite(value)}


def _write(writer: Any, step: int, numbers: Numbers) -> None:
    for tag, value in scalars(numbers).items():
        writer.add_scalar(tag, value, step)


def _print(step: int, numbers: Numbers) -> None:
    print(f"step {step}: {summary(numbers)}")


def summary(numbers: Numbers) -> str:
    """One line: the ends of the stream, and the worst of the rest."""
    parts = []
    if numbers.branches:
        first, last = numbers.branches[0], numbers.branches[-1]
        parts.append(f"stream RMS {first.stream_rms:.3g} to {last.stream_rms:.3g}")
        parts.append(f"branch share {min(b.share for b in numbers.branches):.2f} to "
                     f"{max(b.share for b in numbers.branches):.2f}")  # fmt: skip
    if numbers.norms:
        worst = max(numbers.norms, key=lambda n: n.outlier_ratio)
        parts.append(f"outlier channel {worst.outlier_ratio:.3g} ({worst.name})")
    dead = sum(len(n.gain.dead) for n in numbers.norms if n.gain is not None)
    if dead:
        parts.append(f"{dead} dead gains")
    if numbers.attentions:
        parts.append(f"logits {max(a.logit_max for a in numbers.attentions):.3g}")
    gradients = [n.gradient_rms for n in numbers.norms if n.gradient_rms]
    if gradients:
        parts.append(f"gradient {gradients[0]:.2g} to {gradients[-1]:.2g}")
    bad = sum(n.nonfinite for n in numbers.norms)
    return ", ".join([*parts, *([f"{bad} values not finite"] if bad else [])])
