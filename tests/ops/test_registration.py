"""Every operator has a schema, a fake and a gradient that opcheck accepts."""

import pytest
import torch

from normkit import ops
from normkit.ops.formulas import GRADIENTS
from normkit.ops.library import OPERATORS
from tests.ops.samples import arguments

pytestmark = pytest.mark.skipif(not ops.LOADED, reason=ops.report().reason)


def test_list_is_complete() -> None:
    registered = {
        name.removeprefix("normkit::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("normkit::")
    }
    assert registered - {"instruction_set"} == set(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.normkit, name).default, arguments(name))


@pytest.mark.parametrize("name", GRADIENTS)
def test_opcheck_with_gradient(name: str) -> None:
    second = name.endswith("_backward")
    # torch.compile refuses double backward, so the backward operators' own gradients are checked in eager mode
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"] if second else None
    args = arguments(name, requires_grad=True)
    keep = {"batch_norm_frozen": (1, 2), "batch_norm_backward": (3, 4, 5)}.get(name, ())
    if second:
        keep = tuple(i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i > 2 and i not in (keep or ()))
        keep = (*keep, *{"batch_norm_backward": (3, 4, 5)}.get(name, ()))
    args = tuple(a.detach() if i in keep else a for i, a in enumerate(args))
    extra = {} if tests is None else {"test_utils": tests}
    torch.library.opcheck(getattr(torch.ops.normkit, name).default, args, **extra)
