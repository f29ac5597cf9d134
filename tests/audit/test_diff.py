"""diff: norms matched by place, differing fields, and the norm at which two models part."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from normkit.audit import diff
from normkit.audit.compare.activations import relative_error
from normkit.audit.compare.match import match
from normkit.audit.load import load
from normkit.cli import app

DIM, HEADS = 12, 3


class Rms(nn.Module):
    def __init__(self, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.w, self.eps, self.offset = nn.Parameter(torch.rand(DIM) + 0.5 - offset), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (self.w + self.offset)


class Original(nn.Module):
    def __init__(self, layers: int = 3, **norm: float) -> None:
        super().__init__()
        self.embed = nn.Linear(5, DIM)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attn_norm": Rms(**norm), "map": nn.Linear(DIM, DIM), "ffn_norm": Rms(**norm),
                           "up": nn.Linear(DIM, 20), "down": nn.Linear(20, DIM)})
            for _ in range(layers)
        )  # fmt: skip
        self.last = Rms(**norm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for b in self.blocks:
            x = x + b["map"](b["attn_norm"](x))
            x = x + b["down"](b["up"](b["ffn_norm"](x)).relu())
        return self.last(x)


class Port(nn.Module):
    """The same function under other names, written in another order of operations, norms as torch's."""

    def __init__(self, original: Original) -> None:
        super().__init__()
        self.tok = copy.deepcopy(original.embed)
        self.h = nn.ModuleList()
        for b in original.blocks:
            layer = nn.Module()
            layer.n1, layer.n2 = self.norm(b["attn_norm"]), self.norm(b["ffn_norm"])
            layer.a, layer.u, layer.d = (copy.deepcopy(b[k]) for k in ("map", "up", "down"))
            self.h.append(layer)
        self.ln_f = self.norm(original.last)

    @staticmethod
    def norm(original: Rms) -> nn.RMSNorm:
        made = nn.RMSNorm(DIM, eps=original.eps)
        made.weight.data.copy_(original.w + original.offset)
        return made

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.tok(inputs)
        for layer in self.h:
            x = layer.a(layer.n1(x)) + x
            x = layer.d(torch.relu(layer.u(layer.n2(x)))) + x
        return self.ln_f(x)


def models(**norm: float) -> tuple[Original, Port, Tensor]:
    torch.manual_seed(2)
    original = Original(**norm)
    return original, Port(original), torch.randn(2, 6, 5)


def test_a_faithful_port_is_the_same_under_other_names() -> None:
    a, b, x = models()
    found = diff(a, b, x)
    assert found.ran and found.parting is None and found.same() is False  # half precision does differ
    assert all(set(p.fields) <= {"rounding", "output_dtype"} for p in found.pairs)
    assert all(p.gain is not None and p.gain < 1e-6 for p in found.pairs)
    assert [(p.a.name, p.b.name) for p in found.pairs if p.a and p.b][:2] == [
        ("blocks.0.attn_norm", "h.0.n1"), ("blocks.0.ffn_norm", "h.0.n2"),
    ]  # fmt: skip
    assert found.output is not None and found.output < 1e-6


def test_a_model_is_the_same_as_its_copy() -> None:
    a, _, x = models()
    assert diff(a, copy.deepcopy(a), x).same()


def test_the_norm_itself_parts_over_its_eps() -> None:
    a, b, x = models()
    b.h[1].n2.eps = 1e-5
    found = diff(a, b, x).parting
    assert found is not None and found.pair.name == "blocks.1.ffn_norm" and found.side == "output"
    assert found.after == "blocks.1.attn_norm"
    assert "eps" in found.sentence() and found.pair.fields["eps"][1] == pytest.approx(1e-5, rel=0.02)


def test_something_before_a_norm_parts() -> None:
    a, b, x = models()
    with torch.no_grad():
        b.h[1].a.weight[0, 0] += 1e-3
    found = diff(a, b, x).parting
    assert found is not None and (found.pair.name, found.side) == ("blocks.1.ffn_norm", "input")
    assert found.after == "blocks.1.attn_norm"


def test_a_gain_read_in_the_other_convention() -> None:
    """w + 1 stored, read as w: the specs differ by the offset and the effective gains by one."""
    a, b, x = models(offset=1.0)
    for layer, block in zip(b.h, a.blocks, strict=True):
        layer.n1.weight.data.copy_(block["attn_norm"].w)
    found = diff(a, b, x)
    pairs = {p.name: p for p in found.pairs}
    assert pairs["blocks.0.attn_norm"].fields["weight_offset"] == (1.0, 0.0)
    assert pairs["blocks.0.attn_norm"].gain is not None and pairs["blocks.0.attn_norm"].gain > 0.5
    assert pairs["blocks.0.ffn_norm"].gain is not None and pairs["blocks.0.ffn_norm"].gain < 1e-6
    assert found.parting is not None and found.parting.pair.name == "blocks.0.attn_norm"


