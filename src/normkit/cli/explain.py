"""``normkit explain``: a normalization or a placement, step by step."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from normkit.cli.common import is_stdout, messages, put, refuse, tables

if TYPE_CHECKING:
    from torch import Tensor

    from normkit.explain.source import Subject
    from normkit.spec import NormSpec

CONTEXT = {"ignore_unknown_options": True}
"""So that negative numbers are numbers."""


def command(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="A kind (layer, rms, l2, batch, instance, group), a named convention (gemma, t5, ...), a placement "
            "(pre, post, deepnorm, ...) or, with --module, a model; then numbers or a .npy, .pt or .safetensors file.",
            show_default=False,
        ),
    ] = None,
    spec: Annotated[str | None, typer.Option(help="The kind or convention, if not the first word.")] = None,
    module: Annotated[str | None, typer.Option(help="A norm of the model, by its name in the audit.")] = None,
    weight: Annotated[str | None, typer.Option(help="The stored gain: numbers with commas, or a file.")] = None,
    bias: Annotated[str | None, typer.Option(help="The bias: numbers with commas, or a file.")] = None,
    gate: Annotated[str | None, typer.Option(help="The gate: numbers with commas, or a file.")] = None,
    eps: Annotated[float | None, typer.Option(help="Instead of the convention's eps.")] = None,
    groups: Annotated[int | None, typer.Option(help="Instead of the convention's number of groups.")] = None,
    shape: Annotated[str | None, typer.Option(help="The input's shape, such as 2x4x3x3.")] = None,
    at: Annotated[str | None, typer.Option(help="The element whose set is shown, such as 0,2.")] = None,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"] | None,
        typer.Option(help="What the input is cast to; by default numbers are float32, files stay what they are."),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Which tensor of a file that holds several.")] = None,
    depth: Annotated[int, typer.Option(help="Layers of the stack, for placements.")] = 12,
    digits: Annotated[int, typer.Option(min=1, max=17, help="Digits that are printed.")] = 4,
    json: Annotated[Path | None, typer.Option(help="Write everything as JSON; - for standard output.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw it into this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw it into this file.")] = None,
    values: Annotated[
        bool, typer.Option("--values", help="Draw the values instead of what shares a statistic.")
    ] = False,
    list: Annotated[bool, typer.Option("--list", help="List what can be explained.")] = False,
) -> None:
    """Explain a normalization with its numbers, or how a placement is wired.

    Each step of the formula with its numbers, the geometry, the gradient; --svg and --png draw which cells of the input
    share a statistic.

    Example: normkit explain rms 1 2 3 4
    Example: normkit explain --spec gemma 1 2 3 4 --weight 0,0.1,-0.2,0 --dtype bfloat16
    Example: normkit explain group --shape 2x6x4x4 --svg group.svg
    Example: normkit explain minilm --module embeddings.LayerNorm
    Example: normkit explain deepnorm --depth 24 --png deepnorm.png
    """
    from normkit.explain.source import SourceError

    words = what or []
    try:
        if list:
            _list()
            return
        if not words and spec is None and module is None:
            raise SourceError("name a kind, a convention, a placement or a model; normkit explain --list lists them")
        name = words[0] if words else ""
        if spec is None and module is None and _is_placement(name):
            report, figure = _wiring(words, depth)
        else:
            options = _Options(weight, bias, gate, eps, groups, shape, at, dtype, key, digits, values, module)
            report, figure = _normalization(words, spec, options)
        _write(report, figure, json, svg, png)
    except (ValueError, TypeError, OSError) as error:
        raise refuse("explain", error) from None


class _Options:
    """What the command line says about the numbers."""

    def __init__(self, weight, bias, gate, eps, groups, shape, at, dtype, key, digits, values, module) -> None:
        self.parameters: dict[str, str | None] = {"weight": weight, "bias": bias, "gate": gate}
        self.changes = {k: v for k, v in (("eps", eps), ("groups", groups)) if v is not None}
        self.shape, self.at = _integers(shape, "x", "--shape"), _integers(at, ",", "--at")
        if self.shape is not None and min(self.shape) < 0:
            raise ValueError(f"--shape must be integers >= 0; got {shape}")
        self.dtype, self.key, self.digits, self.values, self.module = dtype, key, digits, values, module


def _normalization(words: list[str], named: str | None, options: _Options) -> tuple[Any, Any]:
    import torch

    from normkit.explain import draw_sets, draw_values, explain

    if options.module is not None:
        subject = _from_model(words[0] if words else "", options.module)
    else:
        subject = _from_words(words, named, options)
    x = subject.x if options.dtype is None else subject.x.to(getattr(torch, options.dtype))
    explained = explain(subject.spec, x, at=options.at, **subject.parameters)

    def report(console: Any) -> dict[str, Any]:
        if console is not None:
            _show(explained, subject, console, options.digits)
        return explained.to_dict()

    def figure() -> Any:
        if options.values:
            return draw_values(explained)
        return draw_sets(explained.spec, explained.shape, explained.at)

    return report, figure


def _show(explained: Any, subject: Subject, console: Any, digits: int) -> None:
    from normkit.explain import show

    if subject.made_up:
        console.print("(numbers made up: normal with mean 0.5; give your own after the name)", style="dim")
    show(explained, console, digits=digits)
    if subject.own_output is not None:
        apart = (subject.own_output.double() - explained.output.double()).abs().max().item()
        console.print(f"\nthe module's own output is within {apart:.2g} of these numbers", highlight=False)


def _from_words(words: list[str], named: str | None, options: _Options) -> Subject:
    import torch

    from normkit.explain import source
    from normkit.explain.draw import default_shape

    if named is None:
        named, words = words[0], words[1:]
    spec = source.find_spec(named).replace(**options.changes)
    invented = not words
    if invented:
        x = source.made_up(options.shape or default_shape(spec)).float()
    elif len(words) == 1 and Path(words[0]).suffix in source.FILES:
        x = source.read_tensor(Path(words[0]), options.key)
        x = x if x.is_floating_point() else x.float()
    else:
        x = (
            source.parse_numbers(words, "the input").float()
            if options.dtype is None
            else source.parse_numbers(words, "the input")
        )
    x = source.shaped(x, spec, None if invented else options.shape)
    parameters = {k: _parameter(text, k, x, spec) for k, text in options.parameters.items() if text is not None}
    if "gate" in parameters and spec.gate is None:
        raise source.SourceError(f"--gate: {named} has no gate; mamba2_gated and qwen3_next_gated have")
    if options.dtype is not None:
        parameters = {k: t.to(getattr(torch, options.dtype)) for k, t in parameters.items()}
    return source.Subject(spec, x, dict(parameters), made_up=invented)


def _parameter(text: str, name: str, x: Tensor, spec: NormSpec) -> Tensor:
    from normkit.explain import source

    path = Path(text)
    value = (
        source.read_tensor(path) if path.suffix in source.FILES else source.parse_numbers([text], f"--{name}").float()
    )
    return value.reshape(x.shape) if name == "gate" and value.numel() == x.numel() else value


def _from_model(target: str, module: str) -> Subject:
    import contextlib
    import sys

    from normkit.audit import AuditError
    from normkit.audit.inputs import InputError
    from normkit.audit.load import ModelError, load
    from normkit.explain.source import SourceError, from_model

    if not target:
        raise SourceError("--module needs a model before it, such as: normkit explain minilm --module NAME")
    with messages().status("running the model") as status, contextlib.redirect_stdout(sys.stderr):
        try:
            return from_model(load(target, progress=status.update), module)
        except (ModelError, InputError, AuditError) as error:
            raise SourceError(str(error)) from error


def _wiring(words: list[str], depth: int) -> tuple[Any, Any]:
    from normkit.explain.source import SourceError
    from normkit.explain.wiring import branches, draw_wiring, equation, notes

    if len(words) > 1:
        raise SourceError(f"{words[0]} is a placement and takes no numbers; got {words[1]!r}")
    found, lines = branches(words[0], depth), notes(words[0], depth)

    def report(console: Any) -> dict[str, Any]:
        if console is not None:
            console.print(f"{words[0]}, at depth {depth}", style="bold", highlight=False)
            for line in lines:
                console.print(f"  {line}", highlight=False)
        wirings = [{"where": b.where, "equation": equation(b.placement), "slots": b.placement.slots} for b in found]
        return {"placement": words[0], "depth": depth, "branches": wirings, "notes": lines}

    return report, lambda: draw_wiring(words[0], depth)


def _write(report: Any, figure: Any, json: Path | None, svg: Path | None, png: Path | None) -> None:
    from normkit.lab.claim import encode

    data = report(None if is_stdout(json) else tables())
    if json is not None:
        put("explain", jsonlib.dumps(encode(data), indent=2, allow_nan=False), json)
    for path, form in ((svg, "svg"), (png, "png")):
        if path is not None:
            figure().savefig(path, format=form)


def _is_placement(name: str) -> bool:
    from normkit.placement import known

    return name in known()


def _list() -> None:
    from normkit.explain.source import KINDS
    from normkit.placement import known
    from normkit.spec import NAMED

    for title, names in (("kinds", KINDS), ("conventions", NAMED), ("placements", known())):
        typer.echo(f"{title + ':':<13}{', '.join(names)}")


def _integers(text: str | None, separator: str, option: str) -> tuple[int, ...] | None:
    from normkit.explain.source import SourceError

    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(separator))
    except ValueError:
        raise SourceError(f"{option} must be integers with {separator!r} between; got {text!r}") from None
