"""param_groups: weight decay on matrices, and on no norm, found by behaviour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from normkit.audit.identify import Identification, identify
from normkit.audit.identify.alike import PROJECTIONS, alike

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    offset_gain_decay: float | None = None,
    decay_embeddings: bool = True,
    no_decay: Iterable[nn.Parameter] = (),
) -> list[dict[str, Any]]:
    r"""Parameter groups for an optimizer: weight decay on matrices that belong to no norm.

    A parameter decays if it is a matrix (two or more dims longer than 1), belongs to no module that `identify` finds
    to be a norm, and is no bias. Vectors are not looked at further; a bias of several dims (one row an expert) is known
    by its attribute's name, ``bias`` or ``..._bias``, as torch calls it. That is the one rule by name, since behaviour
    does not tell: a learned table of positions is added to the activations just as a bias is, and by custom decays.
    ``no_decay`` names such a table where it should not.

    So gains and biases of norms do not decay, of whatever class and shape (a gain per head has two dims); nor do biases
    of projections, scalars, and vectors such as layer scales or class tokens. A tied weight appears once, as a matrix.
    Gains that are buffers are no parameters and appear nowhere; nor do parameters that need no gradient.

    Decay pulls a plain gain w towards 0, which turns the norm off, but a gain 1 + w towards 1. Neither decays by
    default; ``offset_gain_decay`` decays the latter.

    Args:
        model: any model; it is not run.
        weight_decay: the decay of the matrices.
        offset_gain_decay: a decay for gains stored with an offset of 1 (Gemma, Nemotron).
        decay_embeddings: whether embedding matrices decay; if not, neither does a head that is tied to one.
        no_decay: further parameters that do not decay, such as tables of positions.

    Returns:
        Groups with ``params``, ``weight_decay``, ``name`` (``"decay"``, ``"no_decay"`` and, if asked for,
        ``"offset_gain"``) and ``names``, the parameters' names; groups without parameters are left out.

    Raises:
        ValueError: a negative decay, or ``no_decay`` with a parameter of another model.
        TypeError: a model that is no module (such as its parameters), a decay that is no number.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not its parameters; got {type(model).__name__}")
    for argument, value in (("weight_decay", weight_decay), ("offset_gain_decay", offset_gain_decay)):
        if value is not None and not isinstance(value, int | float):
            raise TypeError(f"{argument} must be a number; got {type(value).__name__}")
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"{argument} must be >= 0; got {value!r}")
    in_norms: set[int] = set()
    offset_gains: set[int] = set()
    for module, found in norms_of(model):
        in_norms.update(id(p) for p in module.parameters())
        if found.spec is not None and found.spec.weight_offset == 1 and found.weight is not None:
            offset_gains.add(id(module.get_parameter(found.weight)))
    biases, embeddings = _biases(model), _embeddings(model)
    spared = {id(p) for p in no_decay}
    if not spared <= {id(p) for p in model.parameters()}:
        raise ValueError("no_decay holds a tensor that is no parameter of the model")
    groups: dict[str, dict[str, Any]] = {
        "decay": {"weight_decay": weight_decay},
        "no_decay": {"weight_decay": 0.0},
        "offset_gain": {"weight_decay": offset_gain_decay},
    }
    for group in groups.values():
        group |= {"params": [], "names": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        key = id(parameter)
        if key in spared:
            kind = "no_decay"
        elif offset_gain_decay is not None and key in offset_gains:
            kind = "offset_gain"
        elif key in in_norms or key in biases or not _is_matrix(parameter):
            kind = "no_decay"
        else:
            kind = "no_decay" if key in embeddings and not decay_embeddings else "decay"
        groups[kind]["params"].append(parameter)
        groups[kind]["names"].append(name)
    return [{"name": name, **group} for name, group in groups.items() if group["params"]]


def norms_of(model: nn.Module) -> Iterator[tuple[nn.Module, Identification]]:
    """The modules with parameters of their own that behave as norms; equal ones are measured once."""
    known: dict[Any, Identification] = {}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or type(module) in PROJECTIONS:
            continue
        key = alike(module)
        if key not in known:
            known[key] = identify(module)
        if known[key]:
            yield module, known[key]


def _is_matrix(parameter: Tensor) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1


def _biases(model: nn.Module) -> set[int]:
    return {
        id(p)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False)
        if name == "bias" or name.endswith("_bias")
    }


def _embeddings(model: nn.Module) -> set[int]:
    return {id(m.weight) for m in model.modules() if isinstance(m, _EMBEDDINGS)}