def test_a_norm_that_only_one_has() -> None:
    a, b, x = models()
    b.ln_f = nn.Identity()
    found = diff(a, b, x)
    (missing,) = [p for p in found.pairs if p.b is None]
    assert missing.name == "last"
    assert [p.name for p in found.pairs if p.a is None] == []
    deeper = Original(layers=4)
    unmatched = [p.name for p in diff(a, deeper, x).pairs if p.a is None or p.b is None]
    assert len(unmatched) == 2 and diff(a, deeper, x).parting is not None


def test_rounding_is_no_parting_and_a_tolerance_can_be_given() -> None:
    a, b, x = models()
    with torch.no_grad():
        b.h[0].a.weight.mul_(1 + 1e-5)
    assert diff(a, b, x).parting is not None
    assert diff(a, b, x, tolerance=1e-3).parting is None


def test_half_precision_models_are_compared_in_float32() -> None:
    a, b, x = models()
    b = Port(a.bfloat16().float())
    assert diff(a.bfloat16(), b, x.bfloat16(), inputs_b=(x.bfloat16().float(),)).parting is None
    assert next(a.parameters()).dtype is torch.bfloat16


def test_the_models_are_left_as_they_were() -> None:
    a, b, x = models()
    before = {k: v.clone() for k, v in (*a.state_dict().items(), *b.state_dict().items())}
    diff(a, b, x)
    after = a.state_dict() | b.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*a.modules(), *b.modules()))


def test_layouts_that_differ_are_brought_together() -> None:
    x = torch.randn(2, 3, 5, 4)
    assert relative_error(x, x.transpose(1, 2).contiguous()) == 0
    assert relative_error(x, x.reshape(6, 20)) == 0
    assert relative_error(x, x[:1]) is None
    assert relative_error(torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, -torch.inf])) == 0
    assert relative_error(torch.ones(2), torch.tensor([1.0, torch.nan])) == float("inf")


def test_alignment_keeps_order() -> None:
    a = survey_norms(Original(2))
    b = survey_norms(Original(3))
    pairs = match(a, b)
    assert [x.name for x, _ in pairs if x is not None] == [n.name for n in a]
    assert [y.name for _, y in pairs if y is not None] == [n.name for n in b]
    assert pairs[-1][0] is a[-1] and pairs[-1][1] is b[-1]


def survey_norms(model: nn.Module) -> Any:
    from normkit.audit.core import survey

    return survey(model, (torch.randn(2, 6, 5),), {}).norms


# ---- end to end ----


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["diff", *args])


def test_a_real_model_whose_port_went_wrong() -> None:
    """One LayerNorm eps of a pretrained model: 1e-12 in the original, 1e-5 in the port."""
    original, port = load("minilm"), load("minilm")
    assert diff(original.model, port.model, **original.kwargs).same()
    port.model.get_submodule("encoder.layer.2.attention.output.LayerNorm").eps = 1e-5
    found = diff(original.model, port.model, **original.kwargs)
    assert found.parting is not None and found.parting.side == "output"
    assert found.parting.pair.name == "encoder.layer.2.attention.output.LayerNorm"
    text = str(found)
    assert "eps 1e-12 / 1e-05" in text.replace("9.99e-13", "1e-12") or "eps" in text
    json.dumps(found.to_dict(), allow_nan=False)


def test_checkpoints_on_the_command_line(tmp_path: Path) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=99,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    model.save_pretrained(first)
    model.save_pretrained(second)
    same = run(first, second)
    assert same.exit_code == 0 and "the same at every norm" in same.output
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = 2.5
    model.save_pretrained(second)
    found = json.loads(run(first, second, "--json", "-").stdout)
    assert found["parting"]["a"] == "model.layers.1.input_layernorm" and found["parting"]["side"] == "output"
    changed = [p["a"] for p in found["pairs"] if p["gain"] > 1e-6]
    assert changed == ["model.layers.1.input_layernorm"]
    table = run(first, second)
    assert table.exit_code == 1 and "weights" in table.output


def test_two_types_without_weights_compare_by_spec() -> None:
    result = run("llama", "gemma")
    assert result.exit_code == 1
    assert "weight_offset 0.0 / 1.0" in result.output and "meta device" in result.output


def test_what_cannot_be_had() -> None:
    result = run("minilm", "./nowhere")
    assert result.exit_code == 2 and "no folder" in result.stderr and "Traceback" not in result.output
