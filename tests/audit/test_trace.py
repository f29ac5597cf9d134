"""The recording: what is seen, that values are told apart, and that the model comes out as it went in."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.audit.trace import trace
from normkit.audit.trace.graph import ReplayError, TensorInfo, Trace
from normkit.audit.trace.meta import DataDependentError


class Function(nn.Module):
    """A function as a model."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(4))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def ancestors(recorded: Trace, value: int) -> set[str]:
    """Names of all operators that a value depends on."""
    found: set[str] = set()
    todo = [value]
    while todo:
        node = recorded.producer(todo.pop())
        if node is not None:
            found.add(node.name)
            todo.extend(node.inputs)
    return found


def test_values_name_parameters_buffers_inputs_and_constants():
    constant = torch.tensor([1.0, 2.0, 3.0, 4.0])
    recorded = trace(Function(lambda m, x: x * m.weight + m.count + constant), (torch.randn(4),))
    origins = [recorded.values[v].origin for node in recorded.nodes for v in node.inputs]
    assert origins == ["input", "parameter", "node", "buffer", "node", "constant"]
    assert [v.name for v in recorded.values if v.origin in ("parameter", "buffer")] == ["weight", "count"]
    assert recorded.outputs == recorded.nodes[-1].outputs


def test_calls_nest_and_repeat():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), shared)
    recorded = trace(model, (torch.randn(2, 4),))
    assert [(c.name, c.parent, c.order) for c in recorded.calls] == [
        ("", -1, 0), ("0", 0, 0), ("0.0", 1, 0), ("0.1", 1, 0), ("0.0", 0, 1),
    ]  # fmt: skip
    inner = recorded.calls[2]
    assert all(recorded.nodes[n].call == inner.index for n in inner.nodes)
    assert inner.outputs == recorded.calls[3].inputs
    (info,) = inner.args
    assert isinstance(info, TensorInfo)
    assert (info.shape, info.stride, info.dtype) == ((2, 4), (4, 1), torch.float32)


def test_first_name_of_a_shared_module():
    shared = nn.Linear(4, 4)
    recorded = trace(nn.Sequential(shared, shared), (torch.randn(2, 4),))
    assert {c.name for c in recorded.calls[1:]} == {"0"}


def partial_write(m: Function, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 1:] += x.sin()[:, 1:]
    return out


def write_to_base_seen_by_view(m: Function, x: Tensor) -> Tensor:
    base = x.clone()
    view = base.view(-1)
    base.mul_(x.sin())
    return view.exp()


def write_by_index(m: Function, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[torch.tensor([0])] = x.sin()[:1]
    return out.exp()


def masked(m: Function, x: Tensor) -> Tensor:
    hidden = x.clone()
    hidden.masked_fill_(x.sin() > 0, 0.0)
    return hidden.exp()


@pytest.mark.parametrize("function", [partial_write, write_to_base_seen_by_view, write_by_index, masked])
def test_a_read_after_a_write_through_a_view_depends_on_the_writer(function):
    recorded = trace(Function(function), (torch.randn(3, 4),))
    assert recorded.error is None
    assert "aten.sin.default" in ancestors(recorded, recorded.outputs[0])


def test_a_write_does_not_reach_what_was_read_before_or_lies_elsewhere():
    def function(m: Function, x: Tensor) -> tuple[Tensor, Tensor]:
        base = x.clone()
        before, elsewhere = base.exp(), base[2:]
        base[:1].copy_(x.sin()[:1])
        return before, elsewhere.cos()

    recorded = trace(Function(function), (torch.randn(3, 4),))
    for value in recorded.outputs:
        assert "aten.sin.default" not in ancestors(recorded, value)


def test_reused_memory_is_not_a_reused_value():
    def function(m: Function, x: Tensor) -> Tensor:
        y = x
        for _ in range(50):
            x.sin()  # freed at once: the next allocation gets its memory
            y = torch.ones(3, 4)
        return y.exp()

    recorded = trace(Function(function), (torch.randn(3, 4),))
    assert "aten.sin.default" not in ancestors(recorded, recorded.outputs[0])


def test_no_activation_is_kept():
    sizes = []

    def function(m: Function, x: Tensor) -> Tensor:
        import weakref

        for _ in range(3):
            x = x + 1
            sizes.append(weakref.ref(x.untyped_storage()))
        return x

    recorded = trace(Function(function), (torch.randn(3, 4),))
    assert len(recorded.nodes) == 3
    assert all(tensor.numel() <= 4 for tensor in recorded.leaves.values())
    assert all(ref() is None for ref in sizes)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_before(training: bool):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train(training)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(8, 4)
    kept = x.clone()
    state = torch.get_rng_state()
    fast = torch.backends.mha.get_fastpath_enabled()
    trace(nn.Sequential(model, Function(lambda m, y: x.add_(1).sum() + y)), (x,))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(x, kept)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.backends.mha.get_fastpath_enabled() is fast
    assert model.training is training
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_rebound_buffer_is_bound_back():
    def function(m: Function, x: Tensor) -> Tensor:
        m.count = torch.add(m.count, 1)  # type: ignore[arg-type]
        return x + m.count

    model = Function(function)
    count = model.count
    trace(model, (torch.randn(4),))
    assert model.count is count


def test_the_encoder_layer_shows_its_norms():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    recorded = trace(layer, (torch.randn(2, 3, 8),))
    assert [n.name for n in recorded.nodes].count("aten.native_layer_norm.default") == 2


def test_a_compiled_model_is_seen_through():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    recorded = trace(cast(nn.Module, torch.compile(model)), (torch.randn(2, 4),))
    assert "aten.native_layer_norm.default" in [n.name for n in recorded.nodes]


def fails(m: Function, x: Tensor) -> Tensor:
    raise ValueError("no")


def test_a_failure_names_the_module_and_leaves_a_partial_trace():
    recorded = trace(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Function(fails)), nn.ReLU()), (torch.randn(2, 4),))
    assert isinstance(recorded.error, ValueError)
    assert [f.module for f in recorded.failures] == ["1.0"]
    assert [(c.name, c.failed) for c in recorded.calls] == [("", True), ("0", False), ("1", True), ("1.0", True)]
    assert recorded.nodes


