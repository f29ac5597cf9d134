"""The tables of wirings: constants against published numbers, schedules layer by layer, bad input."""

from __future__ import annotations

import math

import pytest

from normkit import PLACEMENTS, SCHEDULES, placement, schedule
from normkit.placement import VALUE_PATH, deepnorm_constants, fixup_gain, known, sub_ln_gain

# alpha and beta to four digits: the closed forms of table 2 of arXiv:2203.00555, worked out by hand with logarithms.
DEEPNORM = {12: (2.2134, 0.3195), 100: (3.7606, 0.1880), 48: (3.1302, 0.2259), 1000: (6.6874, 0.1057)}


@pytest.mark.parametrize("depth", DEEPNORM)
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_deepnorm_alone(depth, stack):
    row = placement("deepnorm", depth=depth, stack=stack)
    assert (row.alpha, row.init_gain) == pytest.approx(DEEPNORM[depth], abs=5e-5)
    assert row.init_roles == VALUE_PATH
    assert row.slots == ("stream",) and not row.final_norm


def test_deepnorm_pair_of_six():
    encoder = placement("deepnorm", depth=6, other_depth=6, stack="encoder_of_pair")
    decoder = placement("deepnorm", depth=6, other_depth=6, stack="decoder_of_pair")
    # (6^4 6)^(1/16) = 6^(5/16) = 1.75054; 18^(1/4) = 2.0598; 72^(-1/4) = 0.3433
    assert (encoder.alpha, encoder.init_gain) == pytest.approx((0.81 * 1.75054, 0.87 / 1.75054), abs=2e-5)
    assert (decoder.alpha, decoder.init_gain) == pytest.approx((2.05977, 0.34329), abs=2e-5)


def test_deepnorm_pair_of_twelve_and_six():
    encoder = placement("deepnorm", depth=12, other_depth=6, stack="encoder_of_pair")
    assert (encoder.alpha, encoder.init_gain) == pytest.approx((1.6862, 0.4179), abs=5e-5)


def test_deepnorm_pair_depends_on_both():
    assert deepnorm_constants(18, 6, "encoder_of_pair")[0] == pytest.approx(0.81 * (18**4 * 6) ** (1 / 16))
    assert deepnorm_constants(18, 6, "decoder_of_pair") == pytest.approx((54**0.25, 216**-0.25))


@pytest.mark.parametrize(("depth", "gain"), [(12, 1.7827), (24, 1.9675), (1000, 2.7570)])
def test_sub_ln_alone(depth, gain):
    """sqrt(log 2N): log 24 = 3.1781, log 48 = 3.8712, log 2000 = 7.6009."""
    assert placement("sub", depth=depth).init_gain == pytest.approx(gain, abs=5e-5)


def test_sub_ln_pair_of_six():
    """log 18 = 2.89037 and log 12 = 2.48491, so the encoder has sqrt(2.89037 * 2.48491 / 3) = 1.54729."""
    assert sub_ln_gain(6, 6, "encoder_of_pair") == pytest.approx(1.54729, abs=2e-5)
    assert sub_ln_gain(6, 6, "decoder_of_pair") == pytest.approx(math.sqrt(2.890372), abs=1e-5)


def test_sub_ln_leaves_cross_attention_alone():
    row = placement("sub", depth=6, other_depth=6, stack="decoder_of_pair", kind="cross_attention")
    assert row.slots == ("input",) and row.init_roles == () and row.init_gain == 1


def test_fixup_gain():
    """The paper's two-matrix branches: the factor is B^(-1/2); three matrices: B^(-1/4)."""
    assert fixup_gain(8) == pytest.approx(16**-0.5)
    assert fixup_gain(8, matrices=3) == pytest.approx(16**-0.25)
    assert fixup_gain(6, 6, "encoder_of_pair") == fixup_gain(6, 6, "decoder_of_pair") == pytest.approx(30**-0.5)


@pytest.mark.parametrize(("depth", "scale"), [(12, 0.1), (18, 0.1), (24, 1e-5), (36, 1e-6)])
def test_layerscale_by_depth(depth, scale):
    assert placement("layerscale", depth=depth).branch_scale == scale


def test_scaled_by_layer():
    assert [placement("scaled", layer=n).input_gain for n in (1, 4, 9)] == pytest.approx([1, 1 / 2, 1 / 3])


@pytest.mark.parametrize(("depth", "posts"), [(2, 0), (4, 1), (12, 3), (24, 6)])
def test_mix_is_post_in_the_first_quarter(depth, posts):
    names = [schedule("mix", depth).branch(n, "ffn").name for n in range(1, depth + 1)]
    assert names == ["post"] * posts + ["pre"] * (depth - posts)


def test_hybrid():
    plan = schedule("hybrid", 12)
    for n in range(1, 13):
        attention, ffn = plan.branch(n, "attention"), plan.branch(n, "ffn")
        assert attention.slots == ("stream",) and attention.qkv_norm
        assert ffn.slots == () and not ffn.qkv_norm
    assert plan.final_norm


def test_hybrid_first_pre():
    plan = schedule("hybrid_first_pre", 2)
    assert [plan.branch(n, k).slots for n in (1, 2) for k in ("attention", "ffn")] == [
        ("input",),
        ("input",),
        ("stream",),
        (),
    ]
    assert plan.branch(1, "attention").qkv_norm


def test_normformer():
    plan = schedule("normformer", 3)
    assert plan.branch(1, "attention").slots == ("input", "output")
    assert plan.branch(1, "ffn").slots == ("input", "inner")
    assert plan.branch(1, "attention").head_scale and not plan.branch(1, "ffn").head_scale
    assert plan.branch(1, "attention").source


def test_every_row_names_its_source_and_final_norm():
    norms_on_the_branch_only = {"pre", "sandwich", "output", "sub", "scaled", "parallel", "layerscale", "resi_dual"}
    for name, row in PLACEMENTS.items():
        assert row.name == name and row.source
        assert row.final_norm == (name in norms_on_the_branch_only)
    assert all(row.source and row.final_norm for row in SCHEDULES.values())
    assert set(known()) == {*PLACEMENTS, *SCHEDULES}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("prenorm", {}, "unknown placement 'prenorm'.*sandwich"),
        ("deepnorm", {}, "needs depth"),
        ("deepnorm", {"depth": 0}, "depth must be an integer >= 1; got 0"),
        ("deepnorm", {"depth": 6, "stack": "encoder_of_pair"}, "needs other_depth"),
        ("sub", {}, "needs depth"),
        ("fixup", {}, "needs depth"),
        ("scaled", {"depth": 12}, "needs layer"),
        ("scaled", {"depth": 12, "layer": 13}, "layer 13 lies past depth 12"),
        ("mix", {"layer": 1}, "needs depth"),
        ("hybrid", {}, "needs kind, one of"),
        ("pre", {"stack": "middle"}, "stack must be one of"),
        ("pre", {"kind": "mlp"}, "kind must be one of"),
    ],
)
def test_bad_input(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        placement(name, **arguments)
