"""How a result is held against torch's: torch evaluates the same values in float64, ours must come within the tolerance
that torch.testing gives the dtype (which is what an OpInfo without a tolerance of its own is held to)."""

import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_map

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def copied(tree, dtype=None):
    """The same arguments as fresh leaves, optionally in another dtype."""

    def copy(value):
        if not isinstance(value, torch.Tensor):
            return value
        new = value.detach().clone()
        new = new.to(dtype) if dtype is not None and new.is_floating_point() else new
        return new.requires_grad_(value.requires_grad)

    return tree_map(copy, tree)


def leaves(tree):
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def backward(outputs, inputs, seed=0):
    """Gradients of the inputs for fixed random cotangents; exact in every dtype, so that they are the same in each."""
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    for y in outputs:
        if y.requires_grad:
            cotangent = torch.randint(-4, 5, y.shape, generator=generator).to(y.dtype) / 4
            total = total + (y * cotangent).to(torch.float64).sum()
    wanted = [t for t in inputs if t.requires_grad]
    if not isinstance(total, torch.Tensor) or not wanted:
        return []
    return torch.autograd.grad(total, wanted, allow_unused=True)


def hold(ours, truth, what):
    """Ours against the float64 truth, rounded to our dtype, at that dtype's tolerance."""
    assert (ours is None) == (truth is None), what
    if ours is not None:
        assert_close(ours, truth.to(ours.dtype), msg=lambda text: f"{what}: {text}", equal_nan=True)


def miss(theirs, truth):
    """Whether torch's own result in this dtype is outside the tolerance that ours is held to."""
    try:
        hold(theirs, truth, "")
    except AssertionError:
        return True
    return False
