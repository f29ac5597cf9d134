"""What a comparison returns."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from normkit.audit.result import NormRecord

Side = Literal["input", "output"]


@dataclass(frozen=True, kw_only=True)
class Gap:
    """How far one call of a pair of norms is apart in the two models."""

    input: float | None
    """``||a - b|| / ||a||`` of what is normalized; None where the shapes cannot be compared."""
    output: float | None
    input_limit: float
    """What rounding explains: errors past it are real."""
    output_limit: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A norm of A and the norm of B at its place; None where the other model has none."""

    a: NormRecord | None
    b: NormRecord | None
    fields: dict[str, tuple[Any, Any]]
    """Fields that differ, with both values: of NormSpec, and ``kind``, ``placement``, ``calls``, ``features``."""
    gain: float | None = None
    """Largest difference of the effective gains, over the largest gain of A; None where there are none to compare."""
    bias: float | None = None
    gaps: tuple[Gap, ...] = ()
    """One for each call, if the models were run."""

    @property
    def name(self) -> str:
        """The name in A; in B where A has none."""
        known = self.a or self.b
        assert known is not None
        return known.name

    def same(self) -> bool:
        """Whether both models have the norm, with one spec and (to float32 rounding) one gain and bias."""
        return self.a is not None and self.b is not None and not self.fields and not self.weights_differ()

    def weights_differ(self) -> bool:
        """Whether gains or biases differ by more than float32 rounding."""
        return any(value is not None and not value <= 1e-6 for value in (self.gain, self.bias))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "a": None if self.a is None else self.a.name,
            "b": None if self.b is None else self.b.name,
            "fields": {name: [_plain(x) for x in values] for name, values in self.fields.items()},
            "gain": _plain(self.gain),
            "bias": _plain(self.bias),
            "gaps": [
                {"input": _plain(g.input), "output": _plain(g.output),
                 "input_limit": g.input_limit, "output_limit": g.output_limit}
                for g in self.gaps
            ],
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first norm, in order of execution, at which the two models' activations are no longer the same."""

    pair: Pair
    call: int
    side: Side
    """``"input"``: something before this norm differs, and behind ``after``. ``"output"``: the norm itself does."""
    error: float
    limit: float
    after: str | None
    """The last norm of A whose output still agreed."""

    def sentence(self) -> str:
        """In words."""
        call = f" (call {self.call})" if self.call else ""
        other = "" if self.pair.b is None or self.pair.b.name == self.pair.name else f" ({self.pair.b.name} in B)"
        size = f"relative error {self.error:.2g}, where rounding explains {self.limit:.2g}"
        if self.side == "output":
            why = ", ".join(f"{k} {a} against {b}" for k, (a, b) in self.pair.fields.items())
            if not why and self.pair.weights_differ():
                why = "its weights differ"
            text = f"the inputs of {self.pair.name}{other}{call} agree and its outputs part: {size}"
            return text + (f"; {why}" if why else "")
        start = f"after {self.after}, whose output agrees" if self.after else "before the first norm"
        return f"the models part {start}: at the input of {self.pair.name}{other}{call}, {size}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "a": None if self.pair.a is None else self.pair.a.name,
            "b": None if self.pair.b is None else self.pair.b.name,
            "call": self.call,
            "side": self.side,
            "error": _plain(self.error),
            "limit": self.limit,
            "after": self.after,
            "sentence": self.sentence(),
        }


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Everything that a comparison found."""

    a: str
    b: str
    """The models' classes."""
    pairs: tuple[Pair, ...]
    """In order of execution."""
    parting: Parting | None
    """None where the activations agree throughout, or were not compared."""
    ran: bool
    """Whether the activations were compared."""
    output: float | None = None
    """Relative error of the models' outputs."""
    notes: tuple[str, ...] = ()

    def same(self) -> bool:
        """Whether no norm differs, nor (if they were compared) an activation."""
        return self.parting is None and all(pair.same() for pair in self.pairs)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: ``a``, ``b``, ``same``, ``pairs``, ``parting`` (null where nothing parts), ``output``."""
        return {
            "a": self.a,
            "b": self.b,
            "same": self.same(),
            "activations_compared": self.ran,
            "pairs": [p.to_dict() for p in self.pairs],
            "parting": None if self.parting is None else self.parting.to_dict(),
            "output": _plain(self.output),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        """The table that ``normkit diff`` prints, without colour."""
        from io import StringIO

        from rich.console import Console

        from normkit.audit.compare.terminal import show

        text = StringIO()
        show(self, Console(file=text, width=140, color_system=None))
        return text.getvalue().rstrip()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
