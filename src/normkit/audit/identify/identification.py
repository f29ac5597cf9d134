"""What a module computes, by behaviour: is it a norm, and which?

The module is copied to the CPU and treated as a function of its input and of the tensors that it holds. Each field of
the NormSpec is one measurement (one file beside this one); nothing is read from names, classes or attributes. A spec is
reported only if the reference, given the module's own tensors, then predicts fresh outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from normkit.audit.identify.gate import gate_of, ignored, neutral
from normkit.audit.identify.layout import Layout, Sharing, choose, layouts, sharing
from normkit.audit.identify.other import norm_like
from normkit.audit.identify.parameters import Use, all_finite, odd_and_even, typical, use_of
from normkit.audit.identify.probe import LARGE, Key, NotANorm, OtherStatistic, Probe, Slot, tensors_of, undisturbed
from normkit.audit.identify.rounding import precision
from normkit.audit.identify.running import Stored, stored_statistics
from normkit.audit.identify.statistic import TINY, Division, division
from normkit.audit.identify.verify import Binding, verify
from normkit.spec import Kind, NormSpec

_ASSUMED_EPS = 1e-6
_VERIFIED_IN_FULL = 2**20
_TRIED_AGAIN = 2**14


@dataclass(frozen=True, kw_only=True)
class Identification:
    """What `identify` found.

    Attributes:
        kind: ``"none"`` if the module is no norm, else ``layer``, ``rms``, ``batch``, ``instance``, ``group``,
            ``l2`` or ``other``.
        spec: what it computes; None where a NormSpec cannot say it.
        reason: one plain sentence.
        weight: name, in the module, of the tensor that is the gain; None where there is none. Likewise ``bias``,
            ``running_mean`` and ``running_var``.
        input: which argument is normalized: a position or a keyword.
        gate: which argument is the gate, if the spec has one.
        residual: which argument is added to the input first, if one is.
        uses_batch: for a norm with running statistics: whether it is now set to use the batch's instead (training).
        half_mismatch: the share of half-precision outputs that the spec does not give bit for bit; None where half
            precision was not run. Kernels that sum in another order give about 1e-4.
        statistic: for ``"other"``: what it divides by, where that is known (``"l1 length"``, ``"mean magnitude"``,
            ``"largest magnitude"``).
    """

    kind: Kind | Literal["none"]
    spec: NormSpec | None
    reason: str
    weight: str | None = None
    bias: str | None = None
    running_mean: str | None = None
    running_var: str | None = None
    input: Key | None = None
    gate: Key | None = None
    residual: Key | None = None
    uses_batch: bool | None = None
    half_mismatch: float | None = None
    statistic: str | None = None

    def __bool__(self) -> bool:
        """Whether it is a norm of any kind."""
        return self.kind != "none"


def identify(module: nn.Module, *example_args: Any, **example_kwargs: Any) -> Identification:
    r"""Find out by behaviour whether a module is a normalization, and which::

        y = (x - c) / sqrt(s + eps) * (weight_offset + weight) + bias        which sets, which c and s, which precision

    A copy is run on the CPU with chosen inputs and parameters. The module itself, the random states and the grad mode
    are not changed.

    Args:
        module: any module; its tensors may lie on any device, the meta device included.
        example_args: what it is called with. Only shapes matter; tensors may lie on the meta device. Without any, the
            usual shapes that fit its parameters are tried.
        example_kwargs: the same, by keyword.

    Returns:
        An `Identification`: ``kind``, ``spec`` and ``reason``, and which tensors and arguments have which part.
        ``kind`` is ``"other"`` for what divides by a statistic in a way that no NormSpec says, ``"none"`` for what
        is no norm. A module that cannot be run is ``"none"``, with the error in ``reason``.

    Raises:
        TypeError: ``module`` is no ``nn.Module``. A module's own errors are never raised.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module; got {type(module).__name__}")
    with undisturbed():
        try:
            if example_args or example_kwargs:
                return _identify(module, example_args, example_kwargs)
            return _guess(module)
        except (Exception, SystemExit) as error:  # foreign code may fail in any way, at any attribute
            return _none(f"it cannot be examined: {type(error).__name__}: {str(error)[:160]}")


def _none(reason: str) -> Identification:
    return Identification(kind="none", spec=None, reason=_sentence(reason))


def _sentence(text: str) -> str:
    text = text.strip()
    return (text[0].upper() + text[1:] if text else text) + ("" if text.endswith(".") else ".")


