"""GRU and LSTM with normalized gates: cells and full sequences, LayerNorm and RMSNorm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normkit.checks import check_floating
from normkit.functional import norm
from normkit.functional.other import linear
from normkit.nn._shared import Device, count, empty, fill, number
from normkit.spec import NormSpec

State = tuple[Tensor, Tensor]


class _Cell(nn.Module):
    """Parameters and checks of every cell. torch's names and gate order; the biases are those of the norms."""

    _gates: int
    _centered: bool
    bias_ih: nn.Parameter | None
    bias_hh: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
        per_gate: bool = False,
    ) -> None:
        super().__init__()
        self.input_size = count("input_size", input_size)
        self.hidden_size = count("hidden_size", hidden_size)
        self.per_gate = per_gate
        self.spec = NormSpec(centered=self._centered, eps=eps, has_bias=bias)
        rows = self._gates * hidden_size
        self.weight_ih = empty((rows, input_size), device, dtype)
        self.weight_hh = empty((rows, hidden_size), device, dtype)
        self.gain_ih = empty((rows,), device, dtype)
        self.gain_hh = empty((rows,), device, dtype)
        for name in ("bias_ih", "bias_hh"):
            self.register_parameter(name, empty((rows,), device, dtype) if bias else None)

    def reset_parameters(self) -> None:
        """Weights uniform in +-1 / sqrt(hidden_size), as torch; gains 1, biases 0, as the paper."""
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight_ih, -bound, bound)
        nn.init.uniform_(self.weight_hh, -bound, bound)
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("gain"):
                fill(parameter, 1.0)
            elif name.startswith("bias"):
                fill(parameter, 0.0)

    def _normalize(self, z: Tensor, gain: Tensor, bias: Tensor | None, gates: int) -> Tensor:
        """The norm of ``gates`` stacked gates, together or each by itself."""
        spec = self.spec.replace(groups=gates if self.per_gate else 1)
        return norm(z, spec, gain, bias)

    def _check(self, x: Tensor, name: str, state: Tensor) -> None:
        check_floating("input", x)
        check_floating(name, state)
        if x.dim() not in (1, 2) or x.shape[-1] != self.input_size:
            raise ValueError(f"input must be (I,) or (B, I) with I = {self.input_size}; got shape {tuple(x.shape)}")
        wanted = (*x.shape[:-1], self.hidden_size)
        if tuple(state.shape) != wanted:
            raise ValueError(f"{name} has shape {tuple(state.shape)}; input of shape {tuple(x.shape)} needs {wanted}")

    def _zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros((*x.shape[:-1], self.hidden_size))

    def _projections(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """W_ih x and W_hh h, in float32 at least: what is normalized is not rounded first."""
        a, b = linear(x, self.weight_ih), linear(h, self.weight_hh)
        return (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (a, b))  # type: ignore[return-value]

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}, bias={self.bias_ih is not None}, eps={self.spec.eps}"
        return f"{text}, per_gate=True" if self.per_gate else text


class _GRUCell(_Cell):
    _gates = 3

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
        per_gate: bool = False,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device, dtype, eps=eps, per_gate=per_gate)
        self.reset_parameters()

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """One step: the next hidden state."""
        check_floating("input", input)
        h = self._zeros(input) if hx is None else hx
        self._check(input, "hx", h)
        split = 2 * self.hidden_size
        from_input, from_hidden = self._projections(input, h)
        parts = []
        for z, gain, bias in (
            (from_input, self.gain_ih, self.bias_ih),
            (from_hidden, self.gain_hh, self.bias_hh),
        ):
            gates = self._normalize(z[..., :split], gain[:split], None if bias is None else bias[:split], 2)
            new = self._normalize(z[..., split:], gain[split:], None if bias is None else bias[split:], 1)
            parts.append((gates, new))
        (gates_x, new_x), (gates_h, new_h) = parts
        reset, update = torch.sigmoid(gates_x + gates_h).chunk(2, -1)
        new = torch.tanh(new_x + reset * new_h)
        return ((1 - update) * h.to(new.dtype) + update * new).to(h.dtype)


class _LSTMCell(_Cell):
    _gates = 4
    bias_c: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
        per_gate: bool = False,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device, dtype, eps=eps, per_gate=per_gate)
        self.gain_c = empty((hidden_size,), device, dtype)
        self.register_parameter("bias_c", empty((hidden_size,), device, dtype) if bias else None)
        self.reset_parameters()

    def forward(self, input: Tensor, hx: State | None = None) -> State:
        """One step: the next (hidden state, cell state)."""
        check_floating("input", input)
        h, c = (self._zeros(input), self._zeros(input)) if hx is None else hx
        self._check(input, "hx[0]", h)
        self._check(input, "hx[1]", c)
        from_input, from_hidden = self._projections(input, h)
        gates = self._normalize(from_input, self.gain_ih, self.bias_ih, 4)
        gates = gates + self._normalize(from_hidden, self.gain_hh, self.bias_hh, 4)
        enter, forget, new, leave = gates.chunk(4, -1)
        cell = torch.sigmoid(forget) * c.to(gates.dtype) + torch.sigmoid(enter) * torch.tanh(new)
        hidden = torch.sigmoid(leave) * torch.tanh(self._normalize(cell, self.gain_c, self.bias_c, 1))
        return hidden.to(h.dtype), cell.to(c.dtype)


