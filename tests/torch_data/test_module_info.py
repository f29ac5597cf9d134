"""Every input of torch's ModuleInfo for the norms, in four dtypes, training and evaluation, run against normkit."""

from collections import Counter

import pytest
import torch
from torch.testing._internal.common_modules import module_db

from normkit import nn

from .compare import DTYPES, backward, copied, hold, leaves, miss

NAMES = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"]
NAMES += ["LayerNorm", "RMSNorm"]
INFOS = {info.name.removeprefix("nn."): info for info in module_db if info.name.removeprefix("nn.") in NAMES}


def build(cls, given, dtype, like=None):
    module = cls(*given.args, **given.kwargs).to(dtype)
    if like is None:
        generator = torch.Generator().manual_seed(1)
        for parameter in module.parameters():  # not the ones and zeros that hide a swapped gain and bias
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    else:
        module.load_state_dict(like.state_dict(), strict=True)
    return module


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_input(name, dtype, training, counts):
    info, ours_class = INFOS[name], getattr(nn, name)
    count = counts.setdefault(f"ModuleInfo {name} {dtype}", Counter())
    for case in info.module_inputs_func(info, "cpu", dtype, True, training=training):
        what = f"{name} {case.desc} {dtype}"
        theirs = build(info.module_cls, case.constructor_input, dtype)
        ours = build(ours_class, case.constructor_input, dtype, theirs)
        truth = build(info.module_cls, case.constructor_input, torch.float64, theirs)
        assert list(ours.state_dict()) == list(theirs.state_dict()), what
        results = []
        for module, given_dtype in ((ours, dtype), (truth, torch.float64), (theirs, dtype)):
            module.train(training)
            given = copied((case.forward_input.args, case.forward_input.kwargs), given_dtype)
            y = module(*given[0], **given[1])
            grads = backward((y,), [*leaves(given), *module.parameters()])
            results.append(([y], grads, list(module.buffers())))
        for kind, a, b, c in zip(("output", "gradient", "buffer"), *results, strict=True):
            assert len(a) == len(b), what
            if case.desc == "zero_batch" and training and kind == "buffer" and a:
                # torch counts an empty batch; normkit does not: its buffers are as they were built
                fresh = build(ours_class, case.constructor_input, dtype)
                assert all(torch.equal(x, y) for x, y in zip(a, fresh.buffers(), strict=True))
                count["empty batches that torch counts and normkit does not"] += 1
                continue
            for x, y, z in zip(a, b, c, strict=True):
                hold(x, y, what)
                if miss(z, y):
                    count["results where torch is outside the tolerance"] += 1
        count["run"] += 1
    assert count["run"] > 0 and count["skipped"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_every_error_input_raises(name, counts):
    info = INFOS[name]
    if info.module_error_inputs_func is None:
        return  # see tests/test_arguments.py
    count = counts.setdefault(f"ModuleInfo {name} errors", Counter())
    for case in info.module_error_inputs_func(info, "cpu", torch.float32, False, training=True):
        given = case.module_error_input

        def run(given=given):
            module = getattr(nn, name)(*given.constructor_input.args, **given.constructor_input.kwargs)
            module(*given.forward_input.args, **given.forward_input.kwargs)

        with pytest.raises((ValueError, TypeError)):
            run()
        count["run"] += 1
