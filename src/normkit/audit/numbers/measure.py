"""measure: run an audited model on batches of data, and keep the numbers of its norms, branches and attentions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from normkit.audit.numbers.accumulate import Values, largest_logit
from normkit.audit.numbers.gains import effective_gain, gain_numbers
from normkit.audit.numbers.gradients import Gradients
from normkit.audit.numbers.record import AttentionNumbers, BranchNumbers, NormNumbers, Numbers
from normkit.audit.numbers.sites import BranchSite, Sites
from normkit.audit.result import BranchRecord, NormRecord
from normkit.audit.trace import trace
from normkit.audit.trace.watch import Seen, Watch
from normkit.errors import described

Batch = Tensor | Sequence[Any] | Mapping[str, Any]
"""What the model is called with: one tensor, positional arguments, or keyword arguments."""


class DataError(Exception):
    """The model does not run on the data; the message says on which batch, and why."""


def arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and keyword arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def measure(
    model: nn.Module,
    norms: Sequence[NormRecord],
    branches: Sequence[BranchRecord],
    sites: Sites,
    batches: Iterable[Batch],
    *,
    gradients: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Numbers:
    """Run a model on data and measure what its norms, residual branches and attentions see.

    Args:
        model: the audited model, on a real device; it is left as it was.
        norms, branches, sites: what the audit found.
        batches: one or more batches.
        gradients: whether to run backward too.
        progress: called with a word on what is being done.

    Raises:
        DataError: the model is on the meta device, or raises on a batch.
    """
    if any(p.is_meta for p in model.parameters()):
        raise DataError("numbers need real weights; the model is on the meta device (use --device cpu)")
    run = Run(norms, branches, sites)
    grads = Gradients(model, norms) if gradients else None
    notes: list[str] = []
    count = 0
    for batch in batches:
        progress(f"measuring batch {count}")
        args, kwargs = arguments(batch)
        watch = run.watch()
        recorded = trace(model, args, kwargs, watch)
        if recorded.error is not None:
            raise DataError(f"batch {count}: the model raised {described(recorded.error)}")
        if watch.missed:
            notes.append(f"batch {count}: {len(watch.missed)} of the audited places were not reached")
        if grads is not None:
            grads.run(args, kwargs)
        count += 1
    if grads is not None and grads.note:
        notes.append(grads.note)
    return Numbers(
        norms=tuple(run.norm_numbers(norm, model, grads) for norm in norms),
        branches=run.branch_numbers(),
        attentions=run.attention_numbers(),
        batches=count,
        gradient_of=grads.source if grads is not None else None,
        notes=tuple(notes),
    )


class HasRms(Protocol):
    """What knows the gradient at each norm's input."""

    def rms(self, norm: NormRecord) -> float | None:
        """Its RMS; None where none was seen."""


class Run:
    """The sums of all batches."""

    def __init__(self, norms: Sequence[NormRecord], branches: Sequence[BranchRecord], sites: Sites) -> None:
        self.branches = branches
        self.sites = sites
        self.inputs = {n.name: Values(_channel_dim(n)) for n in norms}
        self.outputs = {n.name: Values() for n in norms}
        self.adds = [(Values(), Values()) for _ in sites.branches]
        self.logits = [0.0 for _ in sites.attentions]

    def watch(self) -> Watch:
        """Callbacks for one run that add to the sums."""
        watch = Watch()
        for norm in self.sites.norms:
            for given, made in norm.calls:
                for point, sums in ((given, self.inputs[norm.name]), (made, self.outputs[norm.name])):
                    if point is not None:
                        watch.value(point, sums.add)
        for index, site in enumerate(self.sites.branches):
            if site is not None:
                watch.operator(site.spot, partial(self._added, index, site))
        for index, attention in enumerate(self.sites.attentions):
            if attention.logits is not None:
                watch.value(attention.logits, partial(self._logits, index))
            elif attention.spot is not None:
                watch.operator(attention.spot, partial(self._attended, index))
        return watch

    def _added(self, index: int, site: BranchSite, seen: Seen, outputs: list[Tensor]) -> None:
        identity, addend = seen.inputs[site.identity], seen.inputs[site.addend]
        if seen.op._schema.name.split("::")[1].rstrip("_") not in ("add", "sub"):
            addend = outputs[0].double() - identity.double()  # lerp, addcmul, index_add: what was really added
        factor = seen.kwargs.get("alpha", 1)
        before, added = self.adds[index]
        before.add(identity)
        added.add(addend if factor == 1 else addend * factor)

    def _logits(self, index: int, products: Tensor) -> None:
        finite = products.detach()[products.isfinite()]
        if finite.numel():
            self.logits[index] = max(self.logits[index], finite.abs().max().item())

    def _attended(self, index: int, seen: Seen, outputs: list[Tensor]) -> None:
        names = [a.name for a in seen.op._schema.arguments]
        given = dict(zip(names, seen.args, strict=False)) | seen.kwargs
        mask = given.get("attn_mask", given.get("attn_bias"))
        found = largest_logit(
            seen.inputs[0],
            seen.inputs[1],
            scale=given.get("scale"),
            causal=bool(given.get("is_causal")),
            mask=mask if isinstance(mask, Tensor) else None,
        )
        self.logits[index] = max(self.logits[index], found)

    def norm_numbers(self, norm: NormRecord, model: nn.Module, grads: HasRms | None) -> NormNumbers:
        """The record of one norm."""
        seen = self.inputs[norm.name]
        ratio, outliers = seen.outliers()
        mean, var = seen.mean_and_var()
        return NormNumbers(
            name=norm.name,
            input_rms=seen.rms,
            input_max=seen.max,
            output_rms=self.outputs[norm.name].rms,
            nonfinite=seen.nonfinite,
            outlier_ratio=ratio,
            outlier_channels=outliers,
            gain=gain_numbers(effective_gain(norm, model)),
            gradient_rms=grads.rms(norm) if grads is not None else None,
            channel_mean=mean,
            channel_var=var,
        )

    def branch_numbers(self) -> tuple[BranchNumbers, ...]:
        """The records of all branches whose adds were seen."""
        found: list[BranchNumbers] = []
        depth: dict[int, int] = {}
        for branch, (before, added) in zip(self.branches, self.adds, strict=True):
            level = depth[branch.stream] = depth.get(branch.stream, -1) + 1
            if before.count == 0:
                continue
            total = before.rms + added.rms
            found.append(
                BranchNumbers(
                    name=branch.name,
                    stream=branch.stream,
                    depth=level,
                    stream_rms=before.rms,
                    branch_rms=added.rms,
                    share=added.rms / total if total else 0.0,
                )
            )
        return tuple(found)

    def attention_numbers(self) -> tuple[AttentionNumbers, ...]:
        """One record for each module that attends."""
        found: dict[str, AttentionNumbers] = {}
        for site, largest in zip(self.sites.attentions, self.logits, strict=True):
            before = found.get(site.name)
            largest = max(largest, before.logit_max) if before else largest
            qk_norm = site.qk_norm or (before is not None and before.qk_norm)
            found[site.name] = AttentionNumbers(name=site.name, logit_max=largest, qk_norm=qk_norm)
        return tuple(found.values())


def _channel_dim(norm: NormRecord) -> int:
    if norm.spec is None or not isinstance(norm.spec.channel_dim, int):
        return -1
    return norm.spec.channel_dim
