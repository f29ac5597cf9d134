"""A second input of x's shape: a gate, a residual that is added first, or nothing at all."""

from __future__ import annotations

import math

import torch

from normkit.audit.identify.parameters import odd_and_even
from normkit.audit.identify.probe import LARGE, Probe
from normkit.spec import Gate

_NEUTRAL = {"silu": 1.278464542761074, "sigmoid": 40.0}
"""Where each activation is one."""


def ignored(probe: Probe, shape: tuple[int, ...]) -> bool:
    """Whether the second input changes nothing."""
    x = probe.random(shape)
    return torch.equal(probe(x, probe.random(shape)), probe(x, probe.random(shape)))


def gate_of(probe: Probe, shape: tuple[int, ...], elementwise: bool) -> Gate | None:
    """The gate that the response to two uniform gate values fits; None where none does.

    Behind the norm, the output scales with the gate's activation. Before a norm by the input's own statistic, a
    uniform gate shows by its sign alone; before stored statistics, it scales what follows the input and not the rest.
    """
    x = probe.spread(shape) * (1.0 if elementwise else LARGE)
    odd_a, even_a = odd_and_even(lambda t: probe(t, 2.0), x)
    odd_b, even_b = odd_and_even(lambda t: probe(t, -1.0), x)
    power = float(odd_a.square().sum())
    if power == 0:
        return None
    ratio = float((odd_a * odd_b).sum()) / power
    if float((odd_b - ratio * odd_a).abs().mean()) > 1e-3 * float(odd_a.abs().mean()):
        return None
    rest = float(even_a.abs().mean())
    behind = float((even_b - ratio * even_a).abs().mean()) <= 1e-3 * rest + 1e-6 * float(odd_a.abs().mean())
    silu, sigmoid = -_sigmoid(-1) / (2 * _sigmoid(2)), _sigmoid(-1) / _sigmoid(2)
    if abs(ratio + 1) < 1e-3:
        return ("silu", "before")
    if abs(ratio - 1) < 1e-3:
        return ("sigmoid", "before")
    for function, expected in (("silu", silu), ("sigmoid", sigmoid)):
        if abs(ratio - expected) < 1e-3:
            return (function, "after" if behind else "before")  # type: ignore[return-value]
    return None


def neutral(gate: Gate) -> float:
    """The gate value that leaves the norm as it is without one."""
    return _NEUTRAL[gate[0]]


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))
