"""What advice is asked for, and which requests contradict themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from normkit.placement import known, schedule
from normkit.spec import NAMED, NormSpec

Architecture = Literal["decoder", "encoder", "encoder_decoder", "vit", "cnn", "rnn"]
Task = Literal["pretrain", "finetune", "classify", "detect", "style", "diffusion"]
DType = Literal["float64", "float32", "bfloat16", "float16"]
Hardware = Literal["cpu", "cuda"]
Norm = Literal["layer", "rms", "batch", "group", "instance"]

TRANSFORMERS: tuple[Architecture, ...] = ("decoder", "encoder", "encoder_decoder", "vit")
IMAGE_TASKS: tuple[Task, ...] = ("detect", "style", "diffusion")
DEEP_WITHOUT_WARM_UP = 6
"""Post-norm stacks from so many layers on are refused without warm-up (the 6 layers of Vaswani et al. had one)."""


class Refused(ValueError):
    """The request contradicts itself or cannot be met; the message says why, and what could be asked instead."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A situation to advise on.

    Args:
        architecture: ``decoder`` (a causal language model), ``encoder``, ``encoder_decoder``, ``vit``, ``cnn`` or
            ``rnn``.
        task: what it is trained for.
        depth: layers or blocks.
        width: channels or features C.
        batch: samples on one device at a time.
        devices: processes that train together.
        dtype: what activations are held in.
        hardware: where it runs.
        variable_length: samples of different length are padded.
        streaming: inference takes one position or one sample at a time.
        high_learning_rate: the rate is to be as high as stays stable.
        no_warm_up: the learning rate cannot be warmed up.
        norm: a kind that is asked for.
        placement: a placement that is asked for, a key of `normkit.PLACEMENTS` or `normkit.SCHEDULES`.
        checkpoint: the convention of existing weights, a key of `normkit.spec.NAMED`.
        checkpoint_placement: the placement of existing weights.

    Raises:
        ValueError: a field outside its domain.
        Refused: fields that contradict one another.
    """

    architecture: Architecture
    task: Task = "pretrain"
    depth: int = 12
    width: int = 256
    batch: int = 32
    devices: int = 1
    dtype: DType = "float32"
    hardware: Hardware = "cpu"
    variable_length: bool = False
    streaming: bool = False
    high_learning_rate: bool = False
    no_warm_up: bool = False
    norm: Norm | None = None
    placement: str | None = None
    checkpoint: str | None = None
    checkpoint_placement: str | None = None

    def __post_init__(self) -> None:
        self._check_domains()
        for broken, reason in _CONTRADICTIONS:
            if broken(self):
                raise Refused(reason(self))

    def _check_domains(self) -> None:
        choices: dict[str, Any] = {
            "architecture": get_args(Architecture), "task": get_args(Task), "dtype": get_args(DType),
            "hardware": get_args(Hardware), "norm": (None, *get_args(Norm)), "placement": (None, *known()),
            "checkpoint": (None, *NAMED), "checkpoint_placement": (None, *known()),
        }  # fmt: skip
        for name, accepted in choices.items():
            value = getattr(self, name)
            if value not in accepted:
                listed = ", ".join(str(a) for a in accepted if a is not None)
                raise ValueError(f"{name} must be one of {listed}; got {value!r}")
        for name in ("depth", "width", "batch", "devices"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1; got {value!r}")

    @property
    def is_transformer(self) -> bool:
        """Whether it is a stack of attention and feed-forward layers."""
        return self.architecture in TRANSFORMERS

    @property
    def stored(self) -> NormSpec | None:
        """The spec of existing weights."""
        return None if self.checkpoint is None else NAMED[self.checkpoint]


def _kind_of(r: Request) -> str | None:
    return None if r.stored is None else r.stored.kind


_CONTRADICTIONS = [
    (
        lambda r: r.checkpoint_placement is not None and r.placement not in (None, r.checkpoint_placement),
        lambda r: f"placement={r.placement!r} with weights trained as {r.checkpoint_placement!r}: an existing "
        "checkpoint fixes its placement; drop placement, or train from scratch",
    ),
    (
        lambda r: r.checkpoint is not None and r.norm not in (None, _kind_of(r)),
        lambda r: f"norm={r.norm!r} with {r.checkpoint!r} weights, whose norm is {_kind_of(r)}: an existing checkpoint "
        "fixes its norm; drop norm, or convert the weights first (normkit convert says what can be)",
    ),
    (
        lambda r: r.norm == "batch" and r.batch * r.devices == 1,
        lambda r: "norm='batch' with one sample: the variance over the batch of one sample says nothing of the data; "
        "take group (images) or layer (tokens), or a larger batch",
    ),
    (
        lambda r: r.norm == "batch" and r.architecture in ("decoder", "encoder_decoder"),
        lambda r: "norm='batch' in a decoder: statistics over a batch's positions see the future in training and a "
        "single position at inference; take rms or layer",
    ),
    (
        lambda r: r.task in IMAGE_TASKS and r.architecture not in ("cnn", "vit"),
        lambda r: f"task={r.task!r} is about images, but architecture={r.architecture!r} is not; take cnn or vit",
    ),
    (
        lambda r: r.task == "style" and r.architecture == "vit",
        lambda r: "task='style' rests on statistics of feature maps over space, which tokens of a vit do not keep; "
        "take cnn",
    ),
    (
        lambda r: r.norm in ("group", "instance") and r.architecture != "cnn",
        lambda r: f"norm={r.norm!r} takes its statistics over space, which architecture={r.architecture!r} does not "
        "have; take layer or rms",
    ),
    (
        lambda r: r.norm == "batch" and r.architecture == "rnn",
        lambda r: "norm='batch' inside a recurrent cell needs statistics of its own for every step, and lengths "
        "differ; take layer",
    ),
    (
        lambda r: r.placement is not None and not r.is_transformer,
        lambda r: f"placement={r.placement!r} is about the residual branches of transformers; architecture="
        f"{r.architecture!r} has none of these",
    ),
    (
        lambda r: r.checkpoint_placement is not None and not r.is_transformer,
        lambda r: f"checkpoint_placement={r.checkpoint_placement!r} is about transformers; architecture="
        f"{r.architecture!r} is none",
    ),
    (
        lambda r: r.task == "finetune" and r.checkpoint is None,
        lambda r: "task='finetune' without checkpoint: existing weights fix the norm; name their convention "
        f"({', '.join(NAMED)})",
    ),
    (
        lambda r: r.checkpoint is not None and r.checkpoint_placement is None and r.is_transformer and _fits(r),
        lambda r: f"checkpoint={r.checkpoint!r} without checkpoint_placement: an existing checkpoint fixes its "
        "placement; name it (normkit audit shows a model's)",
    ),
    (
        lambda r: r.norm is not None and r.placement is not None and r.is_transformer and not _has_norms(r),
        lambda r: f"norm={r.norm!r} with placement={r.placement!r}, which has no norm; drop one of the two",
    ),
    (
        lambda r: r.checkpoint is not None and not _fits(r),
        lambda r: f"checkpoint={r.checkpoint!r} is a norm over {NAMED[r.checkpoint or ''].axes}, which architecture="
        f"{r.architecture!r} does not use",
    ),
    (
        lambda r: r.placement == "post" and r.no_warm_up and r.depth >= DEEP_WITHOUT_WARM_UP and r.task != "finetune",
        lambda r: f"placement='post' without warm-up at depth {r.depth}: the large gradients near the output make the "
        "first steps diverge; take deepnorm, pre, or a warm-up",
    ),
    (
        lambda r: r.stored is not None and r.width % r.stored.groups != 0,
        lambda r: f"checkpoint={r.checkpoint!r} has {NAMED[r.checkpoint or ''].groups} groups, which do not divide "
        f"width={r.width}; give the checkpoint's width",
    ),
    (
        lambda r: r.norm == "group" and _divisor(r.width) is None,
        lambda r: f"norm='group' with width={r.width}: no number of groups up to 32 but 1 divides it; take another "
        "width, or layer",
    ),
]  # fmt: skip


def _fits(r: Request) -> bool:
    stored = r.stored
    assert stored is not None
    return (stored.axes == "features" and stored.channel_dim == -1) if r.architecture != "cnn" else (
        stored.axes != "features" or stored.channel_dim == 1
    )  # fmt: skip


def _has_norms(r: Request) -> bool:
    stack = schedule(r.placement or "pre", r.depth)
    branches = (stack.branch(layer, kind) for layer in {1, r.depth} for kind in ("attention", "ffn"))
    return any(b.slots or b.final_norm for b in branches)


def _divisor(channels: int) -> int | None:
    """The largest number of groups, up to the usual 32, that divides the channels; None where only 1 does."""
    return next((g for g in range(32, 1, -1) if channels % g == 0), None)


def groups_for(channels: int) -> int:
    """How many groups GroupNorm gets: the largest divisor up to 32 (1 where there is none)."""
    return _divisor(channels) or 1
