"""audit: run a model once, find its norms, say what they do and where they sit, apply the rules."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map_only

from normkit.audit import rules
from normkit.audit.find import Occurrence, find_norms, find_unreached, weight_place
from normkit.audit.identify import Identification
from normkit.audit.place import Branch, NormSite, place
from normkit.audit.result import Audit, BranchRecord, NormRecord
from normkit.audit.trace import trace_past_failures
from normkit.audit.trace.graph import TensorInfo, Trace

ROLES = ("weight", "bias", "running_mean", "running_var")


class AuditError(Exception):
    """The model could not be run on these inputs; the message says why, and what to do."""


def audit(
    model: nn.Module, *example_args: Any, progress: Callable[[str], None] = lambda _: None, **example_kwargs: Any
) -> Audit:
    """Say what every norm of a model computes and where it sits, by running it once.

    Identification is by behaviour (each norm is probed on a copy), placement by dataflow; no class, module or
    attribute name is looked at. Works on real and on meta tensors. The model is left as it was.

    Args:
        model: any module. Its training flags decide what is audited: call ``eval()`` first for inference.
        example_args: what to call it with.
        progress: called with a word on what is being done.
        example_kwargs: what to call it with.

    Returns:
        An `Audit`; ``to_dict()`` is its published JSON form.

    Raises:
        AuditError: the model's forward raised before any norm, or it holds parameters that are not initialized yet.
            A submodule that raises later is named in ``failures``, and the rest is audited.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise AuditError(f"{lazy[0]} is not initialized yet (a lazy module): run the model once, then audit it")
    progress("running the model")
    recorded = trace_past_failures(model, example_args, example_kwargs)
    occurrences = find_norms(recorded, progress)
    if recorded.error is not None and not occurrences:
        raise AuditError(_refusal(model, recorded, example_args, example_kwargs)) from recorded.error
    progress("placing norms")
    placed = place(recorded, [NormSite(o.name, tuple(o.calls)) for o in occurrences])
    norms = tuple(_norm(o, recorded, weight_place(recorded, o) or placed.placements[o.name]) for o in occurrences)
    branches = tuple(_branch(b) for b in placed.branches)
    progress("checking rules")
    evidence = rules.Evidence(
        model=model, norms=norms, branches=branches, streams=placed.streams, continued=frozenset(placed.continued)
    )
    parameters = list(model.parameters())
    return Audit(
        model=type(model).__name__,
        norms=norms,
        branches=branches,
        findings=rules.check(evidence),
        parameters=sum(p.numel() for p in parameters),
        device=_device(recorded, parameters),
        failures=tuple(f"{f.module or 'the model'} raised {_said(f.error)}" for f in recorded.failures),
        unreached=find_unreached(model, recorded),
        guesses=tuple(f"{g.op} in {g.module or 'the model'} was taken to be {g.value}" for g in recorded.guesses),
    )


def _device(recorded: Trace, parameters: list[nn.Parameter]) -> str:
    """Where the model's tensors lie: most of its parameters, or what it ran on if it has none."""
    counts: Counter[str] = Counter()
    for parameter in parameters:
        counts[parameter.device.type] += parameter.numel()
    for call in recorded.calls if not counts else ():
        tree_map_only(TensorInfo, lambda info: counts.update([info.device.type]), (call.args, call.kwargs))
    return counts.most_common(1)[0][0] if counts else "cpu"


def _norm(found: Occurrence, recorded: Trace, placement: Any) -> NormRecord:
    value = recorded.values[found.calls[0].inputs[0]]
    identification = found.identification
    assert identification.kind != "none"
    return NormRecord(
        name=found.name,
        class_name=found.class_name,
        kind=identification.kind,
        spec=identification.spec,
        reason=identification.reason,
        placement=placement,
        calls=len(found.calls),
        functional=found.functional,
        input_shape=value.shape,
        input_dtype=str(value.dtype).removeprefix("torch."),
        batch_statistics=_on_batch(identification),
        module=found.module,
        parameters={role: path for role in ROLES if (path := getattr(identification, role)) is not None},
    )


def _on_batch(identification: Identification) -> bool:
    """Whether the norm divided by statistics of the batch in this run."""
    spec = identification.spec
    if spec is None or spec.axes not in ("batch", "instance") or spec.frozen:
        return False
    return spec.running is None or bool(identification.uses_batch)


def _branch(found: Branch) -> BranchRecord:
    slots = {"input": found.n_input, "inner": found.n_inner, "output": found.n_output, "stream": found.n_stream}
    return BranchRecord(
        name=found.name,
        placement=found.placement,
        stream=found.stream,
        slots={slot: list(ids) for slot, ids in slots.items() if ids},
        alpha=found.alpha,
        branch_scale=found.learned_scale or found.scale,
        input_gain=found.gain,
    )


def _refusal(model: nn.Module, recorded: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """One line: who raised, what, what it was given, and what to do."""
    assert recorded.error is not None
    where = recorded.failures[0].module if recorded.failures else ""
    given = [_described(a) for a in args] + [f"{name}={_described(v)}" for name, v in kwargs.items()]
    takes = ", ".join(inspect.signature(model.forward).parameters)
    return (
        f"{type(model).__name__} raised {_said(recorded.error)} (in {where or 'its own forward'}); it was called with "
        f"{', '.join(given) or 'nothing'} and takes {takes}: give inputs that fit"
    )


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float | str | type(None)) else type(value).__name__


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= 200 else text[:197] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
