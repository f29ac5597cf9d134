"""NormSpec: domains, contradictions, kinds, canonical form, JSON."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import assume, given, settings

from normkit import spec as S
from normkit.reference import normalize
from normkit.spec import NormSpec
from tests.strategies import specs
from tests.test_reference import arguments


@given(spec=specs())
@settings(max_examples=200, deadline=None)
def test_json_round_trip(spec: NormSpec) -> None:
    assert NormSpec.from_dict(spec.to_dict()) == spec


@given(spec=specs(running=None, frozen=False))
@settings(max_examples=100, deadline=None)
def test_canonical_computes_the_same_in_every_dtype(spec: NormSpec) -> None:
    canonical = spec.canonical(channels=6)
    assert canonical.canonical(channels=6) == canonical
    x, weight, bias, gate = arguments(spec, 0)
    for dtype in (torch.float64, torch.bfloat16):
        tensors = [None if t is None else t.to(dtype) for t in (weight, bias)]
        moved_gate = None if gate is None else gate.to(dtype)
        wanted = normalize(x.to(dtype), spec, *tensors, gate=moved_gate)
        assume(torch.isfinite(wanted).all().item())  # one centered value and no eps: 0 / 0
        found = normalize(x.to(dtype), canonical, *tensors, gate=moved_gate)
        if spec.eps != 0 or spec.eps_at == canonical.eps_at:
            assert torch.equal(found, wanted)
        else:  # x * rsqrt(s) against x / sqrt(s): 2 roundings of the compute dtype, a last place of bfloat16
            limit = 1e-14 if dtype == torch.float64 else 2**-7
            torch.testing.assert_close(found, wanted, rtol=limit, atol=limit * 0.01)


def test_kinds_of_the_named_conventions() -> None:
    kinds = {name: spec.kind for name, spec in S.NAMED.items()}
    assert kinds["llama"] == kinds["gemma"] == kinds["t5"] == kinds["mamba2_gated"] == "rms"
    assert kinds["torch_layer"] == kinds["olmo"] == kinds["annotated_layer"] == "layer"
    assert kinds["l2_normalize"] == kinds["scale_norm"] == "l2"
    assert (kinds["torch_batch"], kinds["torch_instance"], kinds["torch_group"]) == ("batch", "instance", "group")


def test_as_many_groups_as_channels_is_instance() -> None:
    spec = NormSpec(axes="group", channel_dim=1, groups=8)
    assert spec.canonical(channels=8).kind == "instance"
    assert spec.canonical(channels=16).kind == "group"


def test_it_is_frozen_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        S.LLAMA.eps = 1.0  # type: ignore[misc]
    assert len({S.LLAMA, S.LLAMA.replace(), S.GEMMA}) == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"eps": -1e-6}, "eps must be finite and >= 0; got -1e-06"),
        ({"eps": float("nan")}, "eps must be finite"),
        ({"axes": "layer"}, "axes must be one of"),
        ({"groups": 0}, "groups must be an integer >= 1"),
        ({"axes": "batch", "groups": 2}, "groups=2 has no meaning"),
        ({"partial": 0.0}, r"partial must be in \(0, 1\]"),
        ({"partial": 0.5, "axes": "batch"}, "partial=0.5 needs axes='features'"),
        ({"channel_dim": 2}, "channel_dim must be -1, 1 or a tuple"),
        ({"channel_dim": (-1, -2)}, "trailing dims in order"),
        ({"weight_shape": "per_head", "channel_dim": 1}, "per_head"),
        ({"running": 0.1}, "running=0.1 needs axes"),
        ({"axes": "batch", "running": 1.5}, r"momentum in \[0, 1\]"),
        ({"frozen": True}, "frozen=True needs axes='batch'"),
        ({"axes": "batch", "frozen": True, "running": 0.1}, "never updates"),
        ({"gate": "silu"}, "gate must be None or"),
        ({"weight_offset": float("inf")}, "weight_offset must be finite"),
    ],
)
def test_fields_outside_their_domain(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NormSpec(**fields)  # type: ignore[arg-type]


def test_eps_of_another_type() -> None:
    with pytest.raises(TypeError, match="eps must be a float"):
        NormSpec(eps="1e-5")  # type: ignore[arg-type]


def test_unknown_keys_in_a_dict() -> None:
    with pytest.raises(ValueError, match="unknown NormSpec fields: epsilon"):
        NormSpec.from_dict({"epsilon": 1e-5})