def _guess(module: nn.Module) -> Identification:
    """Without an example: try the usual shapes that fit the tensors it holds."""
    shapes = sorted({tuple(t.shape) for _, t, _, _ in tensors_of(module) if t.dim() > 0 and t.is_floating_point()})
    tries: list[tuple[int, ...]] = []
    for shape in shapes or [(96,)]:
        size = math.prod(shape)
        tries += [(2, 5, *shape)] if len(shape) > 1 else []
        tries += [(2, 5, size), (2, size, 4, 4), (2, size, 6), (2, size), (2, size, 4, 4, 4)]
    best = _none("no usual input shape fits it: give an example input")
    for shape in dict.fromkeys(tries):
        found = _identify(module, (torch.empty(shape, device="meta"),), {})
        if found.spec is not None:
            return found
        if found or best.reason.startswith("No usual"):
            best = found
    return best


def _identify(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Identification:
    try:
        probe = Probe(module, args, kwargs)
    except NotANorm as error:
        return _none(str(error))
    first: Identification | None = None
    for x_key in probe.inputs:
        same = [k for k in probe.inputs if k != x_key and probe.examples[k].shape == probe.examples[x_key].shape]
        probe.x_key = x_key
        probe.second = same[0] if same else None
        probe.second_value = 2.0
        found = _examine(probe)
        if found.spec is not None:
            return found
        if first is None or (found and not first):
            first = found
    assert first is not None
    return first


def _examine(probe: Probe) -> Identification:
    """One choice of the argument that is normalized, at ever larger shapes until the spec holds on the example's."""
    shapes = probe.shapes_to_try()
    found = _none("no input shape to try")
    while shapes:
        try:
            shape = probe.settle(shapes)
        except NotANorm as error:
            return found if found else _none(str(error))
        shapes = shapes[shapes.index(shape) + 1 :]
        found = _describe(probe, shape)
        if found.spec is None:
            # where it holds nothing that tells which sizes matter, the cut may have spoilt it
            shapes = [s for s in shapes if not probe.slots and math.prod(s) <= _TRIED_AGAIN]
        if not shapes or (found.spec is not None and _holds_in_full(probe, found)):
            return found
    return found


def _holds_in_full(probe: Probe, found: Identification) -> bool:
    """Whether the spec also predicts the example's full shape, where a dim that was cut might have held features."""
    spec, full = found.spec, tuple(probe.examples[probe.x_key].shape)
    assert spec is not None
    simple = spec.axes == "features" and spec.channel_dim == -1
    if simple or spec.running is not None or spec.frozen or math.prod(full) > _VERIFIED_IN_FULL:
        return True
    binding = probe.binding
    if binding is None or any(u.dims for u in binding.uses.values()):
        return True  # its gain or bias shows where the features are, and their number was kept
    try:
        verify(binding, spec, (2, *full[1:]))
    except (NotANorm, ValueError):
        return False
    return True


def _describe(probe: Probe, shape: tuple[int, ...]) -> Identification:
    """Measure at one shape, with each part that the second input may have."""
    refusal, statistic = "", None
    if probe.second is not None and ignored(probe, shape):
        probe.values[probe.second] = torch.zeros(shape)
        probe.second = None
    for part in ("alone",) if probe.second is None else ("gate", "residual"):
        try:
            return _measure(probe, shape, part)
        except NotANorm as error:
            refusal = refusal or str(error)
            statistic = error.statistic if isinstance(error, OtherStatistic) else statistic
        except (ValueError, ArithmeticError, RuntimeError) as error:
            refusal = refusal or f"its measurements contradict each other ({error})"
        finally:
            probe.reset()
    probe.second_value = probe.random(shape) if probe.second is not None else 0.0
    why = norm_like(probe, probe, shape) if statistic is None else "no NormSpec says what it computes"
    if why is not None:
        return Identification(
            kind="other", spec=None, reason=_sentence(f"{why}; {refusal}"), input=probe.x_key, statistic=statistic
        )
    return _none(refusal)


def _measure(probe: Probe, shape: tuple[int, ...], part: str) -> Identification:
    gate = None
    if part == "gate":
        probe.second_value = 2.0
        elementwise = sharing(probe, probe.spread(shape) * 4).elementwise
        gate = gate_of(probe, shape, elementwise)
        if gate is None:
            raise NotANorm("its second input acts like no gate")
        probe.second_value = neutral(gate)
    elif part == "residual":
        probe.second_value = 0.0
    x = probe.spread(shape) * LARGE
    seen = sharing(probe, x)
    if seen.elementwise:
        stored = stored_statistics(probe, probe, shape)
        spec, uses, note = _stored_spec(stored), stored.uses, stored.note
        if gate is not None:
            spec = spec.replace(gate=gate)
    else:
        spec, uses, note = _shared(probe, shape, x)
        if gate is not None:
            spec = spec.replace(gate=gate)
    binding = Binding(probe, len(shape), _bound(uses), residual=part == "residual")
    probe.binding = binding
    _telling_scalars(uses)
    verify(binding, spec, shape)
    channels = _channels(spec, shape)
    best = precision(probe, spec, binding, shape, channels)
    return _report(probe, best.spec, binding, shape, gate is not None, [note, best.note], best.mismatch)


def _stored_spec(stored: Stored) -> NormSpec:
    gain = next((u for u in stored.uses if u.role == "gain"), None)
    return NormSpec(
        axes=stored.layout.axes,
        channel_dim=stored.layout.channel_dim,
        centered=stored.centered,
        statistic=stored.statistic,
        eps=stored.eps,
        eps_at=stored.eps_at,
        has_weight=gain is not None,
        weight_offset=0.0 if gain is None else gain.offset,
        weight_shape="scalar" if gain is not None and not gain.dims else "features",
        has_bias=any(u.role == "bias" for u in stored.uses),
        running=stored.running,
        frozen=stored.frozen,
    )


def _shared(probe: Probe, shape: tuple[int, ...], x: Tensor) -> tuple[NormSpec, list[Use], str]:
    """A norm by the input's own statistics."""
    baseline = odd_and_even(probe, x)
    other = odd_and_even(probe, probe.spread(shape) * LARGE)
    if not all_finite(*baseline, *other):
        raise NotANorm("ordinary inputs give outputs that are not finite")
    if typical(other[1] - baseline[1]) > 1e-3 * typical(baseline[0]):
        raise NotANorm("changing the input's sign does not just change the output's")
    doubled = odd_and_even(probe, 2 * x)
    if typical(doubled[0] - baseline[0]) > 1e-3 * typical(baseline[0]):
        raise NotANorm("its output follows the input's scale")
    uses = [use_of(probe, s, x, lambda: odd_and_even(probe, x), baseline) for s in probe.slots]
    uses = [_settle_constant(probe, u) for u in uses]
    if any(u.role not in ("none", "gain", "bias") for u in uses):
        raise NotANorm("a stored tensor acts in a way that no normalization has")
    gains, biases = [u for u in uses if u.role == "gain"], [u for u in uses if u.role == "bias"]
    if len(gains) > 1 or len(biases) > 1:
        raise NotANorm("it has several gains or biases")
    kept = {u.slot: u.slot.base for u in uses}
    for use in uses:
        if use.role == "gain":
            use.slot.base = torch.full_like(use.slot.base, 1 - use.offset)
        elif use.role == "bias":
            use.slot.base = torch.zeros_like(use.slot.base)
    probe.reset()
    try:
        note = _unknown_constants(probe, x, uses)
        seen = sharing(probe, x)
        if seen.first is None or seen.last is None:
            raise NotANorm("no clear set of elements shares a statistic")
        options = [o for o in layouts(shape, seen) if _fits(o, shape, gains, biases)]
        left = choose(probe, probe, shape, options)
        found = division(probe, probe, shape, left[0], seen.leading_only)
        if found.statistic == "sum" and not found.centered:  # a length is one of features
            left.sort(key=lambda o: o.axes != "features")
        layout = left[0]
    finally:
        for slot, base in kept.items():
            slot.base = slot.base if slot.assumed else base
        probe.reset()
    return _shared_spec(layout, found, gains, biases, shape, seen), uses, note


def _settle_constant(probe: Probe, use: Use) -> Use:
    """A factor of one that is code rather than a learned number is no gain."""
    slot = use.slot
    if use.role == "gain" and slot.constant and (not slot.known or bool(slot.base == 1)) and use.offset == 0:
        slot.base, slot.assumed = torch.ones_like(slot.base), True
        probe.reset()
        return Use(slot, "none")
    return use


def _telling_scalars(uses: list[Use]) -> None:
    """A scalar gain of one (its usual start) hides where half precision is rounded: give it a full mantissa.

    The value is one whose sum with the offset is no bfloat16 number, so that the dtype of the sum shows too.
    """
    for use in uses:
        if use.role == "gain" and use.slot.tensor.numel() == 1:
            use.slot.base = torch.full_like(use.slot.base, _telling(use.offset))


def _telling(offset: float) -> float:
    for k in range(1, 128, 2):
        value = 0.5 + k / 256  # a bfloat16 number
        total = torch.tensor(value + offset)
        if offset == 0 or (total.bfloat16().float() != total and total.half().float() == total):
            return value + (0.17 if offset == 0 else 0.0)
    return 0.67


def _unknown_constants(probe: Probe, x: Tensor, uses: list[Use]) -> str:
    """On the meta device a scalar that shows only at small inputs is an eps whose value is lost."""
    lost = []
    for use in uses:
        slot: Slot = use.slot
        if use.role == "none" and not slot.known and slot.tensor.numel() == 1 and not slot.assumed:
            before = probe(x * TINY)
            slot.set(0.3)
            if not torch.equal(before, probe(x * TINY)):
                slot.base, slot.assumed = torch.full_like(slot.base, _ASSUMED_EPS), True
                slot.reset()
                lost.append(slot.name)
            slot.reset()
    names = ", ".join(lost)
    return f"the value of {names} is not known on the meta device: eps {_ASSUMED_EPS} is assumed" if lost else ""


def _fits(layout: Layout, shape: tuple[int, ...], gains: list[Use], biases: list[Use]) -> bool:
    """Whether gain and bias run along the layout's features (or, for a gain over heads, along more)."""
    n = len(shape)
    if isinstance(layout.channel_dim, tuple):
        wanted = tuple(range(n - len(layout.channel_dim), n))
    else:
        wanted = (layout.channel_dim % n,)
    wanted = tuple(d for d in wanted if shape[d] > 1)
    per_head = layout == ("features", -1, 1)
    for use in gains:
        if use.dims and use.dims != wanted and not (per_head and use.dims[-1] == n - 1):
            return False
    over_heads = [u.dims for u in gains] if per_head else []
    return all(u.dims == wanted or u.dims in over_heads for u in biases)


def _shared_spec(
    layout: Layout, found: Division, gains: list[Use], biases: list[Use], shape: tuple[int, ...], seen: Sharing
) -> NormSpec:
    weight_shape: Literal["features", "scalar", "per_head"] = "features"
    if gains:
        features = len(layout.channel_dim) if isinstance(layout.channel_dim, tuple) else 1
        single = features == 1 and gains[0].slot.tensor.numel() == 1 == shape[cast(int, layout.channel_dim)]
        if single or 0 < len(gains[0].dims) <= features:
            weight_shape = "features"
        else:
            weight_shape = "per_head" if gains[0].dims else "scalar"
    return NormSpec(
        axes=layout.axes,
        channel_dim=layout.channel_dim,
        groups=layout.groups,
        partial=found.partial,
        centered=found.centered,
        statistic=found.statistic,
        eps=found.eps,
        eps_at=found.eps_at,
        has_weight=bool(gains),
        weight_offset=gains[0].offset if gains else 0.0,
        weight_shape=weight_shape,
        has_bias=bool(biases),
    )


def _bound(uses: list[Use]) -> dict[str, Use]:
    arguments = {"gain": "weight", "bias": "bias", "mean": "running_mean", "variance": "running_var"}
    return {arguments[u.role]: u for u in uses if u.role in arguments}


def _channels(spec: NormSpec, shape: tuple[int, ...]) -> int:
    if isinstance(spec.channel_dim, tuple):
        return math.prod(shape[d] for d in spec.channel_dim)
    return shape[spec.channel_dim]


def _report(
    probe: Probe,
    spec: NormSpec,
    binding: Binding,
    shape: tuple[int, ...],
    gated: bool,
    notes: list[str],
    mismatch: float | None,
) -> Identification:
    uses_batch = None
    if spec.running is not None:
        x = probe.random(shape)
        second = None if probe.second is None else torch.ones(shape)
        with probe.as_found():
            try:
                y = probe(x, second)
                stored = binding.predict(x, spec, second, torch.float32)
                uses_batch = not torch.allclose(y.float(), stored.float(), rtol=1e-3, atol=1e-3)
            except NotANorm:
                uses_batch = True
    return Identification(
        kind=spec.kind,
        spec=spec,
        reason=_sentence("; ".join([_words(spec), *(n for n in notes if n)])),
        weight=binding.name("weight"),
        bias=binding.name("bias"),
        running_mean=binding.name("running_mean"),
        running_var=binding.name("running_var"),
        input=probe.x_key,
        gate=probe.second if gated else None,
        residual=probe.second if binding.residual else None,
        uses_batch=uses_batch,
        half_mismatch=mismatch,
    )


def _words(spec: NormSpec) -> str:
    """The spec in words."""
    where = {
        "features": "the features of each position",
        "batch": "batch and space of each channel",
        "instance": "space of each sample and channel",
        "group": f"space and each of {spec.groups} groups of channels",
    }[spec.axes]
    if spec.axes == "features" and spec.groups > 1:
        where = f"each of {spec.groups} groups of features"
    if spec.frozen or spec.running is not None:
        source = "stored statistics" if spec.frozen else "the batch's statistics, or running ones in eval mode"
        return f"it normalizes each channel by {source}, eps {spec.eps:.4g}"
    mean = "removes the mean and " if spec.centered else ""
    root = {"mean_square": "root mean square", "unbiased": "unbiased deviation", "sum": "l2 length"}[spec.statistic]
    return f"it {mean}divides by the {root} over {where}, eps {spec.eps:.4g}"
