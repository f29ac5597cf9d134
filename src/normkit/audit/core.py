"""audit: run a model once, find its norms, say what they do and where they sit, apply the rules."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map_only

from normkit.audit import rules
from normkit.audit.find import Occurrence, find_norms, find_unreached, weight_place
from normkit.audit.identify import Identification
from normkit.audit.load import LoadReport
from normkit.audit.numbers.measure import Batch, measure
from normkit.audit.numbers.sites import Sites, find_sites
from normkit.audit.place import Branch, NormSite, PlaceResult, place
from normkit.audit.reruns import Reruns
from normkit.audit.result import SEVERITIES, Audit, BranchRecord, NormRecord, Severity
from normkit.audit.trace import trace_past_failures
from normkit.audit.trace.graph import TensorInfo, Trace
from normkit.audit.trace.wrappers import class_name, unwrapped
from normkit.errors import described

ROLES = ("weight", "bias", "running_mean", "running_var")


class AuditError(Exception):
    """The model could not be run on these inputs; the message says why, and what to do."""


def audit(
    model: nn.Module,
    *example_args: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    config: Any = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    loading: LoadReport | None = None,
    data: Iterable[Batch] | None = None,
    gradients: bool = True,
    progress: Callable[[str], None] = lambda _: None,
    **example_kwargs: Any,
) -> Audit:
    """Say what every norm of a model computes and where it sits, by running it, and apply the rules.

    Identification is by behaviour (each norm is probed on a copy), placement by dataflow; no class, module or
    attribute name is looked at. Works on real and on meta tensors. The model is left as it was.

    Args:
        model: any module. Its training flags decide what is audited: call ``eval()`` first for inference.
        example_args: what to call it with.
        optimizer: the optimizer that trains it, for the rules on weight decay and warm-up; it is not stepped.
        scheduler: its learning-rate schedule; a copy is stepped.
        config: the model's config, an object with ``to_dict()`` or a mapping; by default ``model.config``.
        select: ids or topics of the rules to run; by default all that need not be asked for (``normkit rules``).
        ignore: ids or topics of rules to leave out.
        loading: what reading a checkpoint left out, as `normkit.audit.load.load` reports it.
        data: batches to measure numbers on (`Audit.numbers`): stream RMS by depth, branch shares, gains, outliers,
            attention logits, gradients. Each is one tensor, a tuple of arguments or a dict of keyword arguments.
        gradients: whether ``data`` is run backward too.
        progress: called with a word on what is being done.
        example_kwargs: what to call it with. An argument of the model that shares its name with one of the above
            cannot be given so: give it by position.

    Returns:
        An `Audit`; ``to_dict()`` is its published JSON form.

    Raises:
        AuditError: the model's forward raised before any norm, it holds parameters that are not initialized yet, or an
            input is an iterator, which one run would use up.
            A submodule that raises later is named in ``failures``, and the rest is audited.
        TypeError: ``model`` is no module; or an option is given that is also the name of an argument of the model's
            forward that is not given by position, so that it may be meant for either.
        ValueError: ``select`` or ``ignore`` names no rule.
        DataError: the model does not run on a batch of ``data``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    _refuse_ambiguous(
        model,
        example_args,
        optimizer=optimizer is not None,
        scheduler=scheduler is not None,
        config=config is not None,
        select=bool(select),
        ignore=bool(ignore),
        loading=loading is not None,
        data=data is not None,
        gradients=not gradients,
    )
    chosen = rules.chosen(select, ignore)
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise AuditError(f"{lazy[0]} is not initialized yet (a lazy module): run the model once, then audit it")
    for given in (*example_args, *example_kwargs.values()):
        if isinstance(given, Iterator):
            raise AuditError(f"an input is a {type(given).__name__}, which one run uses up: give a list")
    found = survey(model, example_args, example_kwargs, progress)
    recorded, placed, norms, branches = found.recorded, found.placed, found.norms, found.branches
    numbers = None
    if data is not None:
        numbers = measure(model, norms, branches, found.sites, data, gradients=gradients, progress=progress)
    unreached = find_unreached(model, recorded)
    progress("checking rules")
    evidence = rules.Evidence(
        model=model,
        norms=norms,
        branches=branches,
        streams=placed.streams,
        continued=frozenset(placed.continued),
        reruns=Reruns(model, example_args, example_kwargs, recorded, found.occurrences),
        never_ran=tuple(u.name for u in unreached),
        optimizer=optimizer,
        scheduler=scheduler,
        config=_config_of(model, config),
        loading=loading,
        numbers=numbers,
    )
    parameters = list(model.parameters())
    return Audit(
        model=class_name(unwrapped(model)),
        norms=norms,
        branches=branches,
        findings=rules.check(evidence, chosen),
        parameters=sum(p.numel() for p in parameters),
        device=_device(recorded, parameters),
        failures=tuple(f"{f.module or 'the model'} raised {described(f.error)}" for f in recorded.failures),
        unreached=unreached,
        guesses=tuple(
            f"{g.module or 'the model'} asked for the value of a tensor, which meta tensors have not: {g.op} was "
            f"answered {g.value}, and the run took that path"
            for g in recorded.guesses
        ),
        numbers=numbers,
        sites=found.sites,
    )


