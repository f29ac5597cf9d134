"""``normkit convert``: change how a checkpoint stores its norms, in a new folder, with a receipt."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Literal

import typer

from normkit.cli.common import Commands, messages, refuse, show_receipt

UNKNOWN = 1
"""Exit code where nothing was written because the convention of some norms cannot be told."""

app = Commands(
    help="Change how a checkpoint (safetensors, sharded or not) stores its norms. The result is a new folder that "
    "appears whole or not at all; the source is only read, a piece at a time.",
    no_args_is_help=True,
)

Source = Annotated[Path, typer.Argument(help="A folder with safetensors files, or one such file.", show_default=False)]
Folder = Annotated[Path, typer.Argument(help="A folder with a config.json and safetensors files.", show_default=False)]
Out = Annotated[Path | None, typer.Argument(help="The new folder; not needed with --dry-run.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")]
Json = Annotated[
    Path | None, typer.Option(help="Write the receipt as JSON; - for standard output.", show_default=False)
]
Probe = Annotated[
    bool, typer.Option(help="Build the config's model, if it is small, and measure its outputs before and after.")
]
Gains = Literal["w", "1+w"]


@app.command("gains")
def gains(
    source: Source,
    out: Out = None,
    to: Annotated[
        Literal["model", "w", "1+w"],
        typer.Option(help="What to store: what the config's model reads, gains (w), or gains less one (1+w)."),
    ] = "model",
    stored: Annotated[
        list[str] | None,
        typer.Option(
            help="How norms are stored that cannot be told: PATTERN=w, PATTERN=1+w or PATTERN=config, repeatable. "
            "Example: --stored '*.q_norm.weight=w'",
            show_default=False,
        ),
    ] = None,
    leave_unknown: Annotated[
        bool, typer.Option("--leave-unknown", help="Convert the others where some norms cannot be told.")
    ] = False,
    probe: Probe = True,
    dry_run: DryRun = False,
    json: Json = None,
) -> None:
    """Tell how each norm stores its gain, and store it in one convention.

    Told per norm by its values, by norms computed alike, by the config's model and by tags of earlier runs; a second
    run changes nothing. Exit codes: 0 done, 1 nothing written since some norms cannot be told, 2 unusable input.

    Example: normkit convert gains gemma-baked gemma-fixed
    Example: normkit convert gains qwen3-next plain --to w --dry-run
    """
    from normkit.convert.gains import convert_gains

    with _working("gains") as progress:
        stated = _stated(stored or [])
        receipt = convert_gains(
            source,
            _target(out, dry_run),
            to=to,
            stored=stated,
            leave_unknown=leave_unknown,
            probe=probe,
            progress=progress,
        )
    show_receipt("convert", receipt, json)
    raise typer.Exit(UNKNOWN if receipt.refused and not leave_unknown else 0)


@app.command("names")
def names(
    source: Source,
    out: Out = None,
    names: Annotated[
        str,
        typer.Option(
            "--from", help="The naming of the source: a family or framework, or NAME/STYLE.", show_default=False
        ),
    ] = "",
    to: Annotated[
        str, typer.Option(help="The naming of the result, such as normkit or gguf.", show_default=False)
    ] = "",
    gains: Annotated[
        Gains | None,
        typer.Option(
            help="How the source stores gains, where its naming leaves it open (Megatron).", show_default=False
        ),
    ] = None,
    to_gains: Annotated[
        Gains | None, typer.Option(help="How the result is to store them, where it is open.", show_default=False)
    ] = None,
    keep_others: Annotated[
        bool, typer.Option("--keep-others", help="Keep the names of tensors that are no norms and are not known.")
    ] = False,
    probe: Probe = True,
    dry_run: DryRun = False,
    json: Json = None,
) -> None:
    """Rename norms between model families, frameworks and normkit's Transformer, with their gain convention.

    Refused where the norms differ in kind or place; no tensor is ever dropped. Families: llama, gemma, gemma2, gemma3,
    olmo2, qwen3, gpt2, bert, t5. Others: normkit, gguf, gguf_pair, megatron, megatron_local, nemo, gemma_flax. Styles,
    alone or as NAME/STYLE: torch, tf, keras, flax, textbook.

    Example: normkit convert names gpt2 out --from gpt2 --to normkit
    Example: normkit convert names megatron out --from megatron --gains 1+w --to llama --keep-others
    Example: normkit convert names old-bert out --from bert/tf --to bert --keep-others
    """
    from normkit.convert import ConversionError
    from normkit.convert.rename import convert_names

    with _working("names") as progress:
        if not names or not to:
            raise ConversionError("say both namings: --from llama --to normkit")
        receipt = convert_names(
            source,
            _target(out, dry_run),
            names=names,
            to=to,
            gains=gains,
            to_gains=to_gains,
            keep_others=keep_others,
            probe=probe,
            progress=progress,
        )
    show_receipt("convert", receipt, json)


@app.command("fold")
def fold(
    source: Folder,
    out: Out = None,
    untie: Annotated[
        bool,
        typer.Option("--untie", help="Give a head that is tied to the embedding a copy; config.json then says so."),
    ] = False,
    dry_run: DryRun = False,
    json: Json = None,
) -> None:
    """Fold norms' gains (and biases) into the linear maps that follow, where that is exact.

    The model is loaded by its config.json, and the fold is proved in float64 before anything is written. Refused, with
    the reason, where it is not exact: gains on the identity path, output norms, query and key norms, tied heads.

    Example: normkit convert fold llama-folder llama-folded
    Example: normkit convert fold gpt2-folder gpt2-folded --untie
    """
    from normkit.convert.folder import fold_folder

    with _working("fold") as progress:
        receipt = fold_folder(source, _target(out, dry_run), untie=untie, progress=progress)
    show_receipt("convert", receipt, json)


@app.command("replace")
def replace(
    source: Folder,
    out: Out = None,
    to: Annotated[
        str,
        typer.Option(
            help="group_norm, sync_batch_norm, batch_norm or frozen_batch_norm for batch norms; rms_norm for "
            "LayerNorms; dynamic_tanh for both kinds of row norms.",
            show_default=False,
        ),
    ] = "",
    groups: Annotated[int, typer.Option(help="The most groups that a GroupNorm may have.")] = 32,
    alpha: Annotated[float, typer.Option(help="Where DynamicTanh's scalar starts.")] = 0.5,
    only: Annotated[
        list[str] | None, typer.Option(help="Replace this norm only; repeatable.", show_default=False)
    ] = None,
    dry_run: DryRun = False,
    json: Json = None,
) -> None:
    """Replace norms by others, for further training: outputs change, and the receipt says by how much.

    No config.json can say what was replaced, so the new folder holds a recipe beside the tensors, and
    normkit.convert.load_replaced(OUT) gives the model.

    Example: normkit convert replace resnet-folder --to group_norm --dry-run
    Example: normkit convert replace bert-folder bert-rms --to rms_norm
    """
    from normkit.convert import ConversionError
    from normkit.convert.replace import TARGETS, replace_folder

    with _working("replace") as progress:
        if to not in TARGETS:
            raise ConversionError(f"--to must be one of {', '.join(TARGETS)}; got {to or 'nothing'}")
        target = _target(out, dry_run)
        receipt = replace_folder(source, target, to=to, groups=groups, alpha=alpha, only=only, progress=progress)
    show_receipt("convert", receipt, json)


@app.command("recalibrate")
def recalibrate(
    source: Folder,
    out: Out = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="A safetensors file that holds one batch: forward's arguments by name. Repeatable.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRun = False,
    json: Json = None,
) -> None:
    """Compute batch norms' running statistics again, exactly, over given batches.

    Example: normkit convert recalibrate resnet-folder out --data batch1.safetensors --data batch2.safetensors
    """
    from normkit.audit.inputs import InputError, parse_inputs
    from normkit.convert import ConversionError
    from normkit.convert.folder import recalibrate_folder

    with _working("recalibrate") as progress:
        wrong = [str(path) for path in data or () if path.suffix != ".safetensors"]
        if wrong or not data:
            raise ConversionError(f"--data must name .safetensors files; got {', '.join(wrong) or 'none'}")
        try:
            batches = [parse_inputs([str(path)]) for path in data]
        except InputError as error:
            raise ConversionError(str(error).replace("--inputs", "--data")) from error
        receipt = recalibrate_folder(source, _target(out, dry_run), batches, progress=progress)
    show_receipt("convert", receipt, json)


def _target(out: Path | None, dry_run: bool) -> Path | None:
    from normkit.convert import ConversionError

    if out is None and not dry_run:
        raise ConversionError("give the new folder as the second argument, or --dry-run")
    return None if dry_run else out


def _stated(texts: list[str]) -> dict[str, str]:
    from normkit.convert import ConversionError

    found = {}
    for text in texts:
        pattern, _, convention = text.rpartition("=")
        if not pattern or convention not in ("w", "1+w", "config"):
            raise ConversionError(f"--stored must be PATTERN=w, PATTERN=1+w or PATTERN=config; got {text!r}")
        found[pattern] = convention
    return found


@contextlib.contextmanager
def _working(command: str) -> Generator[Callable[[str], None]]:
    """A status line; a refusal becomes one line and exit code 2."""
    with messages().status("importing torch") as status:
        from normkit.convert import ConversionError

        try:
            with contextlib.redirect_stdout(sys.stderr):  # what foreign code prints is no part of the receipt
                yield status.update
        except ConversionError as refused:
            status.stop()
            raise refuse(f"convert {command}", refused) from None
