"""``normkit swap``: what a swap of a model's norms would do here, measured; nothing is written."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from normkit.cli.common import USAGE, Inputs, Model, messages, refuse, show_receipt

if TYPE_CHECKING:
    from normkit.convert.swap import SwapReceipt


def command(
    model: Model,
    inputs: Inputs = None,
    dtype: Annotated[
        Literal["as-is", "float32", "bfloat16", "float16"], typer.Option(help="Cast the model first.")
    ] = "as-is",
    train: Annotated[bool, typer.Option("--train", help="Swap in training mode.")] = False,
    slower: Annotated[bool, typer.Option("--slower", help="Swap norms that would be slower, too.")] = False,
    fuse_residual: Annotated[
        bool, typer.Option("--fuse-residual", help="Fuse residual sums into the swapped norms behind them, too.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the receipt as JSON; - for standard output.", show_default=False)
    ] = None,
) -> None:
    """Swap a model's norms for a trial, and print the receipt: which, why not, how far off, how fast.

    Exit codes: 0 proven, 1 the proof failed, 2 the model or its inputs cannot be had.

    Example: normkit swap minilm
    Example: normkit swap package.module:factory --train --json receipt.json
    """
    from normkit.audit.inputs import InputError
    from normkit.audit.load import ModelError
    from normkit.convert import ConversionError

    with messages().status("importing torch") as status:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what foreign code prints is no part of the receipt
                receipt = _run(model, inputs or [], dtype, train, slower, fuse_residual, status.update)
        except (ModelError, InputError, ConversionError) as error:
            status.stop()
            raise refuse("swap", error, 1 if isinstance(error, ConversionError) else USAGE) from None
    show_receipt("swap", receipt, json)


def _run(
    model: str, inputs: list[str], dtype: str, train: bool, slower: bool, fuse_residual: bool, progress: Any
) -> SwapReceipt:
    import torch

    from normkit.audit.inputs import parse_inputs
    from normkit.audit.load import load
    from normkit.convert.proof import cast
    from normkit.convert.swap import swap

    loaded = load(model, device="cpu", inputs=parse_inputs(inputs) if inputs else None, progress=progress)
    args, kwargs = loaded.args, loaded.kwargs
    if dtype != "as-is":
        loaded.model.to(getattr(torch, dtype))
        args, kwargs = cast(args, getattr(torch, dtype)), cast(kwargs, getattr(torch, dtype))
    if train:
        loaded.model.train()
    options = {"only_faster": not slower, "fuse_residual": fuse_residual, "progress": progress}
    return swap(loaded.model, *args, **options, **kwargs)