def test_a_failure_that_the_model_catches_does_not_end_the_run():
    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = Function(fails), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.bad(x)
            except ValueError:
                return self.good(x)

    recorded = trace(Catches(), (torch.randn(2, 4),))
    assert recorded.error is None
    assert [f.module for f in recorded.failures] == ["bad"]
    assert [c.parent for c in recorded.calls] == [-1, 0, 0]
    assert not recorded.calls[0].failed


# ---- replay ----


def rms(m: Function, x: Tensor) -> Tensor:
    y = x.float()
    y.mul_(torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))
    return y * m.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_replay_of_a_slice_with_other_inputs(device: str):
    model = Function(rms).to(device)
    recorded = trace(model, (torch.randn(3, 4, device=device),))
    (source,) = recorded.inputs
    nodes = recorded.slice(recorded.inputs, recorded.outputs[0])
    x, weight = torch.randn(5, 4), torch.randn(4)
    feeds = {source: x.clone()} | {v.index: weight for v in recorded.values if v.name == "weight"}
    got = recorded.replay(nodes, feeds)[recorded.outputs[0]]
    assert torch.allclose(got, F.rms_norm(x, (4,), weight, 1e-6), atol=1e-6)
    assert torch.equal(feeds[source], x)  # the in-place write went to a copy


def test_replay_needs_its_inputs():
    recorded = trace(Function(rms), (torch.randn(3, 4),))
    with pytest.raises(ReplayError, match="not available"):
        recorded.replay(recorded.slice((), recorded.outputs[0]), {})


# ---- meta tensors ----


def meta(function, *shape: int) -> Trace:
    return trace(Function(function).to("meta"), (torch.randn(shape, device="meta"),))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda m, x: x * x.sum().item(), (3, 4)),
        (lambda m, x: x[x[:, 0] > 0], (3, 4)),
        (lambda m, x: (x > 0).nonzero(), (12, 2)),
        (lambda m, x: torch.where(x > 0)[0], (12,)),
        (lambda m, x: torch.masked_select(x, x > 0), (12,)),
        (lambda m, x: torch.unique(x), (12,)),
        (lambda m, x: x if torch.equal(x, x) else x.t(), (4, 3)),
        (lambda m, x: x + x.cpu().to("meta"), (3, 4)),
    ],
)
def test_data_dependence_on_meta_is_guessed_and_recorded(function, shape: tuple[int, ...]):
    recorded = meta(function, 3, 4)
    assert recorded.error is None
    assert recorded.values[recorded.outputs[0]].shape == shape
    assert recorded.guesses
    assert all(guess.module == "" and guess.op for guess in recorded.guesses)


def test_a_constant_on_the_default_device_meets_meta():
    recorded = meta(lambda m, x: x.add(torch.ones(4)), 3, 4)
    assert recorded.error is None
    assert not recorded.guesses


def test_what_cannot_be_guessed_says_so():
    recorded = meta(lambda m, x: torch.histogram(x, 3)[0], 3, 4)
    assert isinstance(recorded.error, DataDependentError)
    assert "real tensors" in str(recorded.error)


def test_cost_is_linear_in_depth():
    def nodes(depth: int) -> int:
        return len(trace(nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth))), (torch.randn(2, 4),)).nodes)

    assert nodes(40) == 2 * nodes(20)
