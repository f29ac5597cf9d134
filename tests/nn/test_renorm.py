"""BatchRenorm and GhostBatchNorm against their algorithms, over several training steps."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transcribe import gradients, randn, trained

from normkit.functional.renorm import batch_renorm
from normkit.nn import BatchRenorm, GhostBatchNorm, Ramp


def clip(value, low, high):
    return min(max(float(value), low), high)


class PaperRenorm:
    """Algorithm 1 of arXiv:1702.03275, channel by channel; r and d are numbers, so no gradient flows through them."""

    def __init__(self, m):
        self.m, self.mean, self.std, self.step = m, [0.0] * m.num_features, [1.0] * m.num_features, 0

    def __call__(self, x, mask=None):
        m, out = self.m, torch.zeros_like(x)
        limit = {name: self.at(getattr(m, name)) for name in ("r_max", "d_max")}
        for c in range(x.shape[1]):
            places = [(n, i) for n in range(x.shape[0]) for i in range(x.shape[2]) if mask is None or mask[n, i]]
            mean = sum(x[n, c, i] for n, i in places) / len(places)
            std = torch.sqrt(m.spec.eps + sum((x[n, c, i] - mean) ** 2 for n, i in places) / len(places))
            r = clip(std.detach() / self.std[c], 1 / limit["r_max"], limit["r_max"])
            d = clip((mean.detach() - self.mean[c]) / self.std[c], -limit["d_max"], limit["d_max"])
            for n, i in places:
                out[n, c, i] = m.weight[c] * ((x[n, c, i] - mean) / std * r + d) + m.bias[c]
            self.mean[c] += m.momentum * (mean.item() - self.mean[c])
            self.std[c] += m.momentum * (std.item() - self.std[c])
        self.step += 1
        return out

    def at(self, limit):
        if not isinstance(limit, Ramp):
            return limit
        share = clip((self.step - limit.first) / (limit.last - limit.first), 0, 1)
        return limit.start + (limit.stop - limit.start) * share


MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("limits", [(3.0, 5.0), (1.1, 0.1), (Ramp(1.0, 3.0, 1, 4), Ramp(0.0, 5.0, 1, 3))])
def test_batch_renorm_is_algorithm_1_of_1702_03275(limits, mask):
    m = trained(BatchRenorm(3, momentum=0.3, r_max=limits[0], d_max=limits[1], dtype=torch.float64))
    paper = PaperRenorm(m)
    for step in range(5):
        x = (randn(3, 3, 4, seed=step) * (1 + step) + step).requires_grad_()
        wanted = [x, *m.parameters()]
        got, expected = m(x, mask), paper(x, mask)
        close = 1e-6 if isinstance(limits[0], Ramp) else 1e-10  # a ramp is a float32 number
        torch.testing.assert_close(got, expected, rtol=close, atol=close)
        for a, b in zip(gradients(got, wanted), gradients(expected, wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=close, atol=close)
        for buffer, value in ((m.running_mean, paper.mean), (m.running_std, paper.std)):
            torch.testing.assert_close(buffer, torch.tensor(value, dtype=torch.float64), rtol=1e-11, atol=1e-12)
    assert m.num_batches_tracked == 5
    m.eval()
    x = randn(2, 3, 4)
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None] for v in (paper.mean, paper.std))
    torch.testing.assert_close(m(x), (x - mean) / std * m.weight[:, None] + m.bias[:, None])


def test_default_limits_are_the_papers_schedule():
    m = BatchRenorm(1)
    values = [
        (float(m.r_max(torch.tensor(t))), float(m.d_max(torch.tensor(t)))) for t in (0, 5000, 25000, 40000, 10**6)
    ]
    assert values[0] == values[1] == (1.0, 0.0)
    assert values[2][1] == 5.0 and values[3] == values[4] == (3.0, 5.0)
    assert values[2][0] == pytest.approx(1 + 2 * 20 / 35)


def test_with_closed_limits_it_is_batch_norm():
    x = randn(4, 3, 5, dtype=torch.float32)
    y = BatchRenorm(3, r_max=1.0, d_max=0.0)(x)
    torch.testing.assert_close(y, nn.BatchNorm1d(3)(x))


def test_training_output_is_evaluation_output_within_the_limits():
    """The point of the method: unclipped, a training batch comes out as evaluation would give it."""
    m = BatchRenorm(3, r_max=1e6, d_max=1e6, dtype=torch.float64)
    m.running_mean.copy_(randn(3))
    m.running_std.copy_(randn(3, seed=1).abs() + 0.5)
    frozen = BatchRenorm(3, dtype=torch.float64).eval()
    frozen.load_state_dict(m.state_dict())
    x = randn(4, 3, 5)
    torch.testing.assert_close(m(x), frozen(x))


def test_gradcheck_where_the_corrections_are_constants():
    """Saturated limits make r and d locally constant, so the stopped gradient is the true derivative."""
    mean, std = torch.full((2,), 9.0, dtype=torch.float64), torch.full((2,), 0.01, dtype=torch.float64)
    w, b = randn(2, seed=3).requires_grad_(), randn(2, seed=4).requires_grad_()

    def f(x, weight, bias):
        return batch_renorm(x, mean, std, weight, bias, r_max=2.0, d_max=1.0)[0]

    assert torch.autograd.gradcheck(f, (randn(3, 2, 2).requires_grad_(), w, b))
    assert torch.autograd.gradgradcheck(f, (randn(3, 2, 2).requires_grad_(), w, b))


def test_functional_form_under_transforms():
    """Training under vmap and jacrev: the statistics come back, nothing is changed in place."""
    mean, std = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)

    def f(x):
        return batch_renorm(x, mean, std, r_max=2.0, d_max=1.0)

    xs = randn(3, 4, 2)
    for a, b in zip(torch.func.vmap(f)(xs), zip(*(f(x) for x in xs), strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(list(b)))
    jacobian = torch.func.jacrev(lambda x: f(x)[0])(xs[0])
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(lambda x: f(x)[0], xs[0]))
    _, tangent = torch.func.jvp(lambda x: f(x)[0], (xs[0],), (xs[1],))
    torch.testing.assert_close(tangent, torch.einsum("abcd,cd->ab", jacobian, xs[1]))


class PaperGhost:
    """Algorithm 1 of arXiv:1705.08741: each virtual batch by its own statistics."""

    def __init__(self, m):
        self.m = m

    def __call__(self, x, sizes):
        m, out, start = self.m, torch.zeros_like(x), 0
        for size in sizes:
            for c in range(x.shape[1]):
                places = [(n, i) for n in range(start, start + size) for i in range(x.shape[2])]
                mean = sum(x[n, c, i] for n, i in places) / len(places)
                std = torch.sqrt(sum((x[n, c, i] - mean) ** 2 for n, i in places) / len(places) + m.spec.eps)
                for n, i in places:
                    out[n, c, i] = m.weight[c] * (x[n, c, i] - mean) / std + m.bias[c]
            start += size
        return out


@pytest.mark.parametrize(("n", "sizes"), [(6, [2, 2, 2]), (7, [3, 2, 2]), (5, [3, 2]), (2, [2]), (1, [1])])
def test_ghost_batch_norm_is_algorithm_1_of_1705_08741(n, sizes):
    m = trained(GhostBatchNorm(3, 2, dtype=torch.float64))
    x = (randn(n, 3, 4) + 2).requires_grad_()
    wanted = [x, *m.parameters()]
    got, expected = m(x), PaperGhost(m)(x, sizes)
    torch.testing.assert_close(got, expected)
    for a, b in zip(gradients(got, wanted), gradients(expected, wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_ghost_running_statistics_are_batch_norms_over_the_parts():
    m, theirs = GhostBatchNorm(3, 2), nn.BatchNorm1d(3)
    x = randn(6, 3, 4, dtype=torch.float32) + 1
    m(x)
    for part in x.split(2):
        theirs(part)
    torch.testing.assert_close(m.running_mean, theirs.running_mean)
    torch.testing.assert_close(m.running_var, theirs.running_var)
    assert m.num_batches_tracked == 1
    assert list(m.state_dict()) == ["weight", "bias", "running_mean", "num_batches_tracked", "running_var"]
    theirs.load_state_dict(m.state_dict())
    torch.testing.assert_close(m.eval()(x), theirs.eval()(x))


def test_ghost_masks_count_valid_positions_only():
    x = randn(4, 3, 5, dtype=torch.float32)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[:, 3:] = False
    m, short = GhostBatchNorm(3, 2), GhostBatchNorm(3, 2)
    padded = torch.where(mask.unsqueeze(1), x, torch.nan).requires_grad_()
    y = m(padded, mask)
    torch.testing.assert_close(y[..., :3], short(x[..., :3]))
    assert not y[..., 3:].any()
    torch.testing.assert_close(m.running_var, short.running_var)
    y.square().sum().backward()
    assert padded.grad.isfinite().all() and m.weight.grad.isfinite().all()
    before = m.running_mean.clone()
    m(x, torch.zeros(4, 5))
    assert torch.equal(m.running_mean, before)


OPEN = {"r_max": 3.0, "d_max": 5.0, "momentum": 0.3}  # limits that let the running statistics into the output


@pytest.mark.parametrize("make", [lambda **o: BatchRenorm(3, **OPEN, **o), lambda **o: GhostBatchNorm(3, 2, **o)])
class TestBoth:
    def test_channels_last_is_channels_first_moved(self, make):
        first, last = make(), make(channel_dim=-1)
        x = randn(4, 3, 2, 5, dtype=torch.float32)
        torch.testing.assert_close(first(x), last(x.movedim(1, -1)).movedim(-1, 1))
        torch.testing.assert_close(first.running_mean, last.running_mean)

    def test_evaluation_changes_nothing_and_training_counts(self, make):
        m = make()
        state = {k: v.clone() for k, v in m.state_dict().items()}
        m.eval()(randn(4, 3, dtype=torch.float32))
        assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())
        m.train()(randn(4, 3, dtype=torch.float32))
        assert m.num_batches_tracked == 1 and not torch.equal(m.running_mean, state["running_mean"])
        m.reset_parameters()
        assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())

    def test_an_empty_batch_does_not_count(self, make):
        m = make()
        assert m(torch.ones(0, 3, 4)).shape == (0, 3, 4)
        assert m.num_batches_tracked == 0 and not m.running_mean.any()

    def test_one_value_a_channel_is_refused_in_training_only(self, make):
        with pytest.raises(ValueError, match="more than one value per channel"):
            make()(torch.ones(1, 3))
        make().eval()(torch.ones(1, 3))

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointing_counts_once(self, make, reentrant):
        plain, again = make(), make()
        for step in range(3):
            x, z = (randn(4, 3, seed=step, dtype=torch.float32).requires_grad_() for _ in range(2))
            a, b = plain(x), checkpoint(again, z, use_reentrant=reentrant)
            a.square().sum().backward()
            b.square().sum().backward()
            torch.testing.assert_close(x.grad, z.grad, rtol=0, atol=0)
        for name, value in plain.state_dict().items():
            assert torch.equal(value, again.state_dict()[name]), name

    def test_compiled_training_equals_eager(self, make):
        eager, compiled = make(), make()
        run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
        for step in range(2):
            x = randn(4, 3, 2, seed=step, dtype=torch.float32)
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            y, z = eager(a), run(b)
            y.square().sum().backward()
            z.square().sum().backward()
            torch.testing.assert_close(y, z)
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
        for name, value in eager.state_dict().items():
            torch.testing.assert_close(value, compiled.state_dict()[name])

    def test_half_precision_statistics_are_float32(self, make):
        m, exact = make(), make(dtype=torch.float64)
        x = (randn(64, 3) * 300).half()
        torch.testing.assert_close(m(x).double(), exact(x.double()), rtol=2e-3, atol=2e-3)

    def test_large_mean(self, make):
        x = 1e4 + randn(64, 3) * 0.05
        x = x.float().double()
        torch.testing.assert_close(make()(x.float()).double(), make(dtype=torch.float64)(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: BatchRenorm(3, r_max=0.5), ValueError, "r_max"),
        (lambda: BatchRenorm(3, d_max=-1.0), ValueError, "d_max"),
        (lambda: BatchRenorm(3, momentum=1.5), ValueError, "momentum"),
        (lambda: BatchRenorm(3, eps=-1.0), ValueError, "eps"),
        (lambda: BatchRenorm(3)(torch.ones(2, 4)), ValueError, "num_features=3"),
        (lambda: BatchRenorm(3)(torch.ones(2, 3).int()), TypeError, "floating"),
        (lambda: BatchRenorm(3)(torch.ones(2, 3, 4), torch.ones(2, 3)), ValueError, "mask has shape"),
        (lambda: Ramp(0.0, 1.0, 5, 5), ValueError, "last"),
        (lambda: GhostBatchNorm(3, 0), ValueError, "ghost_size"),
        (lambda: GhostBatchNorm(3, 1)(torch.ones(2, 3)), ValueError, "larger ghost_size"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
