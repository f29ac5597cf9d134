"""recalibrate: the running statistics of batch norms, computed again over given data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normkit.audit.find import Occurrence, find_norms
from normkit.audit.trace import Trace, trace
from normkit.convert.edit import Editor
from normkit.convert.receipt import Change, ConversionError, Difference, Errors, Receipt, Refusal, deviations
from normkit.errors import message

Method = Literal["sequential", "batches"]
Forward = Callable[[nn.Module, Any], Any]


def recalibrate(
    model: nn.Module, data: Iterable[Any], *, method: Method = "sequential", forward: Forward | None = None
) -> Receipt:
    r"""Compute the running statistics of every batch norm again, exactly, over given data (precise statistics)::

        mean = sum x / n,   var = sum (x - mean)^2 / (n - 1)         over all batches together, merged in float64 (Chan)

    Weights, momentum, ``num_batches_tracked``, training flags and the random state stay as they are.

    Args:
        model: any module; its running statistics are changed in place.
        data: batches: a tensor, a tuple or list of arguments, or a dict of keywords each. It is gone through several
            times, so no generator.
        method: ``"sequential"``: the model runs in eval mode, and a norm that follows others is measured after they
            have their new statistics: its statistics are then those of what it will see in evaluation (one training
            batch of all the data gives the same, but for the biased variance that training divides by). One pass for
            each norm on the longest path. ``"batches"``: one pass in which every norm divides by its batch's own
            statistics (Wu and Johnson 2021).
        forward: how a batch is run, ``forward(model, batch)``; by default the batch is the model's arguments.

    Returns:
        A receipt: for each norm by how much its statistics moved; how far the outputs on the first batch moved.
        ``undo()`` restores every bit.

    Raises:
        ConversionError: there are no batches, a norm sees one value per channel or one that is not finite, or the
            model raises; nothing is changed.
        TypeError, ValueError: an argument of another kind.

    Source: Wu and Johnson 2021, arXiv:2105.07576, section 3.
    """
    _check(model, data, method)
    run = forward or _forward
    first = next((batch for batch in data if _holds_values(batch)), None)
    if first is None:
        raise ConversionError("data holds no batch with values in it: there is nothing to measure")
    editor = Editor(model)
    with _modes(model):
        sites, refused = _sites(model, first, run)
        if not sites:
            return Receipt(
                conversion="recalibrate", model=type(model).__name__, refused=tuple(refused), revert=lambda: None
            )
        before = _outputs(model, first, run)
        try:
            passes = _passes(sites) if method == "sequential" else [sites]
            moved = [m for level in passes for m in _pass(editor, level, sites, data, run, method)]
            after = _outputs(model, first, run)
        except BaseException:
            editor.revert()
            raise
    reached = {c.name for c in moved}
    refused += [Refusal(s.name, "no batch reached it") for s in sites if s.name not in reached]
    return Receipt(
        conversion="recalibrate",
        model=type(model).__name__,
        changed=tuple(moved),
        refused=tuple(refused),
        errors=Errors(original=Difference(outputs=deviations(after, before))),
        notes=(f"outputs change: that is the purpose; {len(passes)} passes over the data",),
        revert=editor.revert,
    )


@dataclass
class Pooled:
    """Count, mean and sum of squared deviations of each channel, over all that was added."""

    count: int = 0
    mean: Tensor | None = None
    squares: Tensor | None = None

    def add(self, x: Tensor, channel_dim: int) -> None:
        """Merge a batch in (Chan et al. 1983), in float64."""
        rows = x.detach().double().movedim(channel_dim, -1).flatten(0, -2)
        count = rows.shape[0]
        if count == 0:
            return
        mean = rows.mean(0)
        centred = rows - mean
        squares = centred.square().sum(0) - centred.sum(0).square() / count
        if self.mean is None or self.squares is None:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total = self.count + count
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self.squares = self.squares + squares + delta.square() * (self.count * count / total)
        self.count = total


@dataclass(frozen=True)
class _Site:
    name: str
    module: nn.Module
    input: int | str
    channel_dim: int
    mean: str
    var: str
    level: int


def _check(model: object, data: object, method: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if not isinstance(data, Iterable):
        raise TypeError(f"data must be an iterable of batches; got {type(data).__name__}")
    if isinstance(data, Tensor):
        raise TypeError("data must be an iterable of batches; got one tensor: put it into a list")
    if isinstance(data, Iterator):
        raise TypeError("data must be iterable several times; got an iterator: give a list or a DataLoader")
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(map(repr, get_args(Method)))}; got {method!r}")


def _holds_values(batch: Any) -> bool:
    """Whether no tensor in a batch is empty: a model's norms show nothing on one that is."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return all(t.numel() > 0 for t in leaves if isinstance(t, Tensor))


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextlib.contextmanager
def _modes(model: nn.Module) -> Generator[None]:
    """Eval mode, no gradients; flags and random state as before at the end."""
    flags = [(module, module.training) for module in model.modules()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            model.eval()
            yield
        finally:
            for module, flag in flags:
                module.training = flag


class _Caller(nn.Module):
    """The model as one that takes a batch, for tracing."""

    def __init__(self, model: nn.Module, run: Forward) -> None:
        super().__init__()
        self.model = model
        self.run = run
        self.training = False

    def forward(self, batch: Any) -> Any:
        return self.run(self.model, batch)


def _sites(model: nn.Module, batch: Any, run: Forward) -> tuple[list[_Site], list[Refusal]]:
    """The norms with running statistics, each with its level: how many of them come before it."""
    recorded = trace(_Caller(model, run), (batch,))
    if recorded.error is not None:
        raise _raised(model, recorded.error, "the first batch") from recorded.error
    refused: list[Refusal] = []
    found: list[Occurrence] = []
    for norm in find_norms(recorded):
        spec = norm.identification.spec
        if spec is None or (spec.running is None and not spec.frozen and spec.axes != "batch"):
            continue
        reason = _reason(norm)
        if reason is None:
            found.append(norm)
        else:
            refused.append(Refusal(_name(norm), reason))
    levels = _levels(recorded, found)
    return [_site(norm, levels[norm.name]) for norm in found], refused


def _raised(model: nn.Module, error: BaseException, where: str) -> ConversionError:
    return ConversionError(
        f"{type(model).__name__} raised on {where}: {message(error)}; nothing was changed. A batch "
        "is the model's arguments: if it holds labels too, give forward=lambda model, batch: model(batch[0])"
    )


def _name(norm: Occurrence) -> str:
    return norm.name.removeprefix("model").removeprefix(".")


def _reason(norm: Occurrence) -> str | None:
    found = norm.identification
    assert found.spec is not None
    if found.spec.frozen:
        return "it is frozen: its statistics are meant to stay"
    if found.spec.running is None and not found.spec.frozen:
        return "it keeps no running statistics"
    if norm.module is None:
        return "it is written inline"
    if found.spec.axes != "batch" or found.running_mean is None or found.running_var is None:
        return "its statistics are not of one channel over the batch"
    return None


def _site(norm: Occurrence, level: int) -> _Site:
    found = norm.identification
    assert found.spec is not None and isinstance(found.spec.channel_dim, int) and norm.module is not None
    lead = f"{_name(norm)}." if _name(norm) else ""
    key = 0 if found.input is None else found.input
    return _Site(
        _name(norm), norm.module, key, found.spec.channel_dim, f"{lead}{found.running_mean}",
        f"{lead}{found.running_var}", level,
    )  # fmt: skip


def _levels(recorded: Trace, norms: list[Occurrence]) -> dict[str, int]:
    """How many batch norms lie on the longest path before each."""
    owner = {n: norm.name for norm in norms for call in norm.calls for n in call.nodes}
    depth = [0] * len(recorded.values)
    levels = dict.fromkeys((norm.name for norm in norms), 0)
    for node in recorded.nodes:
        reached = max((depth[v] for v in node.inputs), default=0)
        name = owner.get(node.index)
        if name is not None:
            levels[name] = max(levels[name], reached)
        for value in node.outputs:
            depth[value] = reached
        ends = name is not None and owner.get(node.index + 1) != name
        if ends:
            for value in node.outputs:
                depth[value] = levels[name] + 1  # type: ignore[index]
    return levels


def _passes(sites: list[_Site]) -> list[list[_Site]]:
    levels: dict[int, list[_Site]] = {}
    for site in sites:
        levels.setdefault(site.level, []).append(site)
    return [levels[n] for n in sorted(levels)]


def _pass(
    editor: Editor, wanted: list[_Site], sites: list[_Site], data: Iterable[Any], run: Forward, method: Method
) -> list[Change]:
    """One pass over the data, then the new statistics of some norms."""
    pools = {site.name: Pooled() for site in wanted}
    handles = [site.module.register_forward_pre_hook(_observe(site, pools), with_kwargs=True) for site in wanted]
    kept = [(b, b.detach().clone()) for site in sites for b in site.module.buffers()] if method == "batches" else []
    try:
        for site in sites if method == "batches" else ():
            site.module.training = True
        for number, batch in enumerate(data):
            try:
                run(editor.model, batch)
            except ConversionError:
                raise
            except Exception as error:  # foreign code
                raise _raised(editor.model, error, f"batch {number}") from error
    finally:
        for handle in handles:
            handle.remove()
        for site in sites:
            site.module.training = False
        for buffer, value in kept:
            buffer.copy_(value)
    return [_store(editor, site, pools[site.name]) for site in wanted if pools[site.name].count]


def _observe(site: _Site, pools: dict[str, Pooled]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[site.input] if isinstance(site.input, int) else kwargs[site.input]
        others = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t is not x]
        if others:
            raise ConversionError(f"{site.name} is given a mask or a second tensor: its statistics are not measured")
        pools[site.name].add(x, site.channel_dim)

    return hook


def _store(editor: Editor, site: _Site, pool: Pooled) -> Change:
    assert pool.mean is not None and pool.squares is not None
    if pool.count < 2:
        raise ConversionError(f"{site.name} saw one value per channel in all: give more data")
    mean, var = pool.mean, pool.squares / (pool.count - 1)
    if not bool(torch.isfinite(mean).all() and torch.isfinite(var).all()):
        raise ConversionError(f"{site.name} saw values that are not finite: look at the data")
    old_mean, old_var = (editor.tensor(n).double().clone() for n in (site.mean, site.var))
    editor.write(site.mean, mean.view_as(old_mean))
    editor.write(site.var, var.view_as(old_var))
    spread = old_var.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    shift = float(((mean.view_as(old_mean) - old_mean).abs() / spread).max())
    ratio = var.view_as(old_var) / old_var.clamp_min(torch.finfo(torch.float32).tiny)
    return Change(
        name=site.name,
        what=(
            f"mean moved by up to {shift:.3g} old standard deviations, variance times {float(ratio.min()):.3g} to "
            f"{float(ratio.max()):.3g} ({pool.count} values a channel)"
        ),
    )


def _outputs(model: nn.Module, batch: Any, run: Forward) -> list[Tensor]:
    return [t.clone() for t in tree_leaves(run(model, batch)) if isinstance(t, Tensor) and t.is_floating_point()]
