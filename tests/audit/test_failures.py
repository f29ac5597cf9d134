"""A submodule that raises is named and the rest audited; norms that never ran are listed; equal norms are one probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.audit import AuditError, audit
from normkit.audit.find import modules


class Mlp(nn.Module):
    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.up, self.down, self.raises = nn.Linear(12, 20), nn.Linear(20, 12), raises

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        if self.raises:
            raise RuntimeError("a kernel that is not built here")
        return self.down(self.up(x).relu()), None


class Pre(nn.Module):
    def __init__(self, broken: int | None, depth: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(12, eps=1e-6) for _ in range(depth))
        self.mlps = nn.ModuleList(Mlp(i == broken) for i in range(depth))
        self.last = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))[0]
        return self.last(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_behind_a_submodule_that_raises_the_audit_goes_on(device: str) -> None:
    model, x = Pre(broken=1).to(device), torch.randn(2, 5, 12, device=device)
    result = audit(model, x)
    assert [(n.name, n.placement) for n in result.norms] == [
        ("norms.0", "pre"), ("norms.1", "pre"), ("norms.2", "pre"), ("last", "final")
    ]  # fmt: skip
    assert result.failures == ("mlps.1 raised RuntimeError: a kernel that is not built here",)
    assert [b.placement for b in result.branches] == ["pre"] * 3
    assert "forward" not in vars(model.mlps[1])
    assert audit(Pre(broken=None), torch.randn(2, 5, 12)).failures == ()


def test_a_submodule_that_ends_the_process_ends_no_later_run() -> None:
    """A batch norm in training asks for a backward pass, in which nothing stands in for what fails."""

    class Exits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise SystemExit(2)

    result = audit(nn.Sequential(nn.BatchNorm1d(12), Exits()).train(), torch.randn(6, 12))
    assert [n.name for n in result.norms] == ["0"]
    assert result.failures == ("1 raised SystemExit: 2",)


def test_what_ran_before_is_reported_where_nothing_can_stand_in() -> None:
    class Ends(Pre):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ValueError("no labels")

    result = audit(Ends(broken=None), torch.randn(2, 5, 12))
    assert len(result.norms) == 4
    assert result.failures == ("the model raised ValueError: no labels",)


def test_wrong_inputs_are_an_error_and_no_partial_audit() -> None:
    with pytest.raises(AuditError, match="give inputs that fit"):
        audit(Pre(broken=None), torch.randn(2, 5, 7))


def test_norms_that_never_ran_are_listed_with_the_reason() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = Pre(broken=None), Pre(broken=None)
            self.spare = nn.BatchNorm1d(12)
            self.fused = nn.LayerNorm(12)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.layer_norm(x, (12,), self.fused.weight, self.fused.bias)  # its tensors are read
            return self.used(x)

    result = audit(Tower(), torch.randn(2, 5, 12))
    assert {(u.name, u.kind, u.reason) for u in result.unreached} == {
        ("other.norms.0", "rms", "other was never called"),
        ("other.norms.1", "rms", "other was never called"),
        ("other.norms.2", "rms", "other was never called"),
        ("other.last", "layer", "other was never called"),
        ("spare", "batch", "it was never called with these inputs"),
    }
    assert result.to_dict()["unreached"][0]["name"] == "other.norms.0"
    assert audit(Pre(broken=None), torch.randn(2, 5, 12)).unreached == ()


def test_equal_norms_are_identified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[nn.Module] = []
    identify = modules.identify
    monkeypatch.setattr(modules, "identify", lambda m, *a, **k: seen.append(m) or identify(m, *a, **k))
    model = Pre(broken=None, depth=5)
    with torch.no_grad():
        for norm in model.norms:
            norm.weight.copy_(torch.rand(12))
    result = audit(model, torch.randn(2, 5, 12))
    assert len([m for m in seen if isinstance(m, nn.RMSNorm)]) == 1
    model.norms[3].eps = 1e-3
    assert audit(model, torch.randn(2, 5, 12))["norms.3"].spec.eps == pytest.approx(1e-3, rel=0.02)
    assert result["norms.3"].spec.eps == pytest.approx(1e-6, rel=0.02)


def test_the_device_is_where_most_parameters_are() -> None:
    model = nn.Sequential(nn.LayerNorm(4, device="meta"), nn.Linear(4, 40, device="meta"))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    assert audit(model, torch.empty(2, 4, device="meta")).device == "meta"
    assert audit(nn.RMSNorm(4, elementwise_affine=False), torch.empty(2, 4, device="meta")).device == "meta"


def test_an_input_that_one_run_uses_up_is_refused() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, parts: Any) -> Tensor:
            return self.norm(sum(parts))

    parts = [torch.randn(2, 4), torch.randn(2, 4)]
    assert len(audit(Summed(), parts).norms) == 1
    with pytest.raises(AuditError, match="generator, which one run uses up: give a list"):
        audit(Summed(), (part for part in parts))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_program_does_not_say_its_arguments() -> None:
    model = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4))
    assert [n.kind for n in audit(model, torch.randn(2, 4)).norms] == ["layer"]


def test_a_model_whose_missing_attributes_raise() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x))

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                raise RuntimeError(f"no attribute {name}") from None

    assert len(audit(Strict(), torch.randn(2, 4)).norms) == 1
