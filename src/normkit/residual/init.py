"""init_for: the initialization that belongs to a placement, applied by declared roles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit.placement import Placement, Role, Schedule, Stack, Sublayer, placement, schedule
from normkit.residual.branch import Residual
from normkit.residual.roles import Matrix, Roles, check_roles, roles_of

Base = Literal["xavier_normal", "xavier_uniform", "kaiming_normal", "keep"] | float
"""The distribution before the placement's gain: by its name, as a standard deviation, or ``"keep"`` what is there."""


def init_for(
    wiring: str | Placement | Schedule,
    depth: int | None,
    module: nn.Module,
    *,
    other_depth: int | None = None,
    stack: Stack = "decoder",
    kind: Sublayer | None = None,
    roles: Iterable[Matrix] | None = None,
    base: Base = "xavier_normal",
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    r"""Initialize the matrices of residual branches as a placement's paper prescribes.

    Each matrix with a declared role is drawn with standard deviation ``gain(role) * base(fan_in, fan_out)``: for
    ``xavier_normal`` that is ``gain * sqrt(2 / (fan_in + fan_out))``. The gain is 1 but for:

    - ``deepnorm``: ``beta`` on value, output, ffn_in and ffn_out (``(8N)^(-1/4)`` alone, N layers);
    - ``sub``: ``sqrt(log 2N)`` on the same, cross-attention left out;
    - ``fixup``: ``B^(-1/2)`` on value and ffn_in with B branches, and zero for output and ffn_out.

    Learned factors and scalar biases return to their start; biases of matrices with a role become zero.

    Args:
        wiring: a name, a `normkit.Placement` or a `normkit.placement.Schedule`.
        depth: the number of layers N (ignored for a Placement or a Schedule, which have it in them).
        module: a model that holds `normkit.Residual` branches, each then initialized by its own placement, or one
            sublayer, whose roles are ``roles`` or what its ``matrix_roles()`` declares.
        other_depth, stack, kind: see `normkit.placement`.
        roles: the roles of a sublayer that declares none.
        base: the distribution before the gain; a number is a standard deviation; ``"keep"`` multiplies what is
            there by the gain, as a paper's code does after another initialization.
        generator: for repeatable draws.

    Returns:
        The gain of every matrix, by ``path`` (and the slice of outputs, where a parameter holds several).

    Raises:
        ValueError: an unknown name or base, a missing depth, branches of another placement, roles that are needed
            and not declared.
        TypeError: a module that is none.

    A matrix of several branches (a sublayer used more than once) is initialized once.
    """
    check_base(base)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module; got {type(module).__name__}")
    if isinstance(wiring, str) and depth is not None:
        schedule(wiring, depth, other_depth=other_depth, stack=stack)
    branches = [(name, m) for name, m in module.named_modules() if isinstance(m, Residual)]
    if not branches:
        row = _row(wiring, depth, other_depth, stack, kind)
        found = check_roles(roles, module) if roles is not None else roles_of(module)
        return _apply(row, module, found, "", base, generator)
    if roles is not None:
        raise ValueError("roles= goes with a single sublayer; a Residual declares its own")
    accepted = _accepted(wiring, depth, other_depth, stack)
    gains: dict[str, float] = {}
    done: dict[Any, float] = {}
    for name, branch in branches:
        if branch.placement.name not in accepted:
            raise ValueError(
                f"branch {name!r} has placement {branch.placement.name!r}; init_for was asked for "
                f"{', '.join(sorted(accepted))}"
            )
        if branch.placement.init_gain not in accepted[branch.placement.name]:
            raise ValueError(
                f"branch {name!r} was built with gain {branch.placement.init_gain:.6g}; init_for was asked for "
                f"{' or '.join(f'{g:.6g}' for g in sorted(accepted[branch.placement.name]))}: depth or stack differ"
            )
        gains |= initialize_branch(branch, name, base, generator, done)
    return gains


@torch.no_grad()
def initialize_branch(
    branch: Residual,
    name: str = "",
    base: Base = "xavier_normal",
    generator: torch.Generator | None = None,
    done: dict[Any, float] | None = None,
) -> dict[str, float]:
    """Initialize one branch by its own placement, but for the matrices in ``done``; see `init_for`."""
    prefix = f"{name}." if name else ""
    gains = {}
    for sublayer, roles, path in (
        (branch.sublayer, branch.roles, "sublayer"),
        (branch.parallel, branch.parallel_roles, "parallel"),
    ):
        if sublayer is not None:
            gains |= _apply(branch.placement, sublayer, roles, f"{prefix}{path}.", base, generator, done)
    if branch.branch_scale is not None:
        branch.branch_scale.fill_(branch.placement.branch_scale)
    for bias in (branch.input_bias, branch.output_bias):
        if bias is not None:
            bias.zero_()
    return gains


@torch.no_grad()
def _apply(
    row: Placement,
    sublayer: object,
    roles: Roles,
    prefix: str,
    base: Base,
    generator: torch.Generator | None,
    done: dict[Any, float] | None = None,
) -> dict[str, float]:
    done = {} if done is None else done
    needed = {*row.init_roles, *row.zero_roles}
    if needed and not any(m.role in needed for m in roles):
        raise ValueError(
            f"placement {row.name!r} scales {', '.join(sorted(needed))}, and {type(sublayer).__name__} declares no "
            f"such roles; pass roles= (normkit.residual.attention_roles, mlp_roles, ...)"
        )
    assert isinstance(sublayer, nn.Module) or not roles
    gains = {}
    for matrix in roles:
        assert isinstance(sublayer, nn.Module)
        gain = gain_of(row, matrix.role)
        view = matrix.view(sublayer)
        key = id(sublayer.get_parameter(matrix.path)), matrix.start, matrix.stop
        part = f"[{matrix.start}:{matrix.stop}]" if matrix.stop is not None else ""
        gains[f"{prefix}{matrix.path}{part}"] = gain
        if key in done:
            if done[key] != gain:
                raise ValueError(
                    f"{prefix}{matrix.path} is in several branches, with gains {done[key]:.6g} and {gain:.6g}"
                )
            continue
        done[key] = gain
        if gain == 0:
            view.zero_()
        elif base == "keep":
            view.mul_(gain)
        else:
            _draw(view, gain, base, generator)
        owner = sublayer.get_submodule(matrix.path.rpartition(".")[0])
        bias = getattr(owner, "bias", None)
        if isinstance(bias, Tensor) and base != "keep":
            bias.zero_()
    return gains


def check_base(base: object) -> None:
    """Refuse what is neither the name of a distribution nor a standard deviation."""
    names = ("xavier_normal", "xavier_uniform", "kaiming_normal", "keep")
    number = isinstance(base, int | float) and not isinstance(base, bool) and 0 <= base < math.inf
    if base not in names and not number:
        raise ValueError(f"base must be {', '.join(map(repr, names))} or a standard deviation >= 0; got {base!r}")


def gain_of(row: Placement, role: Role) -> float:
    """The factor that a placement's initialization puts on the matrices of a role."""
    if role in row.zero_roles:
        return 0.0
    return row.init_gain if role in row.init_roles else 1.0


def base_std(fan_in: int, fan_out: int, base: Base) -> float:
    """The standard deviation of a matrix before the placement's gain."""
    if isinstance(base, str):
        if base == "kaiming_normal":
            return math.sqrt(2 / fan_in)
        return math.sqrt(2 / (fan_in + fan_out))
    return float(base)


def _draw(matrix: Tensor, gain: float, base: Base, generator: torch.Generator | None) -> None:
    std = gain * base_std(matrix.shape[1], matrix.shape[0], base)
    if base == "xavier_uniform":
        matrix.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std, generator=generator)
    else:
        matrix.normal_(0.0, std, generator=generator)


