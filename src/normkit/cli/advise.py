"""``normkit advise``: which norm, where, and why."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normkit.cli.common import is_stdout, put, refuse, tables

if TYPE_CHECKING:
    from rich.console import Console

    from normkit.advise import Advice


def command(
    architecture: Annotated[str, typer.Argument(help="decoder, encoder, encoder_decoder, vit, cnn or rnn.")],
    task: Annotated[str, typer.Option(help="pretrain, finetune, classify, detect, style or diffusion.")] = "pretrain",
    depth: Annotated[int, typer.Option(help="Layers or blocks.")] = 12,
    width: Annotated[int, typer.Option(help="Channels or features.")] = 256,
    batch: Annotated[int, typer.Option(help="Samples on one device at a time.")] = 32,
    devices: Annotated[int, typer.Option(help="Processes that train together.")] = 1,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "float32",
    hardware: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    variable_length: Annotated[bool, typer.Option("--variable-length", help="Samples are padded.")] = False,
    streaming: Annotated[bool, typer.Option("--streaming", help="Inference takes one position at a time.")] = False,
    high_learning_rate: Annotated[
        bool, typer.Option("--high-learning-rate", help="The rate is to be as high as stays stable.")
    ] = False,
    no_warm_up: Annotated[bool, typer.Option("--no-warm-up", help="The rate cannot be warmed up.")] = False,
    norm: Annotated[str | None, typer.Option(help="A kind that you want: layer, rms, batch, group, instance.")] = None,
    placement: Annotated[str | None, typer.Option(help="A placement that you want: pre, post, deepnorm, ...")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="The convention of existing weights: llama, gemma, torch_layer, ...")
    ] = None,
    checkpoint_placement: Annotated[str | None, typer.Option(help="The placement of existing weights.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Verdicts of your own lab run, instead of the committed report's.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the advice as JSON; - for standard output.")] = None,
    code: Annotated[bool, typer.Option("--code", help="Print the code alone.")] = False,
) -> None:
    """Advise on a norm, its placement and all that belongs to it, with reasons.

    Each choice comes with its evidence (a result of the lab or a paper) and with what would change it. Contradictory
    requests are refused, exit code 2.

    Example: normkit advise decoder --depth 24 --dtype bfloat16
    Example: normkit advise cnn --task detect --batch 2 --devices 8
    Example: normkit advise decoder --task finetune --checkpoint gemma --checkpoint-placement sandwich
    """
    from normkit.advise import Request, Results, advise

    if code and is_stdout(json):
        raise refuse("advise", "--code and --json - both write to standard output; the JSON holds the code")
    fields = {
        "architecture": architecture, "task": task, "depth": depth, "width": width, "batch": batch,
        "devices": devices, "dtype": dtype, "hardware": hardware, "variable_length": variable_length,
        "streaming": streaming, "high_learning_rate": high_learning_rate, "no_warm_up": no_warm_up, "norm": norm,
        "placement": placement, "checkpoint": checkpoint, "checkpoint_placement": checkpoint_placement,
    }  # fmt: skip
    try:
        found = advise(Request(**fields), None if results is None else Results.from_file(results))  # type: ignore[arg-type]
    except ValueError as error:
        raise refuse("advise", error) from None
    if json is not None:
        put("advise", jsonlib.dumps(found.to_dict(), indent=2), json)
    if code:
        typer.echo(found.code, nl=False)
    elif not is_stdout(json):
        _show(found, tables(120))


def _show(found: Advice, console: Console) -> None:
    from rich.syntax import Syntax

    for choice in found.choices:
        console.print(f"[bold]{choice.topic}[/]: {_plain(choice.value)}", highlight=False)
        console.print(f"  why: {_plain(choice.reason)}", highlight=False)
        for e in choice.evidence:
            where = f"lab: {e.ref}" if e.kind == "lab" else e.ref
            console.print(
                f"  from: {_plain(where)}{_plain(f' ({e.says})' if e.says else '')}", style="dim", highlight=False
            )
        console.print(f"  else: {_plain(choice.changes_if)}\n", highlight=False)
    console.print(Syntax(found.code, "python", background_color="default") if console.is_terminal else found.code)


def _plain(text: Any) -> str:
    from rich.markup import escape

    return escape(str(text))
