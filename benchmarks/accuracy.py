"""Where torch's norms are wrong and normkit's are right, each against float64; writes docs/accuracy.md.

python benchmarks/accuracy.py            print the table
python benchmarks/accuracy.py --write    and write it to docs/accuracy.md
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from normkit import functional as F

PAGE = Path(__file__).parent.parent / "docs" / "accuracy.md"


class Case(NamedTuple):
    """One row of the table: the error of each, as a share of the largest true value."""

    name: str
    torch: float
    normkit: float


def error(value: Tensor, truth: Tensor) -> float:
    """The largest error, as a share of the largest true value."""
    return ((value.double() - truth).abs().max() / truth.abs().max()).item()


def gradients(function: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of all tensors for one cotangent."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    return torch.autograd.grad(y, leaves, grad.to(y.dtype))


def large_means() -> Iterator[Case]:
    """float32, statistics of values whose mean is large beside their spread."""
    x = (1e4 + torch.arange(16) * 1e-3).view(1, 16)
    truth = torch.nn.functional.layer_norm(x.double(), (16,))
    yield Case(
        "LayerNorm, float32, 16 values 1e4 + i·1e-3",
        error(torch.nn.functional.layer_norm(x, (16,)), truth),
        error(F.layer_norm(x, 16), truth),
    )
    grad = torch.linspace(-1, 1, 16).square().view(1, 16)
    theirs, ours, exact = (
        gradients(f, [t], grad)[0]
        for f, t in (
            (lambda t: torch.nn.functional.layer_norm(t, (16,)), x),
            (lambda t: F.layer_norm(t, 16), x),
            (lambda t: torch.nn.functional.layer_norm(t, (16,)), x.double()),
        )
    )
    yield Case("the same, gradient of the input", error(theirs, exact), error(ours, exact))
    for mean in (100, 1000, 2000):
        image = torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(0)) + mean
        last = image.contiguous(memory_format=torch.channels_last)
        truth = torch.nn.functional.group_norm(image.double(), 2)
        yield Case(
            f"GroupNorm(2, 8), float32, channels last, mean {mean}",
            error(torch.nn.functional.group_norm(last, 2), truth),
            error(F.group_norm(last, 2), truth),
        )
    truth = torch.nn.functional.group_norm(image.double(), 2)
    yield Case(
        "GroupNorm(2, 8), float32, contiguous, mean 2000",
        error(torch.nn.functional.group_norm(image, 2), truth),
        error(F.group_norm(image, 2), truth),
    )


def half_precision_gradients() -> Iterator[Case]:
    """bfloat16, the gradient of the gain, summed over many rows."""
    for rows in (64, 512, 4096):
        generator = torch.Generator().manual_seed(0)
        x, grad = (torch.randn(rows, 32, generator=generator).bfloat16() for _ in range(2))
        tensors = [x, torch.ones(32).bfloat16(), torch.zeros(32).bfloat16()]

        def theirs(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return torch.nn.functional.layer_norm(x, (32,), w, b)

        def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return F.layer_norm(x, 32, w, b)

        exact = gradients(theirs, [t.double() for t in tensors], grad)[1]
        yield Case(
            f"LayerNorm, bfloat16, dweight over {rows} rows",
            error(gradients(theirs, tensors, grad)[1], exact),
            error(gradients(ours, tensors, grad)[1], exact),
        )


def extremes() -> Iterator[Case]:
    """float32 values whose squares leave the dtype."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for scale in (1e25, 1e30):
        truth = torch.nn.functional.layer_norm(x.double() * scale, (64,))
        yield Case(
            f"LayerNorm, float32, values of order {scale:.0e}",
            error(torch.nn.functional.layer_norm(x * scale, (64,)), truth),
            error(F.layer_norm(x * scale, 64), truth),
        )
        truth = torch.nn.functional.rms_norm(x.double() * scale, (64,))
        yield Case(
            f"RMSNorm, float32, values of order {scale:.0e}",
            error(torch.nn.functional.rms_norm(x * scale, (64,)), truth),
            error(F.rms_norm(x * scale, 64), truth),
        )


def derivatives() -> Iterator[Case]:
    """float64, the third derivative along a direction."""
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(2, 5, dtype=torch.float64, generator=generator) for _ in range(2))

    def spelled_out(t: Tensor) -> Tensor:
        d = t - t.mean(-1, keepdim=True)
        return d / (d.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    def third(function: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        value = (function(leaf) * v).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, leaf, create_graph=True)
            value = (grad * v).sum()
        return grad.detach()

    exact = third(spelled_out)
    yield Case(
        "LayerNorm, float64, third derivative",
        error(third(lambda t: torch.nn.functional.layer_norm(t, (5,))), exact),
        error(third(lambda t: F.layer_norm(t, 5)), exact),
    )


def cases() -> list[Case]:
    """All rows."""
    return [*large_means(), *half_precision_gradients(), *extremes(), *derivatives()]


TEXT = """\
# Where the numbers differ from torch's

normkit's functions and modules give torch's results where torch is right (all of torch's own test data for
norms is run against them, in four dtypes). Here torch is not. Both are compared with float64; an error is the
largest one, as a share of the largest true value. Measured with torch {version} on one thread of the
CPU (torch's gradients of the gain depend on how many there are) by `python benchmarks/accuracy.py --write`.

| case | torch | normkit |
|---|---|---|
{rows}

Why: torch's channels-last kernel takes the variance as E[x²] − E[x]², which loses all digits when the mean is
large; its layer norm subtracts a mean that float32 had to round (normkit subtracts, then subtracts the mean of
what is left); its bfloat16 backward adds the gain's gradient up in bfloat16; its double backward takes the
statistics for constants; and squares of large values overflow (normkit scales such rows by a power of two,
which rounds nothing).

Where torch answers with NaN, or counts what it should not: a negative eps is refused (ValueError); an empty
batch leaves running statistics alone; a recomputed batch (activation checkpointing) is not counted twice.
"""


def page(rows: list[Case]) -> str:
    """The document."""
    lines = [f"| {case.name} | {shown(case.torch)} | {shown(case.normkit)} |" for case in rows]
    return TEXT.format(version=torch.__version__, rows="\n".join(lines))


def shown(value: float) -> str:
    """Two digits."""
    return "NaN" if math.isnan(value) else f"{value:.2g}"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    torch.set_num_threads(1)
    text = page(cases())
    if parser.parse_args().write:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
