"""Residual: one branch of the stream around any sublayer, and stacks of branches whose adds and norms are fused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normkit.functional import as_shape
from normkit.nn import build
from normkit.placement import Placement, Stack, Sublayer, placement
from normkit.residual.roles import Matrix, Roles, check_roles, last_projection, roles_of
from normkit.residual.stream import FusingModule, Stream, add, add_norm, finish
from normkit.spec import TORCH_LAYER, NormSpec

MakeNorm = NormSpec | Callable[[int], nn.Module]
"""How a norm is made: a spec, or a function of the number of features."""


class InnerNorm(nn.Module):
    """A projection with a norm before it; `Residual` puts it in the place of a branch's last projection."""

    def __init__(self, norm: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))


class Residual(FusingModule):
    r"""One residual branch around any sublayer, wired by a placement.

    ``y = N_stream(alpha * x + lambda * N_output(F(g * N_input(x))))``, where F may hold N_inner before its last
    projection. A parallel block adds a second branch: ``y = x + F(N(x)) + G(N(x))``.

    Args:
        sublayer: F, any callable whose first argument is the branch input and whose (first) result has its shape.
            Two methods that it may have are called: ``matrix_roles()``, which declares what each matrix does, and
            ``adapt(wanted, make_norm)``, which puts in what a placement wants inside: of ``"inner"`` (a norm before
            the last projection), ``"qkv"`` (norms of queries, keys and values within each head) and ``"head_scale"``
            (a learned factor on each head's output) those that are named in ``wanted``.
        placement: a name of `normkit.PLACEMENTS` or `normkit.SCHEDULES`, or a `normkit.Placement`.
        dim: the number of features C.
        norm: the norm of every slot: a `normkit.NormSpec`, or a function of the number of features that makes a
            module, such as `torch.nn.LayerNorm`. LayerNorm by default.
        channel_dim: which dim of the stream has the features; the spec's by default, else the last.
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
        stream_dtype: the dtype that the stream is kept in, such as float32 around a bfloat16 sublayer; the branch then
            runs in its own parameters' dtype. The norms' gains have ``dtype``, torch's default where it is not given.
        fuse: whether add and norm are one call where the wiring allows.
        device: where the new parameters live.
        dtype: the new parameters' dtype.

    Shape:
        ``(B, ..., C)`` in and out, ``(B, C, ...)`` with a norm over dim 1. A sublayer that returns a tuple makes the
        branch return ``(y, *rest)``. Between branches the stream may be a `normkit.residual.Stream`, whose last
    addition is still to be made: `step` takes and leaves one.

    Raises:
        ValueError: an unknown placement, a missing depth, layer or dim, a norm of another width, a slot that the
            sublayer has no place for; at the call, an input of another width, a sublayer that changes the shape, or
            one that writes into its input where that is the stream itself.
        TypeError: a sublayer that cannot be called, a class instead of an instance, an integer input.
    """

    def __init__(
        self,
        sublayer: Callable[..., Any],
        placement: str | Placement = "pre",
        dim: int | None = None,
        *,
        norm: MakeNorm | None = None,
        channel_dim: int | None = None,
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
            if isinstance(value, type) and issubclass(value, nn.Module):
                raise TypeError(f"{name} must be an instance, not the class: {value.__name__}(...)")
        for name, value in (("dropout", dropout), ("drop_path", drop_path)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be a probability in [0, 1); got {value!r}")
        if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool) or dim < 1):
            raise ValueError(f"dim must be an integer >= 1; got {dim!r}")
        if stream_dtype is not None and not stream_dtype.is_floating_point:
            raise ValueError(f"stream_dtype must be floating point; got {stream_dtype}")
        self.placement = resolve(placement, depth, other_depth, layer, stack, kind)
        p = self.placement
        asked = placement if isinstance(placement, str) else p.name
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
        if channel_dim is None:
            channel_dim = spec.channel_dim if isinstance(spec.channel_dim, int) else -1
        self.channel_dim = channel_dim
        make = _maker(TORCH_LAYER if norm is None else norm, p.name, device, dtype)

        self.sublayer = sublayer
        self.roles = (
            roles_of(sublayer) if roles is None else check_roles(_behind_inner_norms(roles, sublayer), sublayer)
        )
        self.parallel = parallel
        self.parallel_roles = roles_of(parallel)
        for target in (sublayer, parallel):
            self._fit(target, make, built_in, asked)

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
        if self.dim is None:
            raise ValueError(f"placement {p.name!r} needs dim, the number of features")
        return self.dim

    def _fit(self, sublayer: object, make: Callable[[int], nn.Module], built_in: Collection[str], asked: str) -> None:
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
                f"placement {asked!r} wants {', '.join(wanted)} inside {type(sublayer).__name__}, which has no "
                f"adapt(wanted, make_norm) to put it there; if it has them already, say built_in={tuple(wanted)!r}"
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
        if isinstance(parent, InnerNorm):
            return  # the sublayer is in another branch too, which put the norm in
        projection = sublayer.get_submodule(path)
        setattr(parent, path.rpartition(".")[2], InnerNorm(make(last.view(sublayer).shape[1]), projection))
        moved = Matrix(path=f"{path}.projection.weight", role=last.role, transposed=last.transposed)
        renamed: Roles = tuple(moved if m is last else m for m in roles)
        if sublayer is self.sublayer:
            self.roles = renamed
        else:
            self.parallel_roles = renamed

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "sublayer":
            self.keywords = keywords_of(value)

    def forward(self, x: Tensor | Stream, *args: Any, **kwargs: Any) -> Any:
        """The branch alone; extra arguments go to the sublayer. A `Stream` is answered as by `step`."""
        if isinstance(x, Stream):
            return self._step(x, args, kwargs)
        if self.placement.second_stream:
            raise ValueError(
                f"placement {self.placement.name!r} keeps a second stream: use normkit.residual.ResidualStack or step()"
            )
        stream, rest = self._step(Stream(x), args, kwargs)
        y = stream.settle()
        return (y, *rest) if rest else y

    def step(self, stream: Stream, *args: Any, **kwargs: Any) -> tuple[Stream, tuple[Any, ...]]:
        """The branch within a stack: takes and leaves a stream whose last addition may be pending.

        Returns:
            The stream, and what the sublayer returned beside its output.
        """
        return self(stream, *args, **kwargs)

    def _step(self, stream: Stream, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Stream, tuple[Any, ...]]:
        p = self.placement
        x, pending, second = stream
        self._check(x)
        if self.stream_dtype is not None and x.dtype != self.stream_dtype:
            x = x.to(self.stream_dtype)
        second = x if p.second_stream and second is None else second
        h, x, pending = self._enter(x, pending)
        versions = _version(x), _version(h)
        branch, rest = self._branch(self.sublayer, h, x, args, kwargs)
        if _version(x) != versions[0]:
            raise ValueError(
                f"{type(self.sublayer).__name__} changed its input in place, which is also the residual stream: "
                f"let it work on a copy (for example relu(x) instead of relu_(x))"
            )
        if self.parallel is not None:
            if self.parallel_norm is None and _version(h) != versions[1]:
                raise ValueError(
                    f"{type(self.sublayer).__name__} changed its input in place, which the parallel sublayer reads too"
                )
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
        branch, rest = (result[0], tuple(result[1:])) if isinstance(result, tuple) and result else (result, ())
        name = f"the sublayer {type(sublayer).__name__}"
        if not isinstance(branch, Tensor):
            got = "an empty tuple" if branch == () else type(branch).__name__
            raise ValueError(
                f"{name} must return a tensor of the shape of its input, {tuple(x.shape)}, or a tuple that starts with "
                f"it; it returned {got}"
            )
        if branch.shape != x.shape:
            raise ValueError(
                f"{name} must keep the shape of its input, {tuple(x.shape)}; it returned {tuple(branch.shape)}"
            )
        if not branch.is_floating_point():
            raise ValueError(f"{name} must return a floating point tensor; it returned {branch.dtype}")
        if branch.device != x.device:
            raise ValueError(f"{name} returned a tensor on {branch.device}; its input is on {x.device}")
        if self.output_bias is not None:
            branch = branch + self.output_bias.to(branch.dtype)
        if self.output_norm is not None:
            branch = self.output_norm(branch)
        return branch, rest

    def _regularize(self, branch: Tensor) -> Tensor:
        if self.dropout > 0:
            branch = nn.functional.dropout(branch, self.dropout, self.training)
        if self.drop_path > 0 and self.training:
            samples = branch.shape[:1] if branch.dim() > 1 else ()  # a state without a batch is one sample
            kept = torch.rand(*samples, *[1] * (branch.dim() - len(samples)), device=branch.device) >= self.drop_path
            branch = branch * (kept.to(branch.dtype) / (1 - self.drop_path))
        return branch

    def _align(self, scale: Tensor, x: Tensor) -> Tensor:
        scale = scale.to(x.dtype)
        behind = x.dim() - 1 - self.channel_dim % x.dim() if scale.numel() > 1 else 0
        return scale.reshape(-1, *[1] * behind) if behind else scale

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a floating point tensor; got {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"x must be floating point; got {x.dtype}")
        if self.dim is not None and (
            x.dim() <= (d if (d := self.channel_dim) >= 0 else -d - 1) or x.shape[self.channel_dim] != self.dim
        ):
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
        as the branches, kept. Extra positional arguments go to every sublayer, keywords to those whose signature has
        them (a mask to attention and not to a feed-forward layer). What sublayers return beside their output is
        dropped; `Residual.step` gives it.

    Raises:
        ValueError: a final norm missing where the placement's second stream needs it.
        TypeError: a keyword that no sublayer takes, an entry that is no `Residual`.
    """

    def __init__(self, branches: Iterable[Residual], final_norm: nn.Module | None = None, *, fuse: bool = True) -> None:
        super().__init__(fuse)
        found = list(branches)
        for branch in found:
            if not isinstance(branch, Residual):
                raise TypeError(f"branches must hold normkit.Residual; got {type(branch).__name__}")
        self.branches = nn.ModuleList(found)
        self.final_norm = final_norm

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        stream = Stream(x)
        left = set(kwargs)
        for branch in self.branches:
            assert isinstance(branch, Residual)
            taken = {k: v for k, v in kwargs.items() if branch.keywords is None or k in branch.keywords}
            left -= taken.keys()
            stream, _ = branch.step(stream, *args, **taken)
        if left:
            known = sorted({k for b in self.branches if isinstance(b, Residual) for k in b.keywords or ()})
            raise TypeError(
                f"no sublayer of this stack takes {', '.join(sorted(left))}; their keywords are {', '.join(known)}"
            )
        return finish(stream, self.final_norm, fuse=self.fuses("final_norm"))


def keywords_of(sublayer: Callable[..., Any]) -> tuple[str, ...] | None:
    """The keywords that a sublayer takes beside its input; None where it takes any, or does not tell."""
    try:
        signature = inspect.signature(sublayer.forward if isinstance(sublayer, nn.Module) else sublayer)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _version(x: Tensor) -> int:
    """How often a tensor was written into, where torch counts."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def _behind_inner_norms(roles: Iterable[Matrix], sublayer: object) -> list[Matrix]:
    """Roles with the paths of projections that another branch of the same sublayer has moved behind a norm."""
    found = list(roles)
    for n, matrix in enumerate(found):
        if isinstance(matrix, Matrix) and isinstance(sublayer, nn.Module):
            path = matrix.path.removesuffix(".weight")
            if isinstance(dict(sublayer.named_modules()).get(path), InnerNorm):
                found[n] = replace(matrix, path=f"{path}.projection.weight")
    return found


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
    return placement(wiring, depth=depth, other_depth=other_depth, layer=layer, stack=stack, kind=kind)


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
        width: Any = next(
            (
                getattr(made, n)
                for n in ("normalized_shape", "features", "num_features", "num_channels")
                if hasattr(made, n)
            ),
            None,
        )
        if width is not None and as_shape(width) != (features,):
            raise ValueError(f"norm= made a norm over {as_shape(width)}; placement {name!r} needs ({features},) here")
        return made

    return checked
