"""Residual: one branch of the stream around any sublayer, and stacks of branches whose adds and norms are fused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.functional import as_shape
from normkit.nn import build
from normkit.placement import Placement, Stack, Sublayer, placement
from normkit.residual.roles import Matrix, Roles, check_roles, last_projection, roles_of
from normkit.spec import TORCH_LAYER, NormSpec

MakeNorm = NormSpec | Callable[[int], nn.Module]
"""How a norm is made: a spec, or a function of the number of features."""


class Stream(NamedTuple):
    """The residual stream between two branches."""

    x: Tensor
    """The stream, without ``pending``."""
    pending: Tensor | None = None
    """The last branch's output, not added yet: the next norm adds it in the same pass."""
    second: Tensor | None = None
    """The unnormalized sum that ResiDual keeps beside the stream."""

    def settle(self) -> Tensor:
        """The stream with everything added, in the stream's dtype."""
        return self.x if self.pending is None else add(self.x, self.pending)


def add(x: Tensor, branch: Tensor) -> Tensor:
    """``x + branch``, rounded to x's dtype."""
    return (x + branch).to(x.dtype)


class InnerNorm(nn.Module):
    """A projection with a norm before it; `Residual` puts it in the place of a branch's last projection."""

    def __init__(self, norm: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))


class FusingModule(nn.Module):
    """A module that knows of each of its norms whether it takes the addition, also after one was replaced."""

    def __init__(self, fuse: bool) -> None:
        super().__init__()
        self.fuse = fuse
        self._takes_residual: dict[str, bool] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.endswith("_norm"):
            self._takes_residual[name] = takes_residual(value)

    def fuses(self, name: str) -> bool:
        """Whether add and norm are one call for the norm of that name."""
        return self.fuse and self._takes_residual[name]


