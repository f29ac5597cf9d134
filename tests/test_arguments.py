"""Bad arguments raise ValueError or TypeError that name the argument, the values and the fix."""

import pytest
import torch

from normkit import functional as F
from normkit import nn

X = torch.randn(2, 6, 4)
ROW = torch.randn(2, 6)
C6 = torch.ones(6)

# name: (call, error, what the message must say)
CASES = {
    # layer_norm, batch_norm and instance_norm, for which torch's OpInfo has no error inputs
    "layer_shape": (lambda: F.layer_norm(ROW, 5), ValueError, r"normalized_shape \(5,\).*\(2, 6\)"),
    "layer_no_shape": (lambda: F.layer_norm(ROW, ()), ValueError, r"at least one dim; got \(\)"),
    "layer_too_many_dims": (lambda: F.layer_norm(ROW, (3, 2, 6)), ValueError, r"last 3 dims.*\(2, 6\)"),
    "layer_weight": (lambda: F.layer_norm(ROW, 6, torch.ones(5)), ValueError, r"weight has shape \(5,\).*\(6,\)"),
    "layer_bias": (lambda: F.layer_norm(ROW, 6, C6, torch.ones(5)), ValueError, r"bias has shape \(5,\).*\(6,\)"),
    "layer_integer": (lambda: F.layer_norm(ROW.long(), 6), TypeError, r"floating point; got torch.int64.*float\(\)"),
    "layer_device": (lambda: F.layer_norm(ROW, 6, C6.to("meta")), ValueError, "weight is on meta but x is on cpu"),
    "layer_channel_dim": (lambda: F.layer_norm(X, 6, channel_dim=2), ValueError, "channel_dim"),
    "layer_channels": (lambda: F.layer_norm(X, 4, channel_dim=1), ValueError, r"\(4,\) must equal dim 1.*\(2, 6, 4\)"),
    "layer_no_tensor": (lambda: F.layer_norm([1.0], 1), TypeError, "input must be a tensor; got list"),
    "layer_sparse": (lambda: F.layer_norm(ROW.to_sparse(), 6), TypeError, "must be dense; got layout torch.sparse_coo"),
    "layer_eight_bits": (lambda: F.layer_norm(ROW.to(torch.float8_e4m3fn), 6), TypeError, "float16.*float8_e4m3fn"),
    "layer_integer_weight": (lambda: F.layer_norm(ROW, 6, C6.long()), TypeError, "weight must be floating.*int64"),
    "layer_complex_bias": (lambda: F.layer_norm(ROW, 6, C6, C6.cfloat()), TypeError, "bias must be.*complex64"),
    "layer_weight_list": (lambda: F.layer_norm(ROW, 6, [1.0] * 6), TypeError, "weight must be a tensor; got list"),
    "layer_shape_float": (lambda: F.layer_norm(ROW, 6.0), TypeError, "normalized_shape must be an integer.*6.0"),
    "layer_shape_element": (lambda: F.layer_norm(ROW, [6.5]), TypeError, "normalized_shape must be.*float 6.5"),
    "layer_residual_device": (
        lambda: F.layer_norm(ROW, 6, residual=ROW.to("meta")),
        ValueError,
        "residual is on meta but x is on cpu",
    ),
    "layer_rounding": (lambda: F.layer_norm(ROW, 6, rounding="late"), ValueError, "rounding must be one of.*'late'"),
    "layer_residual": (
        lambda: F.layer_norm(ROW, 6, residual=X),
        ValueError,
        r"residual has shape \(2, 6, 4\).*\(2, 6\)",
    ),
    "layer_out": (lambda: F.layer_norm(ROW, 6, out=torch.empty(6)), ValueError, r"out is \(6,\).*\(2, 6\)"),
    "layer_out_grad": (
        lambda: F.layer_norm(ROW.clone().requires_grad_(), 6, out=torch.empty(2, 6)),
        ValueError,
        "out= takes no gradient.*no_grad",
    ),
    "rms_partial": (lambda: F.rms_norm(ROW, 6, partial=1.5), ValueError, r"partial must be in \(0, 1\]; got 1.5"),
    "rms_groups": (lambda: F.rms_norm(ROW, 6, groups=4), ValueError, "groups=4 does not divide the 6 features"),
    "rms_gate": (lambda: F.rms_norm(ROW, 6, gate=X), ValueError, r"gate has shape \(2, 6, 4\).*\(2, 6\)"),
    "rms_gate_kind": (
        lambda: F.rms_norm(ROW, 6, gate=ROW, gate_kind=("relu", "after")),
        ValueError,
        "gate must be.*relu",
    ),
    "batch_one_value": (
        lambda: F.batch_norm(torch.randn(1, 6), None, None, training=True),
        ValueError,
        r"more than 1 value per channel.*\(1, 6\).*larger batch",
    ),
    "batch_no_statistics": (lambda: F.batch_norm(X, None, None), ValueError, "running_mean and running_var are None"),
    "batch_half_statistics": (lambda: F.batch_norm(X, C6, None), ValueError, "go together; only running_mean"),
    "batch_running_shape": (
        lambda: F.batch_norm(X, torch.ones(5), C6),
        ValueError,
        r"running_mean has shape \(5,\).*\(6,\)",
    ),
    "batch_running_device": (lambda: F.batch_norm(X, C6.to("meta"), C6), ValueError, "running_mean is on meta"),
    "batch_weight": (
        lambda: F.batch_norm(X, None, None, torch.ones(4), training=True),
        ValueError,
        r"weight has shape \(4,\).*needs \(6,\)",
    ),
    "batch_one_dim": (lambda: F.batch_norm(torch.ones(6), None, None, training=True), ValueError, "at least 2 dims"),
    "batch_eps_zero": (lambda: F.batch_norm(X, None, None, training=True, eps=0.0), ValueError, "eps must be positive"),
    "batch_mask": (
        lambda: F.batch_norm(X, None, None, training=True, mask=torch.ones(2, 6)),
        ValueError,
        r"mask has shape \(2, 6\).*needs \(2, 4\)",
    ),
    "batch_mask_additive": (
        lambda: F.batch_norm(X, None, None, training=True, mask=torch.tensor([[0.0] * 4, [0.0, 0.0, 0.0, -torch.inf]])),
        ValueError,
        r"mask must be True or 1.*got -inf.*mask == 0",
    ),
    "batch_mask_nan": (lambda: F.batch_norm(X, C6, C6, mask=torch.full((2, 4), torch.nan)), ValueError, "got nan"),
    "batch_mask_list": (lambda: F.batch_norm(X, C6, C6, mask=[1]), TypeError, r"mask must be a tensor; got list \[1\]"),
    "batch_mask_device": (
        lambda: F.batch_norm(X, None, None, training=True, mask=torch.ones(2, 4, device="meta")),
        ValueError,
        "mask is on meta but x is on cpu",
    ),
    "batch_momentum_nan": (
        lambda: F.batch_norm(X, C6.clone(), C6.clone(), training=True, momentum=float("nan")),
        ValueError,
        "momentum must be finite.*nan",
    ),
    "batch_momentum_none": (
        lambda: F.batch_norm(X, C6.clone(), C6.clone(), training=True, momentum=None),
        TypeError,
        "momentum must be a number; got None.*plain average",
    ),
    "batch_integer_statistics": (lambda: F.batch_norm(X, C6.long(), C6), TypeError, "running_mean must be floating"),
    "power_statistic": (
        lambda: F.power_norm(ROW, torch.ones(5), C6.clone()),
        ValueError,
        r"rms has shape \(5,\).*\(6,\)",
    ),
    "batch_integer": (lambda: F.batch_norm(X.long(), C6, C6), TypeError, "int64"),
    "instance_one_value": (lambda: F.instance_norm(torch.randn(2, 6, 1)), ValueError, r"more than 1 value per sample"),
    "instance_no_space": (lambda: F.instance_norm(ROW), ValueError, "more than 1 value per sample and channel"),
    "instance_no_statistics": (lambda: F.instance_norm(X, use_input_stats=False), ValueError, "are None"),
    "instance_weight": (lambda: F.instance_norm(X, weight=torch.ones(5)), ValueError, r"\(5,\).*\(6,\)"),
    "group_count": (
        lambda: F.group_norm(X, 4),
        ValueError,
        "num_groups=4 does not divide the 6 channels.*num_groups=3",
    ),
    "group_zero": (lambda: F.group_norm(X, 0), ValueError, "num_groups must be an integer >= 1; got 0"),
    "group_float": (lambda: F.group_norm(X, 2.0), ValueError, "num_groups must be an integer >= 1; got 2.0"),
    "group_one_dim": (lambda: F.group_norm(torch.ones(6), 2), ValueError, r"at least 2 dims.*\(6,\)"),
    "group_mask": (lambda: F.group_norm(X, 2, mask=torch.ones(2)), ValueError, r"mask has shape \(2,\).*\(2, 4\)"),
    # modules
    "nn_batch_rank": (lambda: nn.BatchNorm2d(6)(X), ValueError, r"BatchNorm2d expects input with 4 dims.*\(2, 6, 4\)"),
    "nn_batch_features": (
        lambda: nn.BatchNorm1d(5)(X),
        ValueError,
        "num_features=5.*6 channels at dim 1.*num_features=6",
    ),
    "nn_batch_momentum": (lambda: nn.BatchNorm1d(6, momentum=1.5), ValueError, r"momentum must be in \[0, 1\].*1.5"),
    "nn_batch_channel_dim": (lambda: nn.BatchNorm1d(6, channel_dim=2), ValueError, "channel_dim must be -1, 1.*2"),
    "nn_instance_rank": (lambda: nn.InstanceNorm2d(6)(ROW), ValueError, "expects input with 3 or 4 dims"),
    "nn_instance_features": (lambda: nn.InstanceNorm1d(5)(X), ValueError, "num_features=5.*6 channels"),
    "nn_group_divisor": (
        lambda: nn.GroupNorm(32, 72),
        ValueError,
        "num_groups=32 must divide num_channels=72; 1, 2, 3",
    ),
    "nn_group_channels": (lambda: nn.GroupNorm(2, 4)(X), ValueError, r"num_channels=4.*\(2, 6, 4\) has 6"),
    "nn_batch_negative": (lambda: nn.BatchNorm1d(-3), ValueError, "num_features must be at least 0; got -3"),
    "nn_batch_float": (lambda: nn.BatchNorm1d(3.0), TypeError, "num_features must be an integer; got float 3.0"),
    "nn_batch_dtype": (lambda: nn.BatchNorm1d(6, dtype=torch.int32), TypeError, "dtype must be float16.*int32"),
    "nn_instance_negative": (lambda: nn.InstanceNorm1d(-6), ValueError, "num_features must be at least 0; got -6"),
    "nn_group_float": (lambda: nn.GroupNorm(2.0, 6), TypeError, "num_groups must be an integer; got float 2.0"),
    "nn_layer_negative": (lambda: nn.LayerNorm(-3), ValueError, "normalized_shape must be at least 0; got -3"),
    "nn_layer_string": (lambda: nn.LayerNorm("ab"), TypeError, "normalized_shape must be an integer.*'ab'"),
    "nn_layer_dtype": (lambda: nn.LayerNorm(6, dtype=torch.int32), TypeError, "dtype must be float16.*int32"),
    "nn_layer_channel_dim": (lambda: nn.LayerNorm(6, channel_dim=3), ValueError, "channel_dim must be -1, or 1.*3"),
    "nn_layer_channels_first": (lambda: nn.LayerNorm((5, 6), channel_dim=1), ValueError, r"one feature dim.*\(5, 6\)"),
    "nn_layer_offset": (lambda: nn.LayerNorm(6, weight_offset="1"), TypeError, "weight_offset must be a number.*'1'"),
    "nn_rms_partial": (lambda: nn.RMSNorm(6, partial=2), ValueError, r"partial must be in \(0, 1\]; got 2"),
    "nn_rms_partial_two_dims": (lambda: nn.RMSNorm((5, 6), partial=0.5), ValueError, "partial=0.5 needs.*one dim"),
    "nn_build_name": (lambda: nn.build("gemma", 6), TypeError, "spec must be a NormSpec.*str 'gemma'"),
    "nn_lstm_state": (
        lambda: nn.LayerNormLSTM(6, 6)(X.transpose(1, 2), torch.zeros(1, 4, 6)),
        TypeError,
        r"hx must be a pair \(h, c\); got Tensor",
    ),
    "nn_ada_device": (
        lambda: nn.AdaLayerNorm(6, 6)(ROW, ROW.to("meta")),
        ValueError,
        "condition is on meta but the weights are on cpu",
    ),
    "nn_layer_rounding": (lambda: nn.LayerNorm(6, rounding="late"), ValueError, "'late'"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_argument_is_named(name):
    call, error, message = CASES[name]
    with pytest.raises(error, match=message):
        call()
