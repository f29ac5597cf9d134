"""advise: from a situation to a norm, a placement and all that belongs to them, each with its reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from normkit.advise import numerics, stack
from normkit.advise.code import write_code
from normkit.advise.evidence import Evidence, Results
from normkit.advise.norms import NormChoice, choose_norm
from normkit.advise.request import Request
from normkit.advise.stack import Said
from normkit.spec import KIND_NAMES, NormSpec


@dataclass(frozen=True)
class Choice:
    """One thing advised."""

    topic: str
    """norm, placement, qk-norm, eps, precision, initialization, warm-up, weight decay or batch statistics."""
    value: str
    reason: str
    evidence: tuple[Evidence, ...]
    changes_if: str
    """What would change the advice."""


@dataclass(frozen=True)
class Advice:
    """What `advise` returns. ``to_dict`` is its JSON form."""

    request: Request
    spec: NormSpec | None
    """None where no norm is advised."""
    form: str
    placement: str | None
    """None where there is no residual stream of a transformer."""
    choices: tuple[Choice, ...]
    code: str

    def __getitem__(self, topic: str) -> Choice:
        """The choice on a topic; KeyError names the known ones."""
        for choice in self.choices:
            if choice.topic == topic:
                return choice
        raise KeyError(f"nothing is advised on {topic!r}; there is {', '.join(c.topic for c in self.choices)}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "request": asdict(self.request),
            "spec": None if self.spec is None else self.spec.to_dict(),
            "form": self.form,
            "placement": self.placement,
            "choices": [asdict(c) for c in self.choices],
            "code": self.code,
        }


def advise(request: Request, results: Results | None = None) -> Advice:
    """Choose a norm, its placement, eps, precision, initialization, warm-up and weight decay for a situation.

    Advice that rests on a result of the lab follows that result: with other ``results`` it can be other advice.

    Args:
        request: the situation; making one already refuses contradictions.
        results: the lab's verdicts, by default those of the report in docs/.

    Returns:
        An `Advice`, with a reason, its evidence and what would change it for each choice, and code to paste.
    """
    results = Results.committed() if results is None else results
    chosen = choose_norm(request, results)
    said: dict[str, Said | None] = {"norm": _norm_said(request, chosen)}
    wiring, qk_norm = None, "none"
    if request.is_transformer:
        said["placement"] = stack.choose_placement(request, results)
        wiring = said["placement"].value
        said["qk-norm"] = stack.choose_qk_norm(request, results)
        qk_norm = said["qk-norm"].value
    if chosen.spec is not None:
        said["eps"] = numerics.choose_eps(request, chosen, results)
        said["precision"] = numerics.choose_precision(request, chosen, results)
        said["weight decay"] = numerics.choose_decay(results)
        said["speed"] = numerics.choose_speed(request, chosen, results)
        said["batch statistics"] = numerics.choose_batch_handling(request, chosen, results)
    said["initialization"] = stack.choose_initialization(request, wiring, chosen.form)
    said["warm-up"] = stack.choose_warm_up(request, wiring, results)
    choices = tuple(
        Choice(topic, s.value, s.reason, s.evidence, s.changes_if) for topic, s in said.items() if s is not None
    )
    code = write_code(request, chosen, wiring, qk_norm)
    return Advice(request, chosen.spec, chosen.form, wiring, choices, code)


_FORMS = {"sync": "synchronized over processes (SyncBatchNorm)", "frozen": "with frozen statistics",
          "adaptive": "adaptive (adaLN-Zero)", "cell": "on a GRU's gates"}  # fmt: skip


def _norm_said(r: Request, chosen: NormChoice) -> Said:
    if chosen.spec is None:
        value = "none"
    else:
        value = KIND_NAMES[chosen.spec.kind]
        if chosen.spec.kind == "group":
            value += f" with {chosen.spec.groups} groups"
        if chosen.form in _FORMS:
            value += f", {_FORMS[chosen.form]}"
        if r.checkpoint is not None:
            value += f" as {r.checkpoint}"
    return Said(value, chosen.reason, chosen.evidence, chosen.changes_if)
