"""``normkit diff``: two models' norms side by side, and the first at which their activations part."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normkit.cli.common import Device, is_stdout, messages, put, refuse, tables

if TYPE_CHECKING:
    from collections.abc import Callable

    from normkit.audit import Diff

_MODEL = "minilm, a folder with a config.json, a transformers model type or package.module:factory."


def command(
    a: Annotated[str, typer.Argument(help=f"The model that is right: {_MODEL}", show_default=False)],
    b: Annotated[str, typer.Argument(help="The model that is asked about, named likewise.", show_default=False)],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--inputs",
            help="What both are run on, in place of A's inputs: NAME=SHAPE:DTYPE, repeatable, or a .safetensors file.",
            show_default=False,
        ),
    ] = None,
    device: Device = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="A fixed limit on the relative error; by default A's own rounding.", show_default=False),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the comparison as JSON; - for standard output.", show_default=False)
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="One row for each norm, those that are the same too.")] = False,
) -> None:
    """Compare the norms of two models or checkpoints: specs, gains, placement, activations.

    Norms are matched by order of execution and place, not by name. On real weights both models are run on A's inputs,
    and the first norm at which they part is named.

    Exit codes: 0 the same, 1 different, 2 a model or its inputs cannot be had.

    Example: normkit diff original/ port/
    Example: normkit diff llama mistral
    """
    with messages().status("importing torch") as status:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what foreign code prints is no part of the comparison
                result = _run(a, b, inputs or [], device, tolerance, status.update)
        except _Refused as refused:
            status.stop()
            raise refuse("diff", refused) from None
    if not is_stdout(json):
        from normkit.audit.compare.terminal import show

        show(result, tables(), every=all)
    if json is not None:
        put("diff", result.to_json(), json)
    raise typer.Exit(0 if result.same() else 1)


class _Refused(Exception):
    """Nothing can be compared; the message is for the user."""


def _run(
    a: str, b: str, inputs: list[str], device: str | None, tolerance: float | None, progress: Callable[[str], None]
) -> Diff:
    from normkit.audit import AuditError, diff
    from normkit.audit.inputs import InputError, parse_inputs
    from normkit.audit.load import ModelError, load

    try:
        given = parse_inputs(inputs) if inputs else None
        first = load(a, device=device, inputs=given, progress=progress)
        second = load(b, device=device, inputs=given, progress=progress)
        progress("comparing")
        return diff(first.model, second.model, *first.args, tolerance=tolerance, **first.kwargs)
    except (ModelError, InputError, AuditError) as error:
        raise _Refused(str(error)) from error
