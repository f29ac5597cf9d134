"""PowerNorm against algorithm 2 of arXiv:2003.07845: forward, approximate backward and both running statistics."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transcribe import randn, trained

from normkit.functional.renorm import power_norm
from normkit.nn import PowerNorm


class Algorithm2:
    """One step at a time, channel by channel, with numbers only: no autograd here."""

    def __init__(self, m):
        self.m, c = m, m.num_features
        self.square, self.nu, self.step = [1.0] * c, [0.0] * c, 0

    def __call__(self, x, upstream, mask=None):
        """(y, dx, dweight, dbias) for x (B, T, C); moves square and nu."""
        m, weight, bias = self.m, self.m.weight.tolist(), self.m.bias.tolist()
        y, dx = torch.zeros_like(x), torch.zeros_like(x)
        dweight, dbias = torch.zeros(x.shape[-1]).double(), torch.zeros(x.shape[-1]).double()
        self.step += 1
        for c in range(x.shape[-1]):
            places = [(b, t) for b in range(x.shape[0]) for t in range(x.shape[1]) if mask is None or mask[b, t]]
            n = len(places)
            batch = sum(float(x[b, t, c]) ** 2 for b, t in places) / n
            psi = ((batch if self.step <= m.warmup else self.square[c]) + m.spec.eps) ** 0.5
            hat = {p: float(x[p][c]) / psi for p in places}
            g = {p: weight[c] * float(upstream[p][c]) for p in places}
            for p in places:
                y[p][c] = weight[c] * hat[p] + bias[c]
                dx[p][c] = (g[p] - self.nu[c] * hat[p]) / psi
                dweight[c] += float(upstream[p][c]) * hat[p]
                dbias[c] += float(upstream[p][c])
            gamma = sum(hat[p] * hat[p] for p in places) / n
            big_lambda = sum(g[p] * hat[p] for p in places) / n
            a = m.alpha_backward
            self.nu[c] = self.nu[c] * (1 - (1 - a) * gamma) + (1 - a) * big_lambda
            share = 1 / self.step if self.step <= m.warmup else 1 - m.alpha
            self.square[c] += share * (batch - self.square[c])
        return y, dx, dweight, dbias


MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("warmup", [0, 2])
def test_it_is_algorithm_2_over_several_steps(warmup, mask):
    m = trained(PowerNorm(3, alpha=0.7, alpha_backward=0.8, warmup=warmup, dtype=torch.float64))
    paper = Algorithm2(m)
    for step in range(5):
        x = (randn(3, 4, 3, seed=step) * (step + 1)).requires_grad_()
        upstream = randn(3, 4, 3, seed=50 + step)
        if mask is not None:
            upstream = upstream * mask.unsqueeze(-1)
        y, dx, dweight, dbias = paper(x.detach(), upstream, mask)
        out = m(x, mask)
        torch.testing.assert_close(out, y, rtol=1e-11, atol=1e-12)
        got = torch.autograd.grad(out, [x, m.weight, m.bias], upstream)
        for a, b in zip(got, (dx, dweight, dbias), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        for buffer, expected in ((m.running_rms.square(), paper.square), (m.nu, paper.nu)):
            torch.testing.assert_close(buffer, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-12)
    x = randn(2, 4, 3)
    square = torch.tensor(paper.square, dtype=torch.float64)
    torch.testing.assert_close(m.eval()(x), x / torch.sqrt(square + 1e-5) * m.weight + m.bias)


def test_nu_approaches_the_exact_gradient_of_the_quadratic_mean():
    """On repeated data nu tends to mean(g x̂) / mean(x̂^2), with which the gradient is exact for PN-V."""
    m = PowerNorm(2, alpha=0.5, warmup=10**6, dtype=torch.float64)
    x, upstream = randn(8, 5, 2), randn(8, 5, 2, seed=1)
    for _ in range(200):
        z = x.clone().requires_grad_()
        (approximate,) = torch.autograd.grad(m(z), z, upstream)
    z = x.clone().requires_grad_()
    exact_y = z / torch.sqrt(z.square().mean((0, 1)) + 1e-5)
    (exact,) = torch.autograd.grad(exact_y, z, upstream)
    torch.testing.assert_close(approximate, exact, rtol=1e-4, atol=1e-5)


def test_second_derivative_is_that_of_the_approximate_gradient():
    square, weight = randn(3).abs() + 0.5, randn(3, seed=2).requires_grad_()
    x, upstream = randn(2, 4, 3).requires_grad_(), randn(2, 4, 3, seed=1).requires_grad_()
    start = randn(3, seed=3)

    def gradient(x, weight, upstream):
        out = power_norm(x, square.sqrt(), start.clone(), weight)
        return torch.autograd.grad(out, x, upstream, create_graph=True)[0]

    def written_out(x, weight, upstream):
        psi = torch.sqrt(square + 1e-5)
        return (upstream * weight - start * x / psi) / psi

    torch.testing.assert_close(gradient(x, weight, upstream), written_out(x, weight, upstream))
    wanted = [x, weight, upstream]
    seconds = [torch.autograd.grad(f(*wanted).pow(2).sum(), wanted) for f in (gradient, written_out)]
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.autograd.gradcheck(gradient, wanted)


def test_groups_scale_each_position_first():
    m = trained(PowerNorm(6, groups=2, warmup=0, dtype=torch.float64))
    x = randn(2, 4, 6)
    parts = x.unflatten(-1, (2, 3))
    scaled = (parts / torch.sqrt(parts.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2)
    torch.testing.assert_close(m(x), scaled / (1 + 1e-5) ** 0.5 * m.weight + m.bias)


def test_padding_goes_nowhere():
    m = trained(PowerNorm(3, warmup=1))
    x = torch.where(MASK.unsqueeze(-1), randn(3, 4, 3, dtype=torch.float32), torch.nan).requires_grad_()
    for _ in range(2):
        y = m(x, MASK)
        y.square().sum().backward()
    assert not y[~MASK].any() and not x.grad[~MASK].any()
    assert all(t.isfinite().all() for t in (y, x.grad, m.weight.grad, m.nu, m.running_rms))
    state = {k: v.clone() for k, v in m.state_dict().items()}
    m(x.detach(), torch.zeros(3, 4))
    m(torch.ones(0, 4, 3))
    assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())


def test_channels_first_is_channels_last_moved():
    last, first = PowerNorm(3), PowerNorm(3, channel_dim=1)
    x = randn(2, 4, 3, dtype=torch.float32)
    torch.testing.assert_close(first(x.movedim(-1, 1)).movedim(1, -1), last(x))


def test_evaluation_changes_nothing_and_has_true_gradients():
    m = trained(PowerNorm(3, dtype=torch.float64)).eval()
    state = {k: v.clone() for k, v in m.state_dict().items()}
    x = randn(2, 4, 3).requires_grad_()
    assert torch.autograd.gradcheck(m, x)
    assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once(reentrant, warmup):
    plain, again = PowerNorm(3, warmup=warmup), PowerNorm(3, warmup=warmup)
    for step in range(4):
        x, z = (randn(2, 4, 3, seed=step, dtype=torch.float32).requires_grad_() for _ in range(2))
        a, b = plain(x), checkpoint(again, z, use_reentrant=reentrant)
        a.square().sum().backward()
        b.square().sum().backward()
        torch.testing.assert_close(x.grad, z.grad, rtol=0, atol=0)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_compiled_training_equals_eager_and_moves_nu():
    eager, compiled = PowerNorm(3, warmup=1), PowerNorm(3, warmup=1)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for step in range(3):
        x = randn(2, 4, 3, seed=step, dtype=torch.float32)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = eager(a), run(b)
        y.square().sum().backward()
        z.square().sum().backward()
        torch.testing.assert_close(y, z)
        torch.testing.assert_close(a.grad, b.grad)
    assert eager.nu.abs().min() > 0
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(value, compiled.state_dict()[name])


def test_half_precision_statistics_are_float32():
    m, exact = PowerNorm(3), PowerNorm(3, dtype=torch.float64)
    x = (randn(8, 4, 3) * 300).half()
    torch.testing.assert_close(m(x).double(), exact(x.double()), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: PowerNorm(3, alpha=1.5), ValueError, "alpha"),
        (lambda: PowerNorm(3, alpha_backward=-1.0), ValueError, "alpha_backward"),
        (lambda: PowerNorm(3, warmup=-1), ValueError, "warmup"),
        (lambda: PowerNorm(3, groups=2), ValueError, "groups=2"),
        (lambda: PowerNorm(3, eps=-1.0), ValueError, "eps"),
        (lambda: PowerNorm(3)(torch.ones(2, 4)), ValueError, "num_features=3"),
        (lambda: PowerNorm(3)(torch.ones(2, 3).int()), TypeError, "floating"),
        (lambda: PowerNorm(3)(torch.ones(2, 4, 3), torch.ones(2, 3)), ValueError, "mask has shape"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
