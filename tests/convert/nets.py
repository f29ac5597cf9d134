"""Small models with every kind of norm, written as different people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import perturb


class Llama(nn.Module):
    """Rounds before the gain; the parameters have names of their own."""

    def __init__(self, width: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        z = hidden.float()
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.scale * z.to(hidden.dtype)


class Gemma(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        z = x.float()
        return (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight.float())).type_as(x)


class Narrow(nn.Module):
    """Everything in the input's own dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        x = hidden_states.float()
        if gate is not None:
            x = x * F.silu(gate.float())
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * x.to(hidden_states.dtype)


class Channels(nn.Module):
    """LayerNorm over dim 1, as image models write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, 1e-6).permute(0, 3, 1, 2)


class Text(nn.Module):
    """Rows: layer, RMS, gated, per head, and one module used twice. Returns a dict, as models do."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.lead = nn.Linear(width, width)
        self.llama, self.gemma, self.narrow, self.gated = Llama(width), Gemma(width), Narrow(width), Gated(width)
        self.layer, self.rms = nn.LayerNorm(width), nn.RMSNorm(width, 1e-6)
        self.q_norm = Llama(width // 4)
        self.again = self.layer

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x + self.lead(self.llama(x))
        x = x + self.lead(self.gemma(hidden := x) + self.narrow(hidden))
        x = x + self.gated(self.lead(x), gate=x)
        heads = self.lead(self.layer(x)).unflatten(-1, (4, -1)).transpose(1, 2)
        x = x + self.q_norm(heads).transpose(1, 2).flatten(-2)
        return {"hidden": self.again(x), "last": self.rms(x)}


class Image(nn.Module):
    """Channels: batch, group, instance (with and without running statistics), and layer over dim 1."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.lead = nn.Conv2d(3, width, 3)
        self.batch, self.cumulative = nn.BatchNorm2d(width), nn.BatchNorm2d(width, momentum=None)
        self.group, self.channels = nn.GroupNorm(3, width), Channels(width)
        self.instance = nn.InstanceNorm2d(width, affine=True)
        self.tracked = nn.InstanceNorm2d(width, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.batch(self.lead(x)), inplace=True)
        x = x + self.group(x)
        x = self.cumulative(self.channels(x)) + self.instance(x)
        return self.tracked(x)


TEXT_NORMS = {"llama", "gemma", "narrow", "gated", "layer", "rms", "q_norm"}
IMAGE_NORMS = {"batch", "cumulative", "group", "channels", "instance", "tracked"}


def text(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Text()
    perturb_norms(model)
    return model.to(dtype).eval(), torch.randn(2, 7, 24).to(dtype)


def image(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Image()
    perturb_norms(model)
    return model.to(dtype).eval(), torch.randn(3, 3, 9, 8).to(dtype)


def perturb_norms(model: nn.Module) -> None:
    """Trained-like gains, biases and running statistics."""
    for module in model.children():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            perturb(module)
