"""``normkit swap``: what a swap of a model's norms would do here, measured; nothing is written."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from normkit.cli.audit import USAGE

if TYPE_CHECKING:
    from normkit.convert.swap import SwapReceipt


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="minilm (the demo), a folder with a config.json, a transformers model type or package.module:factory.",
            show_default=False,
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--inputs",
            help="Inputs where the guess does not fit: NAME=SHAPE:DTYPE, repeatable, or a .safetensors file.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        Literal["as-is", "float32", "bfloat16", "float16"], typer.Option(help="Cast the model first.")
    ] = "as-is",
    train: Annotated[bool, typer.Option("--train", help="Swap in training mode.")] = False,
    slower: Annotated[bool, typer.Option("--slower", help="Swap norms that would be slower, too.")] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write the receipt as JSON; - for standard output.", show_default=False)
    ] = None,
) -> None:
    """Swap a model's norms for a trial, and print the receipt: which, why not, how far off, how fast.

    Exit codes: 0 proven, 1 the proof failed, 2 the model or its inputs cannot be had.

    Example: normkit swap minilm
    Example: normkit swap package.module:factory --train --json receipt.json
    """
    from rich.console import Console

    from normkit.audit.inputs import InputError
    from normkit.audit.load import ModelError
    from normkit.convert import ConversionError

    messages = Console(stderr=True)

    def refuse(error: Exception, code: int) -> typer.Exit:
        messages.print(f"normkit swap: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return typer.Exit(code)

    with messages.status("importing torch") as status:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what foreign code prints is no part of the receipt
                receipt = _run(model, inputs or [], dtype, train, slower, status.update)
        except (ModelError, InputError) as error:
            status.stop()
            raise refuse(error, USAGE) from None
        except ConversionError as error:
            status.stop()
            raise refuse(error, 1) from None
    if json is not None and str(json) == "-":
        typer.echo(receipt.to_json())
        return
    console = Console()
    receipt.show(console if console.is_terminal else Console(width=140))
    if json is not None:
        try:
            receipt.to_json(json)
        except OSError as error:
            raise refuse(OSError(f"cannot write {json}: {error}"), USAGE) from None


def _run(model: str, inputs: list[str], dtype: str, train: bool, slower: bool, progress: Any) -> SwapReceipt:
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
    return swap(loaded.model, *args, only_faster=not slower, progress=progress, **kwargs)