def _refuse_ambiguous(model: nn.Module, args: tuple[Any, ...], **given: bool) -> None:
    """An option that is called like an argument of the model may be meant for the model.

    Raises:
        TypeError: it is, and the model's argument is not given by position.
    """
    parameters = _parameters(model)
    by_position = list(parameters)[: len(args)]
    for name in (n for n, is_given in given.items() if is_given and n in parameters and n not in by_position):
        raise TypeError(
            f"{name}= is an option of audit and an argument of {type(model).__name__}.forward, and goes to audit: "
            "give the model's argument by position, or wrap the model in a module whose argument has another name"
        )


def _parameters(model: nn.Module) -> Collection[str]:
    """The arguments of a model's forward; none where it cannot say them (a traced program)."""
    try:
        return inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return ()


def _device(recorded: Trace, parameters: list[nn.Parameter]) -> str:
    """Where the model's tensors lie: most of its parameters, or what it ran on if it has none."""
    counts: Counter[str] = Counter()
    for parameter in parameters:
        counts[parameter.device.type] += parameter.numel()
    for call in recorded.calls if not counts else ():
        tree_map_only(TensorInfo, lambda info: counts.update([info.device.type]), (call.args, call.kwargs))
    return counts.most_common(1)[0][0] if counts else "cpu"


@dataclass(frozen=True)
class Survey:
    """The norms of a model, where they sit and where they can be looked at: an audit before its rules."""

    recorded: Trace
    occurrences: list[Occurrence]
    placed: PlaceResult
    norms: tuple[NormRecord, ...]
    branches: tuple[BranchRecord, ...]
    sites: Sites


def survey(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    progress: Callable[[str], None] = lambda _: None,
) -> Survey:
    """Run a model once; find, identify and place its norms.

    Raises:
        AuditError: the model's forward raised.
    """
    progress("running the model")
    recorded = trace_past_failures(model, args, kwargs)
    occurrences = find_norms(recorded, progress)
    if recorded.error is not None and not occurrences:
        raise AuditError(_refusal(model, recorded, args, kwargs)) from recorded.error
    progress("placing norms")
    placed = place(recorded, [NormSite(o.name, tuple(o.calls)) for o in occurrences])
    norms = tuple(
        _norm(o, recorded, weight_place(recorded, o) or placed.placements[o.name], placed.streams.get(o.name))
        for o in occurrences
    )
    branches = tuple(_branch(b) for b in placed.branches)
    sites = find_sites(recorded, occurrences, placed.branches)
    return Survey(recorded, occurrences, placed, norms, branches, sites)


