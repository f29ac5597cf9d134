"""GRU and LSTM with normalized gates, against the equations of Ba et al. 2016 and against torch's wiring."""

import pytest
import torch
from torch import nn
from transcribe import assert_agree, randn, trained

from normkit import nn as N

GRU_CELLS = [N.LayerNormGRUCell, N.RMSNormGRUCell]
LSTM_CELLS = [N.LayerNormLSTMCell, N.RMSNormLSTMCell]
SEQUENCES = [N.LayerNormGRU, N.RMSNormGRU, N.LayerNormLSTM, N.RMSNormLSTM]


def standardized(z, gain, bias, centered, parts=1):
    """LN(z; gain, bias) of one vector, whole or in equal parts."""
    out, size = [], len(z) // parts
    for p in range(parts):
        part = z[p * size : (p + 1) * size]
        mean = sum(part) / size if centered else 0.0
        out.append((part - mean) / torch.sqrt(sum((v - mean) ** 2 for v in part) / size + 1e-5))
    return torch.cat(out) * gain + (0 if bias is None else bias)


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("per_gate", [False, True])
@pytest.mark.parametrize("make", GRU_CELLS)
def test_gru_equations(make, per_gate, bias):
    m = trained(make(3, 4, bias, dtype=torch.float64, per_gate=per_gate))
    size, parts, centered = 4, 2 if per_gate else 1, m.spec.centered

    def bias_of(vector, part):
        return None if vector is None else vector[part]

    def paper(x, h):
        out = []
        gates, new = slice(0, 2 * size), slice(2 * size, 3 * size)
        for xt, ht in zip(x, h, strict=True):
            rz = standardized(m.weight_hh[gates] @ ht, m.gain_hh[gates], bias_of(m.bias_hh, gates), centered, parts)
            rz = rz + standardized(
                m.weight_ih[gates] @ xt, m.gain_ih[gates], bias_of(m.bias_ih, gates), centered, parts
            )
            r, z = sigmoid(rz[:size]), sigmoid(rz[size:])
            candidate = standardized(m.weight_ih[new] @ xt, m.gain_ih[new], bias_of(m.bias_ih, new), centered)
            state = standardized(m.weight_hh[new] @ ht, m.gain_hh[new], bias_of(m.bias_hh, new), centered)
            out.append((1 - z) * ht + z * torch.tanh(candidate + r * state))
        return torch.stack(out)

    assert_agree(m, [randn(2, 3), randn(2, 4, seed=1)], paper)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("per_gate", [False, True])
@pytest.mark.parametrize("make", LSTM_CELLS)
def test_lstm_equations(make, per_gate, bias):
    m = trained(make(3, 4, bias, dtype=torch.float64, per_gate=per_gate))
    parts, centered = 4 if per_gate else 1, m.spec.centered

    def paper(x, hx):
        hs, cs = [], []
        for xt, ht, ct in zip(x, *hx, strict=True):
            gates = standardized(m.weight_hh @ ht, m.gain_hh, m.bias_hh, centered, parts)
            gates = gates + standardized(m.weight_ih @ xt, m.gain_ih, m.bias_ih, centered, parts)
            i, f, g, o = gates[:4], gates[4:8], gates[8:12], gates[12:]
            cell = sigmoid(f) * ct + sigmoid(i) * torch.tanh(g)
            cs.append(cell)
            hs.append(sigmoid(o) * torch.tanh(standardized(cell, m.gain_c, m.bias_c, centered)))
        return torch.stack(hs), torch.stack(cs)

    class Unpacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = m

        def forward(self, x, h, c):
            return self.cell(x, (h, c))

    assert_agree(Unpacked(), [randn(2, 3), randn(2, 4, seed=1), randn(2, 4, seed=2)], lambda x, h, c: paper(x, (h, c)))


def without_norms(monkeypatch):
    """Leave only gain and bias of every norm: then the cells must be torch's."""
    from normkit.nn import recurrent

    monkeypatch.setattr(recurrent, "norm", lambda z, spec, gain, bias: z * gain + (0 if bias is None else bias))


def torch_twin(ours, theirs):
    """Copy torch's weights; ours calls torch's update gate by its complement, so its rows change sign."""
    for index, cell in enumerate(ours.cells):
        layer, reverse = divmod(index, ours.directions)
        suffix = f"_l{layer}" + ("_reverse" if reverse else "")
        state = {name: getattr(theirs, name + suffix).detach().clone() for name in ("weight_ih", "weight_hh")}
        state |= {name: getattr(theirs, name + suffix).detach().clone() for name in ("bias_ih", "bias_hh")}
        if cell._gates == 3:
            rows = slice(cell.hidden_size, 2 * cell.hidden_size)
            for value in state.values():
                value[rows] *= -1
        missing, unexpected = cell.load_state_dict(state, strict=False)
        assert not unexpected and all(name.startswith(("gain", "bias_c")) for name in missing)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_wiring_is_torchs_once_the_norms_are_taken_out(kind, bidirectional, batch_first, monkeypatch):
    without_norms(monkeypatch)
    options = {"num_layers": 2, "bidirectional": bidirectional, "batch_first": batch_first, "dtype": torch.float64}
    theirs = getattr(nn, kind)(3, 4, **options)
    ours = getattr(N, f"LayerNorm{kind}")(3, 4, **options)
    torch_twin(ours, theirs)
    directions = 2 if bidirectional else 1
    x = randn(5, 2, 3)
    batch = 5 if batch_first else 2
    h = randn(2 * directions, batch, 4, seed=1)
    for hx in (None, h if kind == "GRU" else (h, randn(2 * directions, batch, 4, seed=2))):
        for a, b in zip(ours(x, hx), theirs(x, hx), strict=True):
            torch.testing.assert_close(a, b)
    single = x[:, 0]
    for a, b in zip(ours(single), theirs(single), strict=True):
        torch.testing.assert_close(a, b)


