"""Random module trees and broken models: an audit ends in a result or in AuditError, and changes nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.audit import AuditError, audit
from normkit.audit.result import Audit

from .random_models import case

_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks"))


def _state(model: nn.Module, given: tuple[Any, ...]) -> list[Any]:
    """Everything that must be as before, as values that compare."""
    tensors = [t for t in (*model.state_dict().values(), *given) if isinstance(t, Tensor)]
    modules = [(n, m.training, sorted(vars(m)), [len(getattr(m, h)) for h in _HOOKS]) for n, m in model.named_modules()]
    bits = [t.contiguous().view(torch.uint8).tolist() if t.dim() else repr(t) for t in tensors]
    return [modules, bits, torch.get_rng_state().tolist(), random.getstate(), torch.is_grad_enabled()]


def check(seed: int) -> Audit | None:
    model, given = case(seed)
    before = _state(model, given)
    result, refusal = None, ""
    try:
        result = audit(model, *given)
        result.to_json()
    except AuditError as error:
        refusal = str(error)
    assert "\n" not in refusal, seed
    assert _state(model, given) == before, seed
    return result


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_random_models(first: int) -> None:
    results = [check(seed) for seed in range(first, first + 50)]
    assert sum(result is not None for result in results) > 15
    assert any(result is not None and result.norms for result in results)
    assert any(result is None or result.failures for result in results)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_random_models() -> None:
    for seed in range(150, 2150):
        check(seed)
