"""GatedRMSNorm: both orders against their equations, and bit for bit against the model families' modules."""

import importlib

import pytest
import torch
from transcribe import assert_agree, randn, trained

from normkit.nn import GatedRMSNorm
from normkit.reference import normalize
from normkit.spec import MAMBA2_GATED, QWEN3_NEXT_GATED


def act(z, function):
    return z / (1 + torch.exp(-z)) if function == "silu" else 1 / (1 + torch.exp(-z))


@pytest.mark.parametrize("function", ["silu", "sigmoid"])
@pytest.mark.parametrize("position", ["before", "after"])
@pytest.mark.parametrize("groups", [1, 3])
def test_equations(function, position, groups):
    m = GatedRMSNorm(12, groups=groups, gate_function=function, gate_position=position, dtype=torch.float64)
    trained(m)

    def loops(x, gate):
        out = []
        for row, z in zip(x, gate, strict=True):
            if position == "before":
                row = row * act(z, function)
            size = len(row) // groups
            parts = [row[g * size : (g + 1) * size] for g in range(groups)]
            parts = [p / torch.sqrt(sum(v * v for v in p) / size + 1e-6) for p in parts]
            y = torch.cat(parts) * m.weight
            out.append(y * act(z, function) if position == "after" else y)
        return torch.stack(out)

    assert_agree(m, [randn(4, 12), randn(4, 12, seed=1)], loops)


BEFORE = {"eps": 1e-5}
AFTER = {"gate_position": "after", "output_dtype": "input"}
SIGMOID = {**AFTER, "gate_function": "sigmoid", "rounding": "after_gain"}
FAMILIES = [
    ("mamba2", "MambaRMSNormGated", {"group_size": 16, "eps": 1e-5}, {**BEFORE, "groups": 4}),
    ("mamba2", "MambaRMSNormGated", {"group_size": 64, "eps": 1e-5}, BEFORE),
    ("zamba2", "Zamba2RMSNormGated", {"group_size": 32, "eps": 1e-5}, {**BEFORE, "groups": 2}),
    ("nemotron_h", "NemotronHRMSNormGated", {"group_size": 32, "eps": 1e-5}, {**BEFORE, "groups": 2}),
    ("qwen3_next", "Qwen3NextRMSNormGated", {"eps": 1e-6}, AFTER),
    ("olmo_hybrid", "OlmoHybridRMSNormGated", {"eps": 1e-6}, AFTER),
    ("kimi_linear", "KimiLinearRMSNormGated", {"eps": 1e-6}, SIGMOID),
    (
        "falcon_h1",
        "FalconH1RMSNormGated",
        {"eps": 1e-6, "n_groups": 2, "norm_before_gate": False},
        {"rounding": "after_gain", "output_dtype": "input", "groups": 2},
    ),
    (
        "falcon_h1",
        "FalconH1RMSNormGated",
        {"eps": 1e-6, "n_groups": 2, "norm_before_gate": True},
        {"rounding": "after_gain", "output_dtype": "input", "groups": 2, "gate_position": "after"},
    ),
]


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "attribute", "theirs", "ours"), FAMILIES)
def test_bit_equal_in_bfloat16_to_the_family(name, attribute, theirs, ours, weights):
    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ImportError:
        pytest.skip(f"this transformers has no {name}")
    reference = trained(getattr(module, attribute)(64, **theirs).to(weights), spread=0.2)
    m = GatedRMSNorm(64, dtype=weights, **ours)
    m.load_state_dict(reference.state_dict())
    x, gate = (randn(32, 100, 64, seed=s, dtype=torch.bfloat16) * 2 for s in (0, 1))
    mine, other = m(x, gate), reference(x, gate)
    assert mine.dtype == other.dtype
    assert torch.equal(normalize(x, m.spec, m.weight, gate=gate), other)
    # A kernel sums in another order: of 2e5 values one in 1e4 may round to the other side, by one or two units.
    assert (mine != other).double().mean() <= 1e-4
    torch.testing.assert_close(mine, other, rtol=2**-6, atol=0)


def test_without_a_gate_it_is_the_grouped_norm():
    m = trained(GatedRMSNorm(12, groups=3))
    x = randn(2, 12, dtype=torch.float32)
    grouped = torch.nn.functional.rms_norm(x.unflatten(-1, (3, 4)), (4,), eps=1e-6).flatten(-2) * m.weight
    torch.testing.assert_close(m(x), grouped)


def test_specs_are_the_named_ones():
    assert GatedRMSNorm(8, eps=1e-5).spec == MAMBA2_GATED
    assert GatedRMSNorm(8, gate_position="after", output_dtype="input").spec == QWEN3_NEXT_GATED


def test_promoted_output():
    x = randn(2, 8, dtype=torch.bfloat16)
    assert GatedRMSNorm(8)(x, x).dtype == torch.float32
    assert GatedRMSNorm(8, output_dtype="input")(x, x).dtype == torch.bfloat16


def test_weightless_and_offset():
    assert GatedRMSNorm(8, elementwise_affine=False).weight is None
    assert torch.equal(GatedRMSNorm(8, weight_offset=1.0).weight, torch.zeros(8))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: GatedRMSNorm(8, groups=3), ValueError, "groups=3"),
        (lambda: GatedRMSNorm(8, gate_function="tanh"), ValueError, "gate"),
        (lambda: GatedRMSNorm(8, eps=-1.0), ValueError, "eps"),
        (lambda: GatedRMSNorm(8)(torch.ones(2, 9)), ValueError, "features=8"),
        (lambda: GatedRMSNorm(8)(torch.ones(2, 8), torch.ones(2, 1)), ValueError, "gate has shape"),
        (lambda: GatedRMSNorm(8)(torch.ones(2, 8).int()), TypeError, "floating"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