def test_parameter_names_are_torchs_and_start_as_stated():
    m = N.LayerNormLSTMCell(3, 4)
    torch_names = set(nn.LSTMCell(3, 4).state_dict())
    assert torch_names <= set(m.state_dict())
    assert set(m.state_dict()) - torch_names == {"gain_ih", "gain_hh", "gain_c", "bias_c"}
    assert m.weight_ih.abs().max() <= 0.5 and m.weight_ih.abs().max() > 0.1
    assert torch.equal(m.gain_c, torch.ones(4)) and not m.bias_hh.any()


@pytest.mark.parametrize("make", GRU_CELLS + LSTM_CELLS + SEQUENCES)
def test_spec_is_what_the_name_says(make):
    assert make(3, 4).spec.kind == ("rms" if make.__name__.startswith("RMS") else "layer")


@pytest.mark.parametrize("make", GRU_CELLS + LSTM_CELLS)
def test_default_state_is_zero_and_single_rows_work(make):
    m = trained(make(3, 4, dtype=torch.float64))
    x = randn(2, 3)
    zeros = torch.zeros(2, 4, dtype=torch.float64)
    given = m(x, zeros if make in GRU_CELLS else (zeros, zeros))
    for a, b in zip(m(x) if make in LSTM_CELLS else [m(x)], given if make in LSTM_CELLS else [given], strict=True):
        assert torch.equal(a, b)
    one = m(x[0])
    torch.testing.assert_close((one if make in GRU_CELLS else one[0]), (given if make in GRU_CELLS else given[0])[0])


def test_scale_of_the_weights_does_not_matter():
    """What the norms are for: the gates do not see the size of the weights."""
    m = trained(N.LayerNormGRUCell(3, 64, dtype=torch.float64))
    x, h = randn(2, 3), randn(2, 64, seed=1)
    before = m(x, h)
    with torch.no_grad():
        m.weight_ih.mul_(50)
        m.weight_hh.mul_(50)
    torch.testing.assert_close(m(x, h), before, rtol=1e-3, atol=1e-4)


def test_states_keep_their_dtype():
    m = N.LayerNormLSTMCell(3, 4, dtype=torch.bfloat16)
    x = randn(2, 3, dtype=torch.bfloat16)
    h, c = m(x, (torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(2, 4)))
    assert h.dtype == torch.bfloat16 and c.dtype == torch.float32
    out, state = N.RMSNormGRU(3, 4, dtype=torch.float64)(x.unsqueeze(0))
    assert out.dtype == state.dtype == torch.bfloat16


@pytest.mark.parametrize("make", SEQUENCES)
def test_sequence_is_the_cell_repeated_and_may_be_empty(make):
    m = trained(make(3, 4, dtype=torch.float64))
    x = randn(5, 2, 3)
    out, _ = m(x)
    state = None
    for t in range(5):
        state = m.cells[0](x[t], state)
        torch.testing.assert_close(out[t], state[0] if isinstance(state, tuple) else state)
    empty, _ = m(x[:0])
    assert empty.shape == (0, 2, 4)
    nothing, _ = m(x[:, :0])
    assert nothing.shape == (5, 0, 4)


def test_dropout_between_layers_only_in_training():
    m = N.LayerNormGRU(3, 8, num_layers=2, dropout=0.5)
    x = randn(4, 2, 3, dtype=torch.float32)
    assert not torch.equal(m(x)[0], m(x)[0])
    m.eval()
    assert torch.equal(m(x)[0], m(x)[0])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: N.LayerNormGRUCell(0, 4), ValueError, "input_size"),
        (lambda: N.LayerNormGRUCell(3, 4, eps=-1.0), ValueError, "eps"),
        (lambda: N.LayerNormGRUCell(3, 4)(torch.ones(2, 4)), ValueError, "I = 3"),
        (lambda: N.LayerNormGRUCell(3, 4)(torch.ones(2, 3).int()), TypeError, "floating"),
        (lambda: N.LayerNormGRUCell(3, 4)(torch.ones(2, 3), torch.ones(3, 4)), ValueError, "hx has shape"),
        (
            lambda: N.LayerNormLSTMCell(3, 4)(torch.ones(2, 3), (torch.ones(2, 4), torch.ones(2, 5))),
            ValueError,
            r"hx\[1\]",
        ),
        (lambda: N.LayerNormLSTM(3, 4, num_layers=0), ValueError, "num_layers"),
        (lambda: N.LayerNormLSTM(3, 4, dropout=1.5), ValueError, "dropout"),
        (lambda: N.LayerNormLSTM(3, 4)(torch.ones(2)), ValueError, r"\(T, B, I\)"),
        (lambda: N.LayerNormGRU(3, 4)(torch.ones(5, 2, 3), torch.ones(2, 2, 4)), ValueError, "hx has shape"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