class LayerNormGRUCell(_GRUCell):
    r"""A GRU cell with layer-normalized gates (Ba et al. 2016, arXiv:1607.06450, supplement).

    With N a LayerNorm with a gain and bias of its own at each place::

        (r, z) = sigmoid(N(W_rz x) + N(U_rz h))        the two gates share one statistic
        n = tanh(N(W_n x) + r * N(U_n h))
        h' = (1 - z) * h + z * n

    Args:
        input_size: I.
        hidden_size: H.
        bias: whether the norms have biases.
        device: where the parameters live.
        dtype: their dtype.
        eps: of every norm.
        per_gate: True gives r and z a statistic each.

    Shape:
        input ``(B, I)`` or ``(I,)``, hx ``(B, H)`` or ``(H,)`` (zeros if None); returns h' of hx's shape and dtype.

    Raises:
        ValueError, TypeError: an argument outside its domain, or inputs that do not fit.

    Half precision: the linear maps run in the wider dtype of input and weight, norms and gates in float32; the state is
    rounded once a step, to its own dtype. Differs from `torch.nn.GRUCell`, whose constructor, call, parameter names and
    gate order (r, z, n) it has: the norms (``gain_ih``, ``gain_hh``); ``bias_ih`` and ``bias_hh`` are added after them;
    z is the share of the new state, as in the paper, where torch's z is the share of the old one. ``spec`` is that of
    every norm inside.
    """

    _centered = True


class RMSNormGRUCell(_GRUCell):
    """`LayerNormGRUCell` with RMSNorm (arXiv:1910.07467) in place of LayerNorm; all else equal."""

    _centered = False


class LayerNormLSTMCell(_LSTMCell):
    r"""An LSTM cell with layer-normalized gates and cell (Ba et al. 2016, arXiv:1607.06450, supplement).

    With N a LayerNorm with a gain and bias of its own at each place::

        (i, f, g, o) = N(W x) + N(U h)                 the four gates share one statistic
        c' = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h' = sigmoid(o) * tanh(N(c'))

    Args:
        input_size: I.
        hidden_size: H.
        bias: whether the norms have biases.
        device: where the parameters live.
        dtype: their dtype.
        eps: of every norm.
        per_gate: True gives every gate a statistic of its own.

    Shape:
        input ``(B, I)`` or ``(I,)``, hx a pair of ``(B, H)`` or ``(H,)`` (zeros if None); returns (h', c') of their
        shapes and dtypes.

    Raises:
        ValueError, TypeError: an argument outside its domain, or inputs that do not fit.

    Half precision: as `LayerNormGRUCell`; a float32 c beside half-precision input stays float32. Differs from
    `torch.nn.LSTMCell`, whose constructor, call, parameter names and gate order (i, f, g, o) it has: the norms
    (``gain_ih``, ``gain_hh``, ``gain_c``, ``bias_c``); ``bias_ih`` and ``bias_hh`` are added after them, so the paper's
    further bias b, which they contain, is left away. ``spec`` is that of every norm inside.
    """

    _centered = True


class RMSNormLSTMCell(_LSTMCell):
    """`LayerNormLSTMCell` with RMSNorm (arXiv:1910.07467) in place of LayerNorm; all else equal."""

    _centered = False


