"""Training: what an optimizer, a wrapper or checkpointing does to norms."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from normkit.audit.result import Finding, NormRecord, names
from normkit.audit.rules.registry import Evidence, MakeFinding, rule
from normkit.audit.trace.wrappers import plain_submodule

SMALL_PROCESS_BATCH = 16


@rule("decay-on-gains", "warning", "the optimizer decays gains or biases of norms")
def decay_on_gains(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Decay pulls a plain gain towards 0, which turns the norm off, and a gain 1 + w towards 1. Needs the optimizer."""
    if evidence.optimizer is None:
        return
    decayed = {
        id(p): float(group.get("weight_decay") or 0.0)
        for group in evidence.optimizer.param_groups
        for p in group["params"]
    }
    found = [n for n in evidence.norms if any(decayed.get(i, 0.0) > 0 for i in _trained(evidence, n))]
    if found:
        most = max(decayed[i] for n in found for i in _trained(evidence, n) if i in decayed)
        offset = all(n.spec is not None and n.spec.weight_offset == 1 for n in found)
        yield finding(
            names(found),
            f"has its gain or bias in a parameter group with weight decay {most:g}: decay pulls "
            + ("gains stored less one towards a gain of 1" if offset else "a gain towards 0, which turns the norm off"),
            "give the optimizer normkit.param_groups(model, weight_decay=...), which puts norms in a group without",
        )


def _trained(evidence: Evidence, norm: NormRecord) -> list[int]:
    tensors = [evidence.tensor(norm, role) for role in ("weight", "bias")]
    return [id(t) for t in tensors if isinstance(t, nn.Parameter)]


@rule("frozen-gains", "warning", "gains are frozen, or left out of the optimizer, while what is around them trains")
def frozen_gains(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """A name filter that freezes too much, or an optimizer built before the norms were put in."""
    held = {i for n in evidence.norms for i in _trained(evidence, n)}
    frozen = [n for n in evidence.norms if _frozen(evidence, n) and _neighbours_train(evidence, n, held)]
    if frozen:
        yield finding(
            names(frozen),
            "has requires_grad=False on its gain or bias, while the parameters around it train",
            "set requires_grad_(True) on it, unless it was frozen on purpose",
        )
    if evidence.optimizer is None:
        return
    given = {id(p) for group in evidence.optimizer.param_groups for p in group["params"]}
    if not any(id(p) in given for p in evidence.model.parameters()):
        return  # another model's optimizer
    missed = [
        n for n in evidence.norms
        if not _frozen(evidence, n) and _trained(evidence, n) and not given & {*_trained(evidence, n)}
        and _neighbours_train(evidence, n, held, given)
    ]  # fmt: skip
    if missed:
        yield finding(
            names(missed),
            "needs gradients and is in no parameter group of the optimizer: its gain will never move, while the "
            "parameters around it train",
            "build the optimizer from normkit.param_groups(model, ...), after the last module was put in",
        )


def _frozen(evidence: Evidence, norm: NormRecord) -> bool:
    tensors = [evidence.tensor(norm, role) for role in ("weight", "bias")]
    return any(isinstance(t, nn.Parameter) and not t.requires_grad for t in tensors)


def _neighbours_train(evidence: Evidence, norm: NormRecord, held: set[int], given: set[int] | None = None) -> bool:
    """Whether most parameters that stand beside a norm, and belong to no norm, are trained."""
    parent = norm.name.split("#")[0].rpartition(".")[0]
    while True:
        around = [p for p in plain_submodule(evidence.model, parent).parameters() if id(p) not in held]
        if around or not parent:
            break
        parent = parent.rpartition(".")[0]
    trained = [p.requires_grad and (given is None or id(p) in given) for p in around]
    return 2 * sum(trained) > len(trained)


@rule("unsynchronized-batch-norm", "warning", "each process forms batch statistics of its own small batch")
def unsynchronized_batch_norm(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Under DDP the batch of a BatchNorm is what one process holds, not what the optimizer steps on."""
    model = evidence.model
    if not isinstance(model, nn.parallel.DistributedDataParallel) or not model.training:
        return
    processes = model.process_group.size()
    alone = [
        n for n in evidence.norms
        if n.batch_statistics and n.spec is not None and n.spec.axes == "batch"
        and n.input_shape[0] < SMALL_PROCESS_BATCH and not _synchronized(n.module)
    ]  # fmt: skip
    if processes > 1 and alone:
        size = min(n.input_shape[0] for n in alone)
        yield finding(
            names(alone),
            f"takes its statistics of {size} samples in each of {processes} processes, and does not share them",
            "convert with normkit.nn.convert_sync_batchnorm (or torch.nn.SyncBatchNorm.convert_sync_batchnorm), "
            f"or give each process at least {SMALL_PROCESS_BATCH} samples",
        )


def _synchronized(module: nn.Module | None) -> bool:
    from normkit.nn import SyncBatchNorm

    return isinstance(module, nn.SyncBatchNorm | SyncBatchNorm)


@rule("checkpointed-batch-norm", "warning", "activation checkpointing runs a batch norm twice a step")
def checkpointed_batch_norm(evidence: Evidence, finding: MakeFinding) -> Iterator[Finding]:
    """Each of the two runs moves the running statistics: the momentum is not what it says."""
    moving = {
        n.name for n in evidence.norms if n.batch_statistics and n.spec is not None and n.spec.running is not None
    }
    if not moving or not evidence.model.training:
        return
    where = [name for name in evidence.reruns.recomputed if name in moving]
    if where:
        yield finding(
            where,
            "runs again in the backward pass (activation checkpointing): it moves its running statistics twice a step",
            "leave batch norms out of checkpointed segments, or take momentum 1 - sqrt(1 - momentum) in them",
        )
