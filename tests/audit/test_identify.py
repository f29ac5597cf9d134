"""`identify` on foreign modules: other people's norms, and what is no norm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit import NormSpec, identify
from normkit.spec import GEMMA, NEMOTRON, T5, TORCH_BATCH, TORCH_GROUP, TORCH_LAYER
from tests.audit.foreign import D, Fn, rms, tokens

ones = torch.ones
IMAGE = (2, 16, 8, 8)
FLOAT32 = {"rounding": "after_gain", "gain_dtype": "float32", "output_dtype": "input"}


def annotated(m: Any, x: Tensor) -> Tensor:
    return m.a * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + m.b


def convnext(m: Any, x: Tensor) -> Tensor:
    c = x - x.mean(1, keepdim=True)
    x = c / torch.sqrt(c.pow(2).mean(1, keepdim=True) + 1e-6)
    return m.w[:, None, None] * x + m.b[:, None, None]


def per_head(m: Any, x: Tensor) -> Tensor:
    dtype, x = x.dtype, x.float()
    c = x - x.mean(-1, keepdim=True)
    return (m.w.float() * (c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5))).to(dtype)


def gated_before(m: Any, x: Tensor, gate: Tensor) -> Tensor:
    dtype = x.dtype
    x = (x.float() * F.silu(gate.float())).unflatten(-1, (4, -1))
    return m.w * rms(x, 1e-5).flatten(-2).to(dtype)


def gated_after(m: Any, x: Tensor, gate: Tensor) -> Tensor:
    dtype = x.dtype
    h = m.w * rms(x.float(), 1e-6).to(dtype)
    return (h * F.silu(gate.float())).to(dtype)


def t5(m: Any, x: Tensor) -> Tensor:
    x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.w * (x.to(m.w.dtype) if m.w.dtype in (torch.float16, torch.bfloat16) else x)


def partial_rms(m: Any, x: Tensor) -> Tensor:
    k = D // 4
    return m.w * x / (x[..., :k].norm(dim=-1, keepdim=True) * k**-0.5 + 1e-8)


class FrozenBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, ones(16))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.reshape(1, -1, 1, 1) * (self.running_var.reshape(1, -1, 1, 1) + 1e-5).rsqrt()
        return x * scale + (self.bias.reshape(1, -1, 1, 1) - self.running_mean.reshape(1, -1, 1, 1) * scale)


class AllInBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("e", torch.tensor(1e-4))
        self.register_buffer("w", ones(D) * 1.3)

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, 0) if self.e is None else x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.e) * self.w


class UnitConstant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.tensor(1.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (rms(x.float(), 1e-6) * self.w).to(x.dtype)


def vector(n: int = D) -> Tensor:
    return ones(n)


_RMS = NormSpec(centered=False, eps=1e-6)
_CLIP = {"statistic": "sum", "centered": False, "eps_at": "floor"}
NORMS: dict[str, tuple[nn.Module, list[Tensor], NormSpec]] = {
    "annotated": (
        Fn(annotated, a=vector(), b=vector()), [tokens()],
        TORCH_LAYER.replace(statistic="unbiased", eps=1e-6, eps_at="std", rounding="none", output_dtype="promoted"),
    ),
    "scale_norm": (
        Fn(lambda m, x: x * (m.g / x.norm(dim=-1, keepdim=True).clamp(min=1e-5)), g=torch.tensor(5.6)), [tokens()],
        NormSpec(**_CLIP, eps=1e-5, weight_shape="scalar", rounding="none"),
    ),
    "clamped_sum": (
        Fn(lambda m, x: x / x.pow(2).sum(-1, keepdim=True).clamp_min(1e-6).sqrt()), [tokens()],
        NormSpec(**_CLIP, eps=1e-3, has_weight=False, rounding="none"),
    ),
    "length_scaled_first": (
        Fn(lambda m, x: x * (D**0.5 / x.norm(p=2, dim=-1, keepdim=True).clamp_min(1e-5))), [tokens()],
        _RMS.replace(eps=1e-5 / D**0.5, eps_at="floor", has_weight=False, rounding="none"),
    ),
    "normalize": (Fn(lambda m, x: F.normalize(x, dim=-1)), [tokens()],
                  NormSpec(**_CLIP, eps=1e-12, has_weight=False, rounding="none")),
    "normalize_channels": (Fn(lambda m, x: F.normalize(x, dim=1)), [tokens(*IMAGE)],
                           NormSpec(**_CLIP, eps=1e-12, has_weight=False, rounding="none", channel_dim=1)),
    "plain_l2": (Fn(lambda m, x: x / torch.sqrt((x * x).sum(-1, keepdim=True))), [tokens()],
                 NormSpec(statistic="sum", centered=False, eps=0.0, eps_at="std", has_weight=False, rounding="none")),
    "normalize_times_root": (
        Fn(lambda m, x: F.normalize(x, dim=-1) * D**0.5 * m.g, g=vector()), [tokens()],
        _RMS.replace(eps=1e-12 / D**0.5, eps_at="floor", rounding="none", output_dtype="promoted"),
    ),
    "convnext": (Fn(convnext, w=vector(16), b=vector(16)), [tokens(*IMAGE)],
                 TORCH_LAYER.replace(channel_dim=1, eps=1e-6, rounding="none", output_dtype="promoted")),
    "per_head": (Fn(per_head, w=ones(4, 8)), [tokens(2, 7, 4, 8)], NormSpec(weight_shape="per_head")),
    "gemma": (Fn(lambda m, x: (rms(x.float(), 1e-6) * (1 + m.w.float())).to(x.dtype), w=torch.zeros(D)), [tokens()],
              GEMMA),
    "nemotron": (Fn(lambda m, x: F.layer_norm(x, (D,), m.w + 1, m.b), w=torch.zeros(D), b=vector()), [tokens()],
                 NEMOTRON),
    "gated_before": (Fn(gated_before, w=vector()), [tokens(), tokens()],
                     _RMS.replace(eps=1e-5, groups=4, rounding="before_gain", output_dtype="promoted",
                                  gate=("silu", "before"))),
    "gated_after": (Fn(gated_after, w=vector()), [tokens(), tokens()],
                    _RMS.replace(rounding="before_gain", gate=("silu", "after"))),
    "no_upcast": (Fn(lambda m, x: rms(x, 1e-6) * m.w, w=vector()), [tokens()],
                  _RMS.replace(rounding="none", output_dtype="promoted")),
    "partial": (Fn(partial_rms, w=vector()), [tokens()],
                _RMS.replace(partial=0.25, eps=1e-8, eps_at="std", rounding="none", output_dtype="promoted")),
    "t5": (Fn(t5, w=vector()), [tokens()], T5),
    "all_in_buffers": (AllInBuffers(), [tokens()], _RMS.replace(eps=1e-4, rounding="none", output_dtype="promoted")),
    "unit_constant": (UnitConstant(), [tokens()], _RMS.replace(has_weight=False)),
    "layer_half": (nn.LayerNorm(D).bfloat16(), [tokens().bfloat16()], TORCH_LAYER),
    "layer_space": (nn.LayerNorm((16, 8, 8)), [tokens(*IMAGE)], TORCH_LAYER.replace(channel_dim=(-3, -2, -1))),
    "layer_plain": (nn.LayerNorm(D, elementwise_affine=False), [tokens()], NormSpec(has_weight=False)),
    "layer_two_plain": (nn.LayerNorm((16, D), elementwise_affine=False), [tokens()],
                        NormSpec(has_weight=False, channel_dim=(-2, -1))),
    "group_channels_last": (nn.GroupNorm(4, 16), [tokens(*IMAGE).to(memory_format=torch.channels_last)],
                            TORCH_GROUP.replace(groups=4)),
    "group_one_row": (nn.GroupNorm(4, 16), [tokens(5, 16)], TORCH_GROUP.replace(groups=4)),
    "group_plain": (nn.GroupNorm(4, 16, affine=False), [tokens(1, 16, 28, 28)],
                    TORCH_GROUP.replace(groups=4, has_weight=False, has_bias=False)),
    "group_all": (nn.GroupNorm(1, 16, affine=False), [tokens(*IMAGE)],
                  TORCH_GROUP.replace(groups=1, has_weight=False, has_bias=False)),
    "instance": (nn.InstanceNorm2d(16), [tokens(*IMAGE)], NormSpec(axes="instance", channel_dim=1, has_weight=False)),
    "instance_1d": (nn.InstanceNorm1d(16), [tokens(2, 16, 9)],
                    NormSpec(axes="instance", channel_dim=1, has_weight=False)),
    "instance_tracked": (nn.InstanceNorm2d(16, affine=True, track_running_stats=True), [tokens(*IMAGE)],
                         TORCH_BATCH.replace(axes="instance")),
    "batch_1d": (nn.BatchNorm1d(16), [tokens(4, 16, 6)], TORCH_BATCH),
    "batch_one_row": (nn.BatchNorm1d(16), [tokens(1, 16)], TORCH_BATCH),
    "batch_2d": (nn.BatchNorm2d(16, momentum=0.01, eps=1e-3), [tokens(*IMAGE)],
                 TORCH_BATCH.replace(running=0.01, eps=1e-3)),
    "batch_3d": (nn.BatchNorm3d(4, momentum=None), [tokens(2, 4, 3, 3, 3)], TORCH_BATCH.replace(running="cumulative")),
    "batch_untracked": (nn.BatchNorm2d(16, track_running_stats=False), [tokens(*IMAGE)],
                        TORCH_BATCH.replace(running=None)),
    "batch_sync": (nn.SyncBatchNorm(16).eval(), [tokens(*IMAGE)], TORCH_BATCH),
    "batch_frozen": (FrozenBatch(), [tokens(*IMAGE)],
                     TORCH_BATCH.replace(running=None, frozen=True, rounding="none", output_dtype="promoted")),
    "in_a_container": (nn.Sequential(nn.LayerNorm(D), nn.Dropout()), [tokens()], TORCH_LAYER),
    "returns_a_tuple": (Fn(lambda m, x: (F.layer_norm(x, (D,), m.w, m.b), x), w=vector(), b=vector()), [tokens()],
                        TORCH_LAYER),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", NORMS)
def test_other_peoples_norms(name: str, device: str) -> None:
    module, args, wanted = NORMS[name]
    if device == "meta":
        module, args = copy.deepcopy(module).to("meta"), [a.to("meta") for a in args]
        if name == "all_in_buffers":
            wanted = wanted.replace(eps=1e-6)  # its value is lost, and the reason says so
    found = identify(module, *args)
    assert found.spec is not None, found.reason
    channels = args[0].shape[1 if wanted.channel_dim == 1 else -1]
    got, expected = found.spec.canonical(channels=channels), wanted.canonical(channels=channels)
    assert got.eps == pytest.approx(expected.eps, rel=1e-3)
    assert got.replace(eps=expected.eps) == expected, found.reason
    assert found.kind == wanted.kind
    if name == "all_in_buffers" and device == "meta":
        assert "not known on the meta device" in found.reason


def conditioned(m: Any, x: Tensor, c: Tensor) -> Tensor:
    scale, shift = m.lin(c).chunk(2, -1)
    return F.layer_norm(x, (D,)) * (1 + scale[:, None]) + shift[:, None]


def response_norm(m: Any, x: Tensor) -> Tensor:
    size = x.norm(dim=(1, 2), keepdim=True)
    return m.g * (x * size / (size.mean(-1, keepdim=True) + 1e-6)) + m.b + x


def filter_response(m: Any, x: Tensor) -> Tensor:
    return torch.maximum(m.g * (x * torch.rsqrt(x.pow(2).mean((2, 3), keepdim=True) + 1e-6)) + m.b, m.t)


OTHERS: dict[str, tuple[nn.Module, list[Tensor]]] = {
    "dynamic_tanh": (Fn(lambda m, x: torch.tanh(m.a * x) * m.w, a=torch.tensor(0.5), w=vector()), [tokens()]),
    "global_response": (Fn(response_norm, g=ones(1, 1, 1, 16), b=ones(1, 1, 1, 16)), [tokens(2, 8, 8, 16)]),
    "filter_response": (
        Fn(filter_response, g=ones(1, 16, 1, 1), b=ones(1, 16, 1, 1), t=torch.zeros(1, 16, 1, 1)), [tokens(*IMAGE)],
    ),
    "adaptive": (Fn(conditioned, lin=nn.Linear(8, 2 * D)), [tokens(), tokens(2, 8)]),
    "with_activation": (nn.Sequential(nn.LayerNorm(D), nn.ReLU()), [tokens()]),
    "l1": (Fn(lambda m, x: F.normalize(x, p=1, dim=-1)), [tokens()]),
    "largest": (Fn(lambda m, x: x / x.abs().amax(-1, keepdim=True)), [tokens()]),
    "half_size": (Fn(lambda m, x: 0.5 * rms(x, 1e-5) * m.w, w=vector()), [tokens()]),
    "one_minus": (Fn(lambda m, x: rms(x, 1e-5) * (1 - m.w), w=vector()), [tokens()]),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", OTHERS)
def test_norm_like_without_a_spec(name: str, device: str) -> None:
    module, args = OTHERS[name]
    found = identify(copy.deepcopy(module).to(device), *[a.to(device) for a in args])
    assert (found.kind, found.spec) == ("other", None), found.reason
    assert len(found.reason) > 20


class StandardizedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w / (w.std((1, 2, 3), keepdim=True) + 1e-5), self.bias, padding=1)


NOTHING: dict[str, tuple[nn.Module, list[Tensor]]] = {
    **{type(m).__name__: (m, [tokens()]) for m in (
        nn.Linear(D, D), nn.Identity(), nn.Dropout(), nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(),
        nn.Softmax(-1),
        nn.LogSoftmax(-1), nn.Softmin(-1), nn.Hardtanh(), nn.Softsign(), nn.Flatten(), nn.Tanhshrink(),
        nn.TransformerEncoderLayer(D, 4, 64, batch_first=True),
    )},
    **{type(m).__name__: (m, [tokens(*IMAGE)]) for m in (
        nn.Conv2d(16, 16, 1, groups=16), nn.Conv2d(16, 16, 3, padding=1), nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1),
        nn.PReLU(16), nn.LocalResponseNorm(5), StandardizedConv(16, 16, 3), nn.Softmax2d(),
    )},
    "small_conv": (StandardizedConv(4, 4, 3), [tokens(2, 4, 16, 16)]),
    "pre_norm_block": (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, norm_first=True), [tokens(4, 64, 8)]),
    "post_norm_block": (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), [tokens(4, 64, 8)]),
    "attention": (Fn(lambda m, x: m.a(x, x, x), a=nn.MultiheadAttention(8, 2, batch_first=True)), [tokens(4, 64, 8)]),
    "mlp": (nn.Sequential(nn.Linear(D, D, bias=False), nn.ReLU(), nn.Linear(D, D, bias=False)), [tokens(4, 64, D)]),
    "norm_then_linear": (nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)), [tokens(4, 64, D)]),
    "dense_add_norm": (Fn(lambda m, x, r: F.layer_norm(m.l(x) + r, (D,), m.w), l=nn.Linear(D, D), w=vector()),
                       [tokens(4, 64, D), tokens(4, 64, D)]),
    "layer_scale": (Fn(lambda m, x: x * m.g, g=vector()), [tokens()]),
    "subtract_mean": (Fn(lambda m, x: x - x.mean(-1, keepdim=True)), [tokens()]),
    "squeeze_excite": (Fn(lambda m, x: x * torch.sigmoid(m.l(x.mean((2, 3))))[:, :, None, None], l=nn.Linear(16, 16)),
                       [tokens(*IMAGE)]),
    "gated_unit": (Fn(lambda m, x, g: x * F.silu(g)), [tokens(), tokens()]),
    "add": (Fn(lambda m, x, y: x + y), [tokens(), tokens()]),
    "embedding": (nn.Embedding(9, D), [torch.zeros(2, 3, dtype=torch.int64)]),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", NOTHING)
def test_what_is_no_norm(name: str, device: str) -> None:
    module, args = NOTHING[name]
    found = identify(copy.deepcopy(module).to(device), *[a.to(device) for a in args])
    assert (found.kind, found.spec) == ("none", None), found.reason
    assert not found


def test_added_residual_is_named() -> None:
    module = Fn(lambda m, x, r: (F.layer_norm(x + r, (D,), m.w), x + r), w=vector())
    found = identify(module, tokens(), tokens())
    assert found.kind == "layer"
    assert (found.input, found.residual, found.gate) == (0, 1, None)


def test_keyword_arguments() -> None:
    module = Fn(gated_before, w=vector())
    module.forward = lambda *, hidden, gate: gated_before(module, hidden, gate)  # type: ignore[method-assign]
    assert identify(module, hidden=tokens(), gate=tokens()).kind == "none"  # bound to the original: not run

    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(vector())

        def forward(self, *, hidden: Tensor, gate: Tensor) -> Tensor:
            return gated_before(self, hidden, gate)

    found = identify(Keyword(), hidden=tokens(), gate=tokens())
    assert (found.input, found.gate, found.weight) == ("hidden", "gate", "w")


def test_names_of_the_tensors() -> None:
    found = identify(nn.Sequential(nn.BatchNorm2d(16)), tokens(*IMAGE))
    assert (found.weight, found.bias) == ("0.weight", "0.bias")
    assert (found.running_mean, found.running_var) == ("0.running_mean", "0.running_var")


@pytest.mark.parametrize("training", [True, False])
def test_how_batch_statistics_are_set(training: bool) -> None:
    assert identify(nn.BatchNorm2d(16).train(training), tokens(*IMAGE)).uses_batch is training


@pytest.mark.parametrize(
    ("module", "kind"),
    [(nn.LayerNorm(D), "layer"), (nn.RMSNorm(D), "rms"), (nn.BatchNorm2d(16), "batch"), (nn.BatchNorm1d(16), "batch"),
     (nn.GroupNorm(4, 16), "group"), (nn.InstanceNorm2d(16, affine=True), "instance"), (nn.LayerNorm((4, 6)), "layer"),
     (nn.BatchNorm3d(4), "batch"), (nn.ReLU(), "none"), (nn.Linear(8, 8), "none")],
)  # fmt: skip
def test_without_an_example(module: nn.Module, kind: str) -> None:
    assert identify(module).kind == kind


def test_compiled() -> None:
    module = torch.compile(nn.LayerNorm(D))
    module(tokens())
    assert identify(module, tokens()).kind == "layer"


def test_parametrized_and_hooked() -> None:
    module = nn.LayerNorm(D)
    seen: list[int] = []
    module.register_forward_hook(lambda *_: seen.append(1))
    module.register_forward_pre_hook(lambda *_: seen.append(1))
    assert identify(module, tokens()).kind == "layer"
    assert seen == []
    assert len(module._forward_hooks) == 1

    class Same(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w

    torch.nn.utils.parametrize.register_parametrization(module, "weight", Same())
    found = identify(module, tokens())
    assert (found.kind, found.weight) == ("layer", "parametrizations.weight.original")


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.w is None:
            self.w = ones(x.shape[-1])
        return rms(x, 1e-6) * self.w


def test_state_created_by_the_first_call() -> None:
    module = Lazy()
    found = identify(module, tokens())
    assert (found.kind, found.weight, module.w) == ("rms", "w", None)


def test_under_other_modes() -> None:
    with torch.device("meta"):
        assert identify(nn.LayerNorm(D), torch.empty(2, 5, D)).kind == "layer"
    with torch.inference_mode():
        assert identify(nn.BatchNorm2d(16), tokens(*IMAGE)).kind == "batch"
    with torch.autocast("cpu", torch.bfloat16):
        assert identify(NORMS["gemma"][0], tokens()).spec == GEMMA


def test_refuses_what_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module; got function"):
        identify(F.relu)  # type: ignore[arg-type]


def test_a_second_input_with_another_use_hides_no_rounding() -> None:
    """Queries and keys normalized in one call: the first output is the queries' alone."""

    class Both(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return F.normalize(q, dim=-1), F.normalize(k, dim=-1)

    found = identify(Both(), tokens(), tokens())
    assert found.spec is not None
    assert (found.kind, found.spec.rounding) == ("l2", "none")
