"""What the commands share: the arguments that name a model, the consoles, refusals in one line, output that pipes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from normkit.convert import Receipt

USAGE = 2
"""Exit code for input that cannot be used."""

Model = Annotated[
    str,
    typer.Argument(
        help="minilm (the demo), a folder with a config.json, a file of weights beside one, a GGUF file, a "
        "transformers model type or package.module:factory.",
        show_default=False,
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--inputs",
        help="Inputs where the guess does not fit: NAME=SHAPE:DTYPE, repeatable, or a .safetensors file. "
        "Example: --inputs pixel_values=2x3x224x224:float32",
        show_default=False,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu or meta; by default cpu where there are weights.", show_default=False)
]


class Commands(typer.Typer):
    """Typer whose help is wrapped at the terminal's width, not at the docstring's; each example keeps its line."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # type: ignore[override]
        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            text = re.sub(r"(?<!\n)\n(?!\n|Example)", " ", inspect.cleandoc(function.__doc__ or ""))
            return super(Commands, self).command(name, help=text, **options)(function)

        return register


def tables(width: int = 140) -> Console:
    """The console for results. A pipe has no width of its own; names should stay whole."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)


def messages() -> Console:
    """The console for everything that is no result."""
    from rich.console import Console

    return Console(stderr=True)


def refuse(command: str, reason: object, code: int = USAGE) -> typer.Exit:
    """Print why a command does nothing, in one line; raise what comes back."""
    text = f"normkit {command}: {' '.join(str(reason).split())}"
    if not text.isprintable():
        from normkit.convert.terminal import printable

        text = printable(text)
    messages().print(text, style="red", highlight=False, markup=False, soft_wrap=True)
    return typer.Exit(code)


def put(command: str, text: str, path: Path) -> None:
    """Write a result into a file, or for ``-`` to standard output."""
    if is_stdout(path):
        typer.echo(text)
        return
    try:
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    except OSError as error:
        raise refuse(command, f"cannot write {path}: {error.strerror or error}") from None


def is_stdout(path: Path | None) -> bool:
    """Whether a result is asked for on standard output, so that nothing else may go there."""
    return path is not None and str(path) == "-"


def show_receipt(command: str, receipt: Receipt, json: Path | None) -> None:
    """Print a conversion's receipt, and write it where it is asked for."""
    if not is_stdout(json):
        receipt.show(tables())
    if json is not None:
        put(command, receipt.to_json(), json)
