"""What a learning-rate schedule does at the start, found by stepping a copy of it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

_STEPS = 20
_RISE = 1.05


def warms_up(scheduler: Any, optimizer: Any) -> bool:
    """Whether the learning rate rises over the first steps from here.

    The scheduler is copied onto an optimizer of its own, so that neither the given ones nor any weight moves. What
    cannot be copied or stepped is trusted to warm up.
    """
    owner = getattr(scheduler, "optimizer", None) or optimizer
    if scheduler is None:
        return False
    try:
        twin = (
            copy.deepcopy(scheduler, {id(owner): _stand_in(owner)}) if owner is not None else copy.deepcopy(scheduler)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer step comes first here
            rates = [_rate(twin)]
            for _ in range(_STEPS):
                twin.step()
                rates.append(_rate(twin))
    except Exception:  # a foreign schedule may need a loss, or anything else
        return True
    return max(rates) > _RISE * rates[0]


def _stand_in(optimizer: Any) -> torch.optim.Optimizer:
    """An optimizer with as many groups and the same settings, over parameters of its own."""
    twin = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(()))]} for _ in optimizer.param_groups], lr=0.0)
    for group, original in zip(twin.param_groups, optimizer.param_groups, strict=True):
        group.update({name: copy.deepcopy(value) for name, value in original.items() if name != "params"})
    return twin


def _rate(scheduler: Any) -> float:
    groups = scheduler.optimizer.param_groups
    return max(float(group["lr"]) for group in groups)