class Residual(FusingModule):
    r"""One residual branch around any sublayer, wired by a placement.

    ``y = N_stream(alpha * x + lambda * N_output(F(g * N_input(x))))``, where F may hold N_inner before its last
    projection. A parallel block adds a second branch: ``y = x + F(N(x)) + G(N(x))``.

    Args:
        sublayer: F, any callable whose first argument is the branch input and whose (first) result has its shape.
        placement: a name of `normkit.PLACEMENTS` or `normkit.SCHEDULES`, or a `normkit.Placement`.
        dim: the number of features C.
        norm: the norm of every slot: a `normkit.NormSpec`, or a function of the number of features that makes a
            module. LayerNorm by default.
        parallel: G, a second sublayer that reads the same stream (``placement="parallel"``, or any with an input
            norm and no stream norm); extra arguments go to the first sublayer only.
        shared_norm: whether both branches of a parallel block read one norm (GPT-J, PaLM) or each its own (GPT-NeoX).
        depth, other_depth, layer, stack, kind: what the placement's constants depend on; see `normkit.placement`.
            ``kind`` is the placement's ``sublayer``.
        roles: which matrix of the sublayer does what; by default what its ``matrix_roles()`` declares. Needed by the
            initialization of some placements, and to find the last projection for an inner norm.
        built_in: what the sublayer already has of ``"inner"``, ``"qkv"`` and ``"head_scale"``.
        dropout: on the branch's output.
        drop_path: stochastic depth: the probability that a sample skips the branch (Huang et al. 2016,
            arXiv:1603.09382).
        stream_dtype: the dtype that the stream is kept in; the branch then runs in its own parameters' dtype.
        fuse: whether add and norm are one call where the wiring allows.
        device: where the new parameters live.
        dtype: the new parameters' dtype.

    Shape:
        ``(B, ..., C)`` in and out, ``(B, C, ...)`` with a norm over dim 1. A sublayer that returns a tuple makes the
        branch return ``(y, *rest)``.

    Raises:
        ValueError: an unknown placement, a missing depth, layer or dim, a norm of another width, a slot that the
            sublayer has no place for; at the call, an input of another width or a sublayer that changes the shape.
        TypeError: a sublayer that cannot be called, an integer input.
    """

    def __init__(
        self,
        sublayer: Callable[..., Any],
        placement: str | Placement = "pre",
        dim: int | None = None,
        *,
        norm: MakeNorm | None = None,
        parallel: Callable[..., Any] | None = None,
        shared_norm: bool = True,
        depth: int | None = None,
        other_depth: int | None = None,
        layer: int | None = None,
        stack: Stack = "decoder",
        kind: Sublayer | None = None,
        roles: Iterable[Matrix] | None = None,
        built_in: Collection[str] = (),
        dropout: float = 0.0,
        drop_path: float = 0.0,
        stream_dtype: torch.dtype | None = None,
        fuse: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(fuse)
        for name, value in (("sublayer", sublayer), ("parallel", parallel)):
            if not callable(value) and not (name == "parallel" and value is None):
                raise TypeError(f"{name} must be callable; got {type(value).__name__}")
        for name, value in (("dropout", dropout), ("drop_path", drop_path)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be a probability in [0, 1); got {value!r}")
        self.placement = resolve(placement, depth, other_depth, layer, stack, kind)
        p = self.placement
        if parallel is not None and (not p.input_norm or p.stream_norm or p.output_norm):
            raise ValueError(
                f"parallel= adds two branches that read one stream: it needs an input norm alone (and an inner one), "
                f"which placement {p.name!r} is not; use placement='parallel'"
            )
        self.dim = dim
        self.kind = kind
        self.dropout, self.drop_path = dropout, drop_path
        self.stream_dtype = stream_dtype
        spec = norm if isinstance(norm, NormSpec) else TORCH_LAYER
        self.channel_dim = spec.channel_dim if isinstance(spec.channel_dim, int) else -1
        make = _maker(TORCH_LAYER if norm is None else norm, p.name, device, dtype)

        self.sublayer = sublayer
        self.roles = roles_of(sublayer) if roles is None else check_roles(roles, sublayer)
        self.parallel = parallel
        self.parallel_roles = roles_of(parallel)
        for target in (sublayer, parallel):
            self._fit(target, make, built_in)

        def slot(used: bool) -> nn.Module | None:
            return make(self._width(p)) if used else None

        self.input_norm = slot(p.input_norm)
        self.parallel_norm = slot(parallel is not None and not shared_norm)
        self.output_norm = slot(p.output_norm)
        self.stream_norm = slot(p.stream_norm)

        def learned(used: bool, value: float, size: int = 1) -> nn.Parameter | None:
            return nn.Parameter(torch.full((size,), value, device=device, dtype=dtype)) if used else None

        width = self._width(p) if p.branch_scale_kind == "channel" else 1
        self.branch_scale = learned(p.branch_scale_kind != "fixed", p.branch_scale, width)
        self.input_bias = learned(p.scalar_bias, 0.0)
        self.output_bias = learned(p.scalar_bias, 0.0)

    def _width(self, p: Placement) -> int:
        if self.dim is None or self.dim < 1:
            raise ValueError(f"placement {p.name!r} needs dim, the number of features; got {self.dim!r}")
        return self.dim

    def _fit(self, sublayer: object, make: Callable[[int], nn.Module], built_in: Collection[str]) -> None:
        """Put into the sublayer what the placement wants inside it."""
        unknown = set(built_in) - {"inner", "qkv", "head_scale"}
        if unknown:
            raise ValueError(f"built_in may name 'inner', 'qkv' and 'head_scale'; got {sorted(unknown)}")
        p = self.placement
        wanted = [
            name
            for name, used in (("inner", p.inner_norm), ("qkv", p.qkv_norm), ("head_scale", p.head_scale))
            if used and name not in built_in
        ]
        if sublayer is None or not wanted:
            return
        adapt = getattr(sublayer, "adapt", None)
        if callable(adapt):
            adapt(wanted, make)
        elif wanted == ["inner"]:
            self._wrap_last(sublayer, make)
        else:
            raise ValueError(
                f"placement {p.name!r} wants {', '.join(wanted)} inside {type(sublayer).__name__}, which has no "
                f"adapt() to put it there; if it has them already, say built_in={tuple(wanted)!r}"
            )

    def _wrap_last(self, sublayer: object, make: Callable[[int], nn.Module]) -> None:
        """Put a norm before the last projection, found by its role."""
        roles = self.roles if sublayer is self.sublayer else self.parallel_roles
        last = last_projection(roles)
        if last is None or not isinstance(sublayer, nn.Module):
            raise ValueError(
                f"placement {self.placement.name!r} puts a norm before the last projection of "
                f"{type(sublayer).__name__}: declare it with roles= (one matrix with role 'output' or 'ffn_out'), or "
                f"say built_in=('inner',) if it has one already"
            )
        path = last.path.removesuffix(".weight")
        parent = sublayer.get_submodule(path.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            raise ValueError(
                "torch.nn.MultiheadAttention does not call its output projection as a module, so no norm fits before "
                "it; use normkit.residual.Attention"
            )
        projection = sublayer.get_submodule(path)
        setattr(parent, path.rpartition(".")[2], InnerNorm(make(last.view(sublayer).shape[1]), projection))
        moved = Matrix(path=f"{path}.projection.weight", role=last.role, transposed=last.transposed)
        renamed: Roles = tuple(moved if m is last else m for m in roles)
        if sublayer is self.sublayer:
            self.roles = renamed
        else:
            self.parallel_roles = renamed

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The branch alone; extra arguments go to the sublayer."""
        if self.placement.second_stream:
            raise ValueError(
                f"placement {self.placement.name!r} keeps a second stream: use normkit.residual.ResidualStack or step()"
            )
        stream, rest = self.step(Stream(x), *args, **kwargs)
        y = stream.settle()
        return (y, *rest) if rest else y

    def step(self, stream: Stream, *args: Any, **kwargs: Any) -> tuple[Stream, tuple[Any, ...]]:
        """The branch within a stack: takes and leaves a stream whose last addition may be pending.

        Returns:
            The stream, and what the sublayer returned beside its output.
        """
        p = self.placement
        x, pending, second = stream
        self._check(x)
        if self.stream_dtype is not None and x.dtype != self.stream_dtype:
            x = x.to(self.stream_dtype)
        second = x if p.second_stream and second is None else second
        h, x, pending = self._enter(x, pending)
        branch, rest = self._branch(self.sublayer, h, x, args, kwargs)
        if self.parallel is not None:
            other = h if self.parallel_norm is None else self._narrow(self.parallel_norm(x))
            branch = branch + self._branch(self.parallel, other, x, (), {})[0]
        branch = self._regularize(branch)
        if self.branch_scale is not None:
            branch = branch * self._align(self.branch_scale, branch)
        elif p.branch_scale != 1:
            branch = branch * p.branch_scale
        if second is not None:
            second = add(second, branch)
        identity = x if p.alpha == 1 else x * p.alpha
        if self.stream_norm is None:
            if p.alpha == 1:
                return Stream(x, branch, second), rest
            return Stream(add(identity, branch), None, second), rest
        if identity.dtype == branch.dtype:
            y, _ = add_norm(self.stream_norm, branch, identity, fuse=self.fuses("stream_norm"))
        else:  # the result is the stream, so it keeps the stream's dtype
            y = self.stream_norm(add(identity, branch))
        return Stream(y, None, second), rest

    def _enter(self, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor, None]:
        """(the branch input, the settled stream, nothing pending)."""
        if self.input_norm is None:
            x = x if pending is None else add(x, pending)
            h = x
        elif pending is None:
            h = self.input_norm(x)
        else:
            h, x = add_norm(self.input_norm, pending, x, fuse=self.fuses("input_norm"))
        if self.placement.input_gain != 1:
            h = h * self.placement.input_gain
        if self.input_bias is not None:
            h = h + self.input_bias.to(h.dtype)
        return self._narrow(h), x, None

    def _narrow(self, h: Tensor) -> Tensor:
        """The branch input in the branch's dtype, where the stream is kept in one of its own."""
        if self.stream_dtype is None or not isinstance(self.sublayer, nn.Module):
            return h
        own = next((q.dtype for q in self.sublayer.parameters() if q.is_floating_point()), h.dtype)
        return h.to(own)

    def _branch(
        self, sublayer: Callable[..., Any], h: Tensor, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """F and what follows it on the branch."""
        result = sublayer(h, *args, **kwargs)
        branch, rest = (result[0], tuple(result[1:])) if isinstance(result, tuple) else (result, ())
        if not isinstance(branch, Tensor) or branch.shape != x.shape:
            shape = tuple(branch.shape) if isinstance(branch, Tensor) else type(branch).__name__
            raise ValueError(
                f"the sublayer {type(sublayer).__name__} must keep the shape of its input, {tuple(x.shape)}; "
                f"it returned {shape}"
            )
        if self.output_bias is not None:
            branch = branch + self.output_bias.to(branch.dtype)
        if self.output_norm is not None:
            branch = self.output_norm(branch)
        return branch, rest

    def _regularize(self, branch: Tensor) -> Tensor:
        if self.dropout > 0:
            branch = nn.functional.dropout(branch, self.dropout, self.training)
        if self.drop_path > 0 and self.training:
            kept = torch.rand(branch.shape[0], *[1] * (branch.dim() - 1), device=branch.device) >= self.drop_path
            branch = branch * (kept.to(branch.dtype) / (1 - self.drop_path))
        return branch

    def _align(self, scale: Tensor, x: Tensor) -> Tensor:
        scale = scale.to(x.dtype)
        return scale.reshape(-1, *[1] * (x.dim() - 2)) if self.channel_dim == 1 and scale.numel() > 1 else scale

    def _check(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(f"x must be floating point; got {x.dtype}")
        if self.dim is not None and (x.dim() <= max(self.channel_dim, 0) or x.shape[self.channel_dim] != self.dim):
            raise ValueError(
                f"x has shape {tuple(x.shape)}; dim {self.channel_dim} must have {self.dim} features, as the branch"
            )

    def extra_repr(self) -> str:
        p = self.placement
        shown = [f"placement={p.name!r}", f"slots={p.slots}"]
        shown += [f"alpha={p.alpha:.6g}"] if p.alpha != 1 else []
        shown += [f"input_gain={p.input_gain:.6g}"] if p.input_gain != 1 else []
        return ", ".join(shown)


class ResidualStack(FusingModule):
    """Residual branches in a row, with the pending output of each added inside the next one's norm.

    Args:
        branches: the `Residual` modules, in order.
        final_norm: the norm after the last one, or None.
        fuse: whether the last addition and the final norm are one call.

    Shape:
        as the branches, kept. Every branch gets the same extra arguments; what sublayers return beside their output
        is dropped.

    Raises:
        ValueError: a final norm missing where the placement's second stream needs it.
    """

    def __init__(self, branches: Iterable[Residual], final_norm: nn.Module | None = None, *, fuse: bool = True) -> None:
        super().__init__(fuse)
        self.branches = nn.ModuleList(branches)
        self.final_norm = final_norm

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        stream = Stream(x)
        for branch in self.branches:
            assert isinstance(branch, Residual)
            stream, _ = branch.step(stream, *args, **kwargs)
        return finish(stream, self.final_norm, fuse=self.fuses("final_norm"))


def finish(stream: Stream, final_norm: nn.Module | None, *, fuse: bool) -> Tensor:
    """The end of a stack: the last addition and the final norm; ResiDual adds the norm of its second stream instead.

    ``N(x + pending)``, or with a second stream ``x + N(second)``.
    """
    if stream.second is not None:
        if final_norm is None:
            raise ValueError("a second stream ends in a norm that is added to the first: give final_norm")
        return add(stream.settle(), final_norm(stream.second))
    if final_norm is None:
        return stream.settle()
    if stream.pending is None:
        return final_norm(stream.x)
    return add_norm(final_norm, stream.pending, stream.x, fuse=fuse)[0]


def add_norm(norm: nn.Module, branch: Tensor, stream: Tensor, *, fuse: bool) -> tuple[Tensor, Tensor]:
    """(norm of the sum in the branch's dtype, the sum in the stream's dtype), in one call if ``fuse``."""
    if fuse:
        return norm(branch, residual=stream)
    total = add(stream, branch)
    y = norm(total)
    return (y.to(branch.dtype) if y.dtype == total.dtype else y), total


def takes_residual(norm: object) -> bool:
    """Whether a norm has the addition built in (``residual=``)."""
    if not isinstance(norm, nn.Module) or getattr(norm, "running_mean", None) is not None:
        return False
    return "residual" in inspect.signature(norm.forward).parameters


def resolve(
    wiring: str | Placement,
    depth: int | None,
    other_depth: int | None,
    layer: int | None,
    stack: Stack,
    kind: Sublayer | None,
) -> Placement:
    """The placement itself, or the named one with its constants."""
    if isinstance(wiring, Placement):
        return wiring
    return placement(wiring, depth=depth, other_depth=other_depth, layer=layer, stack=stack, sublayer=kind)


def _maker(
    norm: MakeNorm, name: str, device: torch.device | str | None, dtype: torch.dtype | None
) -> Callable[[int], nn.Module]:
    """A function that makes the norm of a width, and refuses a module of another."""
    if isinstance(norm, NormSpec):
        spec = norm
        return lambda features: build(spec, features, device=device, dtype=dtype)
    if not callable(norm) or isinstance(norm, nn.Module):
        raise TypeError(
            f"norm must be a NormSpec or a function of the number of features; got {type(norm).__name__}. "
            f"Slots of placement {name!r} need a norm each"
        )
    make = norm

    def checked(features: int) -> nn.Module:
        made = make(features)
        width: Any = getattr(made, "normalized_shape", getattr(made, "features", None))
        if width is not None and as_shape(width) != (features,):
            raise ValueError(f"norm= made a norm over {as_shape(width)}; placement {name!r} needs ({features},) here")
        return made

    return checked
