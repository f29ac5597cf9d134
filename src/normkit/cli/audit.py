"""``normkit audit``: what every norm of a model does, where it sits, what is wrong."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from normkit.cli import outputs
from normkit.cli.common import Device, Inputs, Model, messages, refuse

if TYPE_CHECKING:
    from normkit.audit import Audit


def command(
    model: Model,
    inputs: Inputs = None,
    device: Device = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the audit as JSON; - for standard output.", show_default=False)
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="Measure stream RMS, branch shares, gains, outliers, logits, gradients on this: a .safetensors file "
            "that holds the model's inputs by name (0.input_ids, 1.input_ids, ... for several batches), "
            "repeatable; or the word inputs: those of the audit.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a report to look at: one offline HTML file. Real weights are measured.", show_default=False
        ),
    ] = None,
    sarif: Annotated[
        Path | None, typer.Option(help="Write the findings as SARIF 2.1.0; - for standard output.", show_default=False)
    ] = None,
    github: Annotated[bool, typer.Option("--github", help="Print the findings as GitHub annotations too.")] = False,
    json_schema: Annotated[
        bool,
        typer.Option(
            "--json-schema", help="Print the JSON schema of --json.", is_eager=True, callback=outputs.print_schema
        ),
    ] = False,
    all: Annotated[bool, typer.Option("--all", help="One row for each norm, repeated layers too.")] = False,
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select",
            help="Run these rules only: an id or a topic, repeatable. Example: --select precision",
            show_default=False,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", help="Leave these rules out: an id or a topic, repeatable.", show_default=False),
    ] = None,
    speed: Annotated[
        bool, typer.Option("--speed", help="Also time each norm against a copy (rule slow-norm).")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python files that the folder's config names; read them first."),
    ] = False,
    fail_on: Annotated[
        Literal["info", "warning", "error", "never"],
        typer.Option(help="The lowest severity of a finding that gives exit code 1."),
    ] = "error",
) -> None:
    """Audit a model's norms by behaviour and dataflow.

    Exit codes: 0 clean, 1 findings at or above --fail-on, 2 the model or its inputs cannot be had.

    Example: normkit audit minilm
    Example: normkit audit llama --json llama.json
    Example: normkit audit minilm --data inputs --html minilm.html
    Example: normkit audit minilm --ignore misleading-name --fail-on warning
    """
    wanted = outputs.Wanted(json=json, html=html, sarif=sarif, github=github, all=all, data=data or ["inputs"])
    shared = wanted.shared()
    if shared is not None:
        raise refuse("audit", shared)
    with messages().status("importing torch") as status:

        def progress(text: str) -> None:
            status.update(text)

        try:
            with contextlib.redirect_stdout(sys.stderr):  # what foreign code prints is no part of the audit
                result = _run(
                    model,
                    inputs or [],
                    data or (["inputs?"] if html else []),
                    device,
                    select or [],
                    ignore or [],
                    speed,
                    trust_remote_code,
                    progress,
                )
        except _Refused as refused:
            status.stop()
            raise refuse("audit", refused) from None
    try:
        outputs.write(result, model, wanted)
    except OSError as error:
        raise refuse("audit", f"cannot write {error.filename or html}: {error.strerror or error}") from None
    raise typer.Exit(_exit_code(result, fail_on))


class _Refused(Exception):
    """Nothing can be audited; the message is for the user."""


def _run(
    model: str,
    inputs: list[str],
    data: list[str],
    device: str | None,
    select: list[str],
    ignore: list[str],
    speed: bool,
    trust_remote_code: bool,
    progress: Callable[[str], None],
) -> Audit:
    from normkit.audit import AuditError, audit
    from normkit.audit.inputs import InputError, parse_inputs
    from normkit.audit.load import ModelError, load
    from normkit.audit.numbers.data import read_data
    from normkit.audit.numbers.measure import DataError
    from normkit.audit.rules import chosen

    try:
        rules = [r.id for r in chosen(select, ignore)]
    except ValueError as error:
        raise _Refused(f"--{error}") from None
    if speed:
        rules += [r.id for r in chosen(["speed"], ignore)]
    try:
        loaded = load(
            model,
            device=device,
            inputs=parse_inputs(inputs) if inputs else None,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
        return audit(
            loaded.model,
            *loaded.args,
            select=rules,
            ignore=() if rules else ignore,
            loading=loaded.report,
            data=read_data(data, loaded),
            progress=progress,
            **loaded.kwargs,
        )
    except (ModelError, InputError, AuditError, DataError) as error:
        raise _Refused(str(error)) from error


def _exit_code(result: Audit, fail_on: str) -> int:
    from normkit.audit.result import SEVERITIES

    worst = result.worst()
    if fail_on == "never" or worst is None:
        return 0
    return int(SEVERITIES.index(worst) >= SEVERITIES.index(fail_on))  # type: ignore[arg-type]