class _Sequence(nn.Module):
    """Cells over time, layers and directions: torch's constructor, call and result, without packed sequences."""

    _cell: type[_Cell]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
        per_gate: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_layers = count("num_layers", num_layers)
        self.batch_first = batch_first
        self.dropout = number("dropout", dropout, 0.0, 1.0)
        self.directions = 2 if bidirectional else 1
        sizes = [input_size] + [self.directions * hidden_size] * (num_layers - 1)
        self.cells = nn.ModuleList(
            self._cell(size, hidden_size, bias, device, dtype, eps=eps, per_gate=per_gate)
            for size in sizes
            for _ in range(self.directions)
        )

    @property
    def spec(self) -> NormSpec:
        """The spec of every norm inside."""
        return self.cells[0].spec  # type: ignore[return-value]

    def reset_parameters(self) -> None:
        """As the cells."""
        for cell in self.cells:
            cell.reset_parameters()  # type: ignore[operator]

    def forward(self, input: Tensor, hx: Tensor | State | None = None) -> tuple[Tensor, Tensor | State]:
        """The last layer's hidden states at every step, and every layer's final state."""
        check_floating("input", input)
        if input.dim() not in (2, 3):
            raise ValueError(f"input must be (T, I) or (T, B, I); got shape {tuple(input.shape)}")
        time = 1 if self.batch_first and input.dim() == 3 else 0
        x = input.movedim(time, 0)
        states = self._unpack(x, hx)
        finals: list = []
        for layer in range(self.num_layers):
            outputs = []
            for direction in range(self.directions):
                index = layer * self.directions + direction
                steps = x.flip(0) if direction else x
                out, state = self._run(self.cells[index], steps, states[index])
                outputs.append(out.flip(0) if direction else out)
                finals.append(state)
            x = torch.cat(outputs, -1)
            if self.dropout and layer < self.num_layers - 1:
                x = nn.functional.dropout(x, self.dropout, self.training)
        return x.movedim(0, time), self._pack(finals)

    def _run(self, cell: nn.Module, steps: Tensor, state: Tensor | State) -> tuple[Tensor, Tensor | State]:
        out = []
        for step in steps.unbind(0):
            state = cell(step, state)
            out.append(state[0] if isinstance(state, tuple) else state)
        if not out:
            return steps.new_empty((0, *steps.shape[1:-1], self.hidden_size)), state
        return torch.stack(out), state

    def _unpack(self, x: Tensor, hx: Tensor | State | None) -> list:
        wanted = (self.num_layers * self.directions, *x.shape[1:-1], self.hidden_size)
        if hx is None:
            zeros = x.new_zeros(wanted)
            hx = (zeros, zeros) if self._cell._gates == 4 else zeros
        if isinstance(hx, tuple) != (self._cell._gates == 4):
            wanted_kind = "a pair (h, c)" if self._cell._gates == 4 else "one tensor"
            raise TypeError(f"hx must be {wanted_kind}; got {type(hx).__name__}")
        for state in hx if isinstance(hx, tuple) else (hx,):
            check_floating("hx", state)
            if tuple(state.shape) != wanted:
                raise ValueError(f"hx has shape {tuple(state.shape)}; input needs {wanted}")
        if isinstance(hx, tuple):
            return list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
        return list(hx.unbind(0))

    def _pack(self, finals: list) -> Tensor | State:
        if isinstance(finals[0], tuple):
            return torch.stack([h for h, _ in finals]), torch.stack([c for _, c in finals])
        return torch.stack(finals)

    def extra_repr(self) -> str:
        return f"num_layers={self.num_layers}, batch_first={self.batch_first}, bidirectional={self.directions == 2}"


class LayerNormGRU(_Sequence):
    """`LayerNormGRUCell` over a sequence, in layers and directions: ``h_t = cell(x_t, h_(t-1))``.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: how many layers; each reads the outputs of the one before.
        bias: whether the norms have biases.
        batch_first: True for ``(B, T, I)``.
        dropout: between layers, in training.
        bidirectional: whether every layer also runs backwards; L is ``num_layers``, or twice that.
        device: where the parameters live.
        dtype: their dtype.
        eps: of every norm.
        per_gate: True gives every gate a statistic of its own.

    Shape:
        input ``(T, B, I)`` or ``(T, I)``; hx ``(L, B, H)`` or ``(L, H)`` (zeros if None). Returns the outputs
        ``(T, B, H)`` (or ``2 H``) and the last states, of hx's shape.

    Raises:
        ValueError, TypeError: an argument outside its domain, or inputs that do not fit.

    Differs from `torch.nn.GRU`, whose constructor, call and result it has: the cells (`LayerNormGRUCell`, under
    ``cells``), and it takes no packed sequences.
    """

    _cell = LayerNormGRUCell


class RMSNormGRU(_Sequence):
    """`LayerNormGRU` with `RMSNormGRUCell` (arXiv:1910.07467) in place of `LayerNormGRUCell`; all else equal."""

    _cell = RMSNormGRUCell


class LayerNormLSTM(_Sequence):
    """`LayerNormLSTMCell` over a sequence, in layers and directions: ``h_t = cell(x_t, h_(t-1))``.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: how many layers; each reads the outputs of the one before.
        bias: whether the norms have biases.
        batch_first: True for ``(B, T, I)``.
        dropout: between layers, in training.
        bidirectional: whether every layer also runs backwards; L is ``num_layers``, or twice that.
        device: where the parameters live.
        dtype: their dtype.
        eps: of every norm.
        per_gate: True gives every gate a statistic of its own.

    Shape:
        input ``(T, B, I)`` or ``(T, I)``; hx a pair of ``(L, B, H)`` or ``(L, H)`` (zeros if None). Returns the outputs
        ``(T, B, H)`` (or ``2 H``) and the last states, of hx's shape.

    Raises:
        ValueError, TypeError: an argument outside its domain, or inputs that do not fit.

    Differs from `torch.nn.LSTM`, whose constructor, call and result it has: the cells (`LayerNormLSTMCell`, under
    ``cells``), and it takes no packed sequences.
    """

    _cell = LayerNormLSTMCell


class RMSNormLSTM(_Sequence):
    """`LayerNormLSTM` with `RMSNormLSTMCell` (arXiv:1910.07467) in place of `LayerNormLSTMCell`; all else equal."""

    _cell = RMSNormLSTMCell
