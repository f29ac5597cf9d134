"""Every sample of torch's OpInfo for the norms, in four dtypes, forward and gradient, run against normkit."""

from collections import Counter

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from normkit import functional as F
from normkit import reference
from normkit.spec import NormSpec

from .compare import DTYPES, backward, copied, hold, leaves, miss


def native_layer_norm(input, normalized_shape, weight, bias, eps):
    """aten's operator, spelled with normkit: the result, and the mean and reciprocal deviation that it divided by."""
    y = F.layer_norm(input, normalized_shape, weight, bias, eps)
    dims = tuple(range(-len(normalized_shape), 0))
    spec = NormSpec(channel_dim=-1 if len(dims) == 1 else dims, eps=eps, has_weight=False)
    found = reference.statistics(input, spec)
    return y, found.mean, torch.rsqrt(found.square + eps)


OURS = {
    "nn.functional.layer_norm": F.layer_norm,
    "nn.functional.rms_norm": F.rms_norm,
    "nn.functional.group_norm": F.group_norm,
    "nn.functional.batch_norm": F.batch_norm,
    "nn.functional.instance_norm": F.instance_norm,
    "native_layer_norm": native_layer_norm,
}
OPS = [op for op in op_db if op.name in OURS and op.variant_test_name == ""]


def all_samples(op, dtype):
    """The samples, and where an OpInfo has more for its reference tests, those too."""
    yield from op.sample_inputs("cpu", dtype, requires_grad=True)
    if op.reference_inputs_func is not None:
        yield from op.reference_inputs("cpu", dtype, requires_grad=True)


def negative_eps(op, arguments):
    """The same arguments with a positive eps, if it is negative."""
    input, args, kwargs = arguments
    if kwargs.get("eps") is not None and kwargs["eps"] < 0:
        return input, args, {**kwargs, "eps": -kwargs["eps"]}
    position = {"native_layer_norm": 3, "nn.functional.layer_norm": 3, "nn.functional.rms_norm": 2}.get(op.name)
    if position is not None and len(args) > position and args[position] < 0:
        return input, (*args[:position], -args[position], *args[position + 1 :]), kwargs
    return None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_sample(op, dtype, counts):
    count = counts.setdefault(f"OpInfo {op.name} {dtype}", Counter())
    for number, sample in enumerate(all_samples(op, dtype)):
        arguments = (sample.input, sample.args, sample.kwargs)
        what = f"sample {number} of {op.name}, shape {tuple(sample.input.shape)}, {sample.kwargs}"

        negative = negative_eps(op, arguments)
        if negative is not None:  # torch takes it and may answer NaN; normkit refuses, so the sample runs with -eps
            with pytest.raises(ValueError, match="eps"):
                OURS[op.name](sample.input, *sample.args, **sample.kwargs)
            arguments = negative
            count["of these with the sign of eps turned"] += 1

        def run(function, given):
            input, args, kwargs = given
            y = function(input, *args, **kwargs)
            outputs = y if isinstance(y, tuple) else (y,)
            grads = backward(outputs[:1], leaves(given))  # aten gives native_layer_norm's statistics no gradient
            return outputs, grads, [t for t in leaves(given) if not t.requires_grad]

        truth = run(op.op, copied(arguments, torch.float64))
        ours = run(OURS[op.name], copied(arguments))
        theirs = run(op.op, copied(arguments))
        for kind, a, b, c in zip(("output", "gradient", "buffer"), ours, truth, theirs, strict=True):
            assert len(a) == len(b), what
            for i, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
                hold(x, y, f"{what}: {kind} {i}")
                if op.name != "native_layer_norm":  # its mean is float32 or half, by the build of torch
                    assert (x is None and z is None) or (x.dtype == z.dtype and x.shape == z.shape), what
                if x is not None and miss(z, y):
                    count["results where torch is outside the tolerance"] += 1
        count["run"] += 1
    assert count["run"] > 0 and count["skipped"] == 0


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_error_input_raises(op, counts):
    if op.error_inputs_func is None:
        return  # layer_norm, batch_norm and instance_norm have none; see tests/test_arguments.py
    count = counts.setdefault(f"OpInfo {op.name} errors", Counter())
    for case in op.error_inputs("cpu"):
        sample = case.sample_input
        with pytest.raises((ValueError, TypeError)) as raised:
            OURS[op.name](sample.input, *sample.args, **sample.kwargs)
        assert any(c.isdigit() or c == "(" for c in str(raised.value)), "the message names the values"
        count["run"] += 1


def test_the_check_can_fail():
    """A result that is off by two units in the last place of bfloat16 is not let through."""
    y = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        hold(y * 1.03, y.double(), "off")