def _row(
    wiring: str | Placement | Schedule,
    depth: int | None,
    other_depth: int | None,
    stack: Stack,
    kind: Sublayer | None,
) -> Placement:
    if isinstance(wiring, Placement):
        return wiring
    if isinstance(wiring, Schedule):
        raise ValueError("a Schedule differs by layer: give the sublayer's own Placement, schedule.branch(layer, kind)")
    return placement(wiring, depth=depth, other_depth=other_depth, stack=stack, kind=kind, layer=1)


def _accepted(
    wiring: str | Placement | Schedule, depth: int | None, other_depth: int | None, stack: Stack
) -> dict[str, set[float]]:
    """The placements that branches may have, each with its gains."""
    if isinstance(wiring, Placement):
        return {wiring.name: {wiring.init_gain}}
    kinds: tuple[Sublayer, ...] = ("attention", "cross_attention", "ffn")
    if isinstance(wiring, Schedule):
        rows = [wiring.branch(layer, kind) for layer in range(1, wiring.depth + 1) for kind in kinds]
    elif depth is None:
        rows = [placement(wiring, other_depth=other_depth, stack=stack, layer=1, kind=kind) for kind in kinds]
    else:
        return _accepted(schedule(wiring, depth, other_depth=other_depth, stack=stack), None, None, stack)
    return {name: {row.init_gain for row in rows if row.name == name} for name in {row.name for row in rows}}
