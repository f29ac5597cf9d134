"""Roles: which matrix of a branch does what, declared by whoever knows the sublayer, never read from names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from torch import Tensor, nn

from normkit.placement import WRITES, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """One matrix of a branch: a parameter, or a slice of its outputs, and its role.

    Args:
        path: the parameter's path inside the sublayer, such as ``"q_proj.weight"``.
        role: what the matrix does.
        start, stop: the slice of outputs that it takes up, where one parameter stores several matrices.
        transposed: stored (in, out) instead of (out, in).
    """

    path: str
    role: Role
    start: int = 0
    stop: int | None = None
    transposed: bool = False

    def view(self, sublayer: nn.Module) -> Tensor:
        """The matrix as (out, in), sharing storage with the parameter.

        Raises:
            ValueError: no such parameter, or one that is no matrix of that size.
        """
        try:
            weight = sublayer.get_parameter(self.path)
        except AttributeError as error:
            raise ValueError(
                f"role {self.role!r} names {self.path!r}, which {type(sublayer).__name__} does not have as a parameter"
            ) from error
        if weight.dim() < 2:
            raise ValueError(f"role {self.role!r} needs a matrix; {self.path!r} has shape {tuple(weight.shape)}")
        matrix = weight if weight.dim() == 2 else weight.view(weight.shape[0], -1)
        matrix = matrix.T if self.transposed else matrix
        stop = matrix.shape[0] if self.stop is None else self.stop
        if not 0 <= self.start < stop <= matrix.shape[0]:
            raise ValueError(
                f"role {self.role!r} takes outputs {self.start}:{stop} of {self.path!r}, which has {matrix.shape[0]}"
            )
        return matrix[self.start : stop]

    def under(self, prefix: str) -> Matrix:
        """The same matrix seen from one level further out."""
        return replace(self, path=f"{prefix}.{self.path}")


Roles = tuple[Matrix, ...]


def attention_roles(
    query: str = "q_proj",
    key: str = "k_proj",
    value: str = "v_proj",
    output: str = "o_proj",
    *,
    transposed: bool = False,
) -> Roles:
    """Roles of an attention with four projections; each argument is the module's path inside the sublayer."""
    named: tuple[tuple[Role, str], ...] = (("query", query), ("key", key), ("value", value), ("output", output))
    return tuple(Matrix(path=f"{path}.weight", role=role, transposed=transposed) for role, path in named)


def fused_attention_roles(fused: str, output: str, sizes: Sequence[int], *, transposed: bool = False) -> Roles:
    """Roles of an attention whose queries, keys and values come from one matrix, in that order.

    Args:
        fused: path of the fused projection.
        output: path of the output projection.
        sizes: the number of query, key and value features.
        transposed: stored (in, out), as GPT-2 does.
    """
    if len(sizes) != 3:
        raise ValueError(f"sizes must be the query, key and value features; got {tuple(sizes)}")
    found, start = [], 0
    parts: tuple[Role, ...] = ("query", "key", "value")
    for role, size in zip(parts, sizes, strict=True):
        found.append(Matrix(path=f"{fused}.weight", role=role, start=start, stop=start + size, transposed=transposed))
        start += size
    return (*found, Matrix(path=f"{output}.weight", role="output", transposed=transposed))


def multihead_attention_roles(attention: nn.MultiheadAttention, path: str = "") -> Roles:
    """Roles of `torch.nn.MultiheadAttention`, which fuses its projections where it can."""
    prefix = f"{path}." if path else ""
    output = Matrix(path=f"{prefix}out_proj.weight", role="output")
    parts: tuple[Role, ...] = ("query", "key", "value")
    if attention.in_proj_weight is None:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return (*(Matrix(path=prefix + n, role=r) for n, r in zip(names, parts, strict=True)), output)
    d = attention.embed_dim
    fused = (
        Matrix(path=f"{prefix}in_proj_weight", role=role, start=i * d, stop=(i + 1) * d) for i, role in enumerate(parts)
    )
    return (*fused, output)


def mlp_roles(
    ffn_in: str = "up_proj", ffn_out: str = "down_proj", *, gate: str | None = None, transposed: bool = False
) -> Roles:
    """Roles of a feed-forward layer of two matrices, or three with a gate."""
    named: list[tuple[Role, str]] = [("ffn_in", ffn_in), ("ffn_out", ffn_out)]
    if gate is not None:
        named.insert(1, ("ffn_gate", gate))
    return tuple(Matrix(path=f"{path}.weight", role=role, transposed=transposed) for role, path in named)


def roles_of(sublayer: object) -> Roles:
    """The roles that a sublayer declares through a method ``matrix_roles()``; empty where it declares none."""
    declare = getattr(sublayer, "matrix_roles", None)
    return check_roles(declare(), sublayer) if callable(declare) else ()


def check_roles(roles: Iterable[Matrix], sublayer: object) -> Roles:
    """The roles, once each is seen to name a matrix that the sublayer has.

    Raises:
        TypeError: roles of a sublayer that is no module, or entries that are no `Matrix`.
        ValueError: as `Matrix.view`, or an unknown role.
    """
    found = tuple(roles)
    if found and not isinstance(sublayer, nn.Module):
        raise TypeError(f"roles need a sublayer that is a torch.nn.Module; got {type(sublayer).__name__}")
    for matrix in found:
        if not isinstance(matrix, Matrix):
            raise TypeError(f"roles must hold normkit.residual.Matrix; got {type(matrix).__name__}")
        if matrix.role not in get_args(Role):
            raise ValueError(f"role must be one of {', '.join(map(repr, get_args(Role)))}; got {matrix.role!r}")
        assert isinstance(sublayer, nn.Module)
        matrix.view(sublayer)
    return found


def last_projection(roles: Roles) -> Matrix | None:
    """The matrix that writes the branch's output, where exactly one is declared."""
    found = [m for m in roles if m.role in WRITES]
    return found[0] if len(found) == 1 else None
