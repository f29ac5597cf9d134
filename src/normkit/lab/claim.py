"""Claim: one statement about normalization, how it is measured, and the criterion that decides it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Kind = Literal["exact", "measured"]
Outcome = Literal["holds", "holds within limits", "not reproduced at this scale", "wrong as stated"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
Cell = dict[str, Any]
"""The settings of one measurement, without the seed; JSON-able."""

_TYPES: dict[str, Any] = {"claim": str, "seed": int, "quick": bool, "cell": dict, "result": dict,
                          "seconds": int | float, "versions": dict, "started": str, "error": str | None}  # fmt: skip
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Row:
    """One measurement: one line of a results file."""

    claim: str
    seed: int
    quick: bool
    cell: Cell
    result: dict[str, Any]
    seconds: float
    versions: dict[str, str]
    """Of the software, and the kind of processor."""
    started: str
    error: str | None = None
    """Why there is no result; such a row is never judged, and is measured again by the next run."""

    @property
    def key(self) -> str:
        """What tells this measurement from every other."""
        return task_key(self.claim, self.cell, self.seed, self.quick)

    def to_json(self) -> str:
        """One line of strict JSON; NaN and infinities become strings."""
        return json.dumps(encode(asdict(self)), allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Row:
        """The inverse of `to_json`; ValueError where the line is no row."""
        values = _decode(json.loads(line))
        names = {f.name for f in fields(cls)}
        if not isinstance(values, dict) or not set(values) <= names or not names - {"error"} <= set(values):
            raise ValueError(f"not a result of the lab: {line[:80]!r}")
        for name, kind in _TYPES.items():
            value = values.get(name)
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
                raise ValueError(f"{name} is {value!r}")
        return cls(**values)


@dataclass(frozen=True)
class Verdict:
    """What the rows say about a claim."""

    outcome: Outcome
    because: str
    """One sentence with the numbers that decided."""
    numbers: dict[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(map(repr, OUTCOMES))}; got {self.outcome!r}")


@dataclass(frozen=True)
class Claim:
    """One statement, and everything that is needed to decide it.

    Args:
        id: its name on the command line, with hyphens.
        kind: ``"exact"`` (arithmetic decides) or ``"measured"`` (an experiment over seeds decides).
        statement: as the field says it.
        source: a paper, or "a tutorial's statement".
        criterion: the sentence by which ``judge`` decides.
        cells: ``cells(quick)`` gives the settings to measure.
        measure: ``measure(seed=..., **cell)`` gives the JSON-able numbers of one run; no global state, no files.
        judge: rows to verdict; a pure function.
        plot: draws rows into a matplotlib Axes, or None.
        seeds: how many runs each cell has, at least; 1 where nothing is random.
    """

    id: str
    kind: Kind
    statement: str
    source: str
    criterion: str
    cells: Callable[[bool], list[Cell]]
    measure: Callable[..., dict[str, Any]]
    judge: Callable[[list[Row]], Verdict]
    plot: Callable[[list[Row], Axes], None] | None = None
    seeds: int = 3

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(map(repr, get_args(Kind)))}; got {self.kind!r}")
        if self.kind == "measured" and self.seeds < 3:
            raise ValueError(f"a measured claim needs seeds >= 3; {self.id} has {self.seeds}")


def task_key(claim: str, cell: Cell, seed: int, quick: bool) -> str:
    """One string for one measurement, the same before and after a trip through JSON."""
    return json.dumps([claim, encode(cell), seed, quick], sort_keys=True)


def encode(value: Any) -> Any:
    """Values that strict JSON holds: NaN and infinities become strings."""
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _decode(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_decode(v) for v in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
