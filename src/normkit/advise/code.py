"""Code to paste, for what was chosen."""

from __future__ import annotations

from dataclasses import fields

from normkit.advise.norms import NormChoice
from normkit.advise.request import Request
from normkit.spec import NAMED, NormSpec

_KINDS = {"decoder": "decoder", "encoder": "encoder", "encoder_decoder": "encoder_decoder", "vit": "encoder"}


def write_code(r: Request, chosen: NormChoice, wiring: str | None, qk_norm: str) -> str:
    """Runnable Python that builds the norm (and for a transformer the stack) and the optimizer's groups."""
    lines = ["import torch", "import normkit", ""]
    if chosen.spec is None:
        lines += [f"model = torch.nn.GRU({r.width}, {r.width}, num_layers={min(r.depth, 4)})"]
    elif chosen.form == "cell":
        cell = "LayerNormGRU" if chosen.spec.kind == "layer" else "RMSNormGRU"
        lines += [f"model = normkit.nn.{cell}({r.width}, {r.width})"]
    elif chosen.form == "adaptive":
        lines += [
            f"branch_norm = normkit.nn.AdaLayerNormZero({r.width}, {r.width}, eps={chosen.spec.eps:g})",
            "model = branch_norm  # one for each branch: y, gate = norm(x, condition); x = x + gate * branch(y)",
        ]
    else:
        lines += [f"spec = {spell(chosen.spec)}"]
        lines += _stack(r, wiring, qk_norm) if wiring is not None else _image(r, chosen)
    if r.dtype == "float64":
        lines += ["model = model.to(torch.float64)"]
    lines += ["optimizer = torch.optim.AdamW(normkit.param_groups(model, weight_decay=0.1), lr=3e-4)"]
    if r.dtype in ("bfloat16", "float16"):
        lines += [
            "# weights stay float32: small updates round away in half precision; the forward and the loss run in this",
            f"autocast = torch.autocast({r.hardware!r}, dtype=torch.{r.dtype})",
        ]
    if r.dtype == "float16":
        lines += [f"scaler = torch.amp.GradScaler({r.hardware!r})  # small gradients underflow in float16"]
    return "\n".join(lines) + "\n"


def _stack(r: Request, wiring: str, qk_norm: str) -> list[str]:
    heads = next(h for h in (8, 4, 2, 1) if (r.width % h == 0 and (r.width // h) % 2 == 0) or h == 1)
    rotary = (r.width // heads) % 2 == 0
    extra = f", qk_norm={qk_norm!r}" if qk_norm == "head" else ""
    extra += "" if rotary else ', positions="learned"'
    return [
        "model = normkit.Transformer(",
        f"    vocab=32000, dim={r.width}, depth={r.depth}, heads={heads}, kind={_KINDS[r.architecture]!r},",
        f"    placement={wiring!r}, norm=spec{extra},",
        ")  # initialized as the placement prescribes",
    ]


def _image(r: Request, chosen: NormChoice) -> list[str]:
    if r.architecture != "cnn":
        return [f"model = normkit.nn.build(spec, {r.width})"]
    lines = [
        f"norm = normkit.nn.build(spec, {r.width})",
        f"model = torch.nn.Sequential(torch.nn.Conv2d(3, {r.width}, 3, padding=1, bias=False), norm, torch.nn.ReLU())",
    ]
    if chosen.form == "sync":
        lines += ["model = normkit.nn.convert_sync_batchnorm(model)  # after torch.distributed.init_process_group"]
    return lines


def spell(spec: NormSpec) -> str:
    """A spec as Python: a named convention with what differs, or its own fields."""
    for name, named in NAMED.items():
        if named == spec:
            return f"normkit.spec.{name.upper()}"
    default = NormSpec()
    given = [
        f"{f.name}={getattr(spec, f.name)!r}" for f in fields(spec) if getattr(spec, f.name) != getattr(default, f.name)
    ]
    return f"normkit.NormSpec({', '.join(given)})"