def assert_clean(
    model: nn.Module, *example_args: Any, fail_on: Severity = "warning", **options_and_example_kwargs: Any
) -> Audit:
    """Audit a model and raise if a finding reaches a severity: one line for a test suite.

    Args:
        model: as for `audit`.
        example_args: as for `audit`.
        fail_on: the lowest severity that is a failure: ``"info"``, ``"warning"`` or ``"error"``.
        options_and_example_kwargs: as for `audit`, ``select`` and ``ignore`` among them.

    Returns:
        The `Audit`, for further assertions.

    Raises:
        AssertionError: with one line for each finding, and its fix.
        ValueError: ``fail_on`` is no severity.
    """
    if fail_on not in SEVERITIES:
        raise ValueError(f"fail_on must be one of {', '.join(SEVERITIES)}; got {fail_on!r}")
    result = audit(model, *example_args, **options_and_example_kwargs)
    failed = [f for f in result.findings if SEVERITIES.index(f.severity) >= SEVERITIES.index(fail_on)]
    if failed:
        lines = [f"{f.severity} {f.rule}: {', '.join(f.where)}: {f.message}. Fix: {f.fix}." for f in failed]
        raise AssertionError("\n".join((f"{result.model} has {len(failed)} findings of severity {fail_on} or above:"
                                        if len(failed) > 1 else f"{result.model} has a finding:", *lines)))  # fmt: skip
    return result


def _config_of(model: nn.Module, config: Any) -> Mapping[str, Any]:
    """A config as plain values."""
    if config is None:
        with contextlib.suppress(Exception):  # a model whose attributes raise
            config = getattr(unwrapped(model), "config", None)
    to_dict = getattr(config, "to_dict", None)
    made = to_dict() if callable(to_dict) else config
    return made if isinstance(made, Mapping) else {}


def _norm(found: Occurrence, recorded: Trace, placement: Any, stream: int | None) -> NormRecord:
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
        stream=stream,
        input_shape=value.shape,
        input_dtype=str(value.dtype).removeprefix("torch."),
        batch_statistics=_on_batch(identification),
        module=found.module,
        identification=identification,
        location=_location(found, recorded),
        parameters={role: path for role in ROLES if (path := getattr(identification, role)) is not None},
        half_mismatch=identification.half_mismatch,
    )


def _location(found: Occurrence, recorded: Trace) -> tuple[str, int] | None:
    """The model's own line that runs a norm; failing that, where the norm's class is defined."""
    lines = (recorded.nodes[n].line for n in sorted(found.calls[0].nodes))
    line = next((line for line in lines if line is not None), None)
    if line is not None or found.module is None:
        return line
    try:
        file = inspect.getsourcefile(type(found.module))
        return None if file is None else (file, inspect.getsourcelines(type(found.module))[1])
    except (OSError, TypeError):  # a class without source: built in, or made at run time
        return None


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
        inside=found.inside,
        alpha=found.alpha,
        branch_scale=found.learned_scale or found.scale,
        input_gain=found.gain,
    )


def _refusal(model: nn.Module, recorded: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """One line: who raised, what, what it was given, and what to do."""
    assert recorded.error is not None
    if _lacks_forward(recorded.error):
        parts = ", ".join([f"model.{name}" for name, _ in unwrapped(model).named_children()][:6])
        return (
            f"{class_name(unwrapped(model))} holds a module without a forward, or is one: define it, or audit what is "
            f"run instead{f' (it has {parts})' if parts else ''}"
        )
    where = recorded.failures[0].module if recorded.failures else ""
    given = [_described(a) for a in args] + [f"{name}={_described(v)}" for name, v in kwargs.items()]
    takes = ", ".join(_parameters(model))
    return (
        f"{type(model).__name__} raised {described(recorded.error)} (in {where or 'its own forward'}); it was called "
        f"with {', '.join(given) or 'nothing'} and takes {takes}: give inputs that fit"
    )


def _lacks_forward(error: BaseException) -> bool:
    """Whether an exception was raised by what stands in for a forward that was never defined."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_code is nn.Module.forward.__code__


def _described(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float | str | type(None)) else type(value).__name__
