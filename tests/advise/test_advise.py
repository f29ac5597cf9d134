"""Situations with the expected choice and its source; flips with the lab's results; refusals; random requests."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any, get_args

import pytest
import torch

from normkit.advise import Advice, Choice, Refused, Request, Results, advise
from normkit.advise.norms import least_batch
from normkit.advise.request import Architecture, DType, Hardware, Norm, Task
from normkit.lab.claim import Verdict
from normkit.placement import known, placement
from normkit.spec import NAMED

RISES = {"batch_8_low": 0.2, "batch_4_low": 0.6, "batch_2_low": 2.1}
HOLDING = (
    "rms-quality", "rms-speed", "warm-up", "xiong-gradient", "sandwich-bound", "qk-norm", "recurrent-layernorm",
    "batchnorm-batch-1-2", "batchnorm-padding", "batchnorm-train-eval", "batchnorm-decode", "gain-offset-decay",
    "eps-half", "eps-defaults", "fp16-overflow", "gemma-offset-port", "time-against-flops",
)  # fmt: skip
MADE_UP = Results(
    {c: Verdict("holds", "made up for this test") for c in HOLDING}
    | {
        "batchnorm-batch-size": Verdict("holds within limits", "made up for this test", dict(RISES)),
        "post-better": Verdict("not reproduced at this scale", "made up for this test"),
    }
)

SITUATIONS: list[tuple[dict[str, Any], dict[str, str], str, str]] = [
    # the request; topic -> what its value starts with; the topic whose source is looked at, and that source
    ({"architecture": "decoder"}, {"norm": "RMSNorm", "placement": "pre"}, "norm", "rms-quality"),
    ({"architecture": "decoder", "depth": 24}, {"placement": "pre", "qk-norm": "none"}, "placement", "xiong-gradient"),
    ({"architecture": "decoder", "depth": 40}, {"placement": "pre", "qk-norm": "head"}, "qk-norm", "qk-norm"),
    ({"architecture": "decoder", "depth": 80}, {"placement": "sandwich"}, "placement", "sandwich-bound"),
    ({"architecture": "decoder", "high_learning_rate": True}, {"placement": "sandwich", "qk-norm": "head"},
     "placement", "sandwich-bound"),
    ({"architecture": "decoder", "placement": "post"}, {"placement": "post", "warm-up": "4000"}, "warm-up", "warm-up"),
    ({"architecture": "decoder", "placement": "deepnorm", "depth": 100},
     {"initialization": "Xavier normal, value path times 0.188", "warm-up": "2 /"}, "initialization", "2203.00555"),
    ({"architecture": "decoder", "placement": "sub"}, {"initialization": "Xavier normal, value path times 1.78"},
     "initialization", "2210.06423"),
    ({"architecture": "decoder", "no_warm_up": True}, {"placement": "pre", "warm-up": "none"}, "warm-up", "warm-up"),
    ({"architecture": "decoder", "dtype": "bfloat16"}, {"precision": "bfloat16 in and out, statistics in float32"},
     "precision", "fp16-overflow"),
    ({"architecture": "decoder", "dtype": "float16"}, {"eps": "1e-06"}, "eps", "eps-half"),
    ({"architecture": "decoder", "dtype": "float64"}, {"precision": "float64"}, "precision", "fp16-overflow"),
    ({"architecture": "decoder", "task": "finetune", "checkpoint": "gemma", "checkpoint_placement": "sandwich"},
     {"norm": "RMSNorm as gemma", "placement": "sandwich", "qk-norm": "as in"}, "norm", "gemma-offset-port"),
    ({"architecture": "encoder", "task": "finetune", "checkpoint": "torch_layer", "checkpoint_placement": "post"},
     {"norm": "LayerNorm as torch_layer", "placement": "post", "warm-up": "4000"}, "placement", "2002.04745"),
    ({"architecture": "decoder", "norm": "layer"}, {"norm": "LayerNorm", "eps": "1e-05"}, "norm", "1607.06450"),
    ({"architecture": "encoder"}, {"norm": "RMSNorm", "weight decay": "none on gains"}, "weight decay",
     "gain-offset-decay"),
    ({"architecture": "encoder_decoder"}, {"norm": "RMSNorm", "placement": "pre"}, "placement", "warm-up"),
    ({"architecture": "vit", "task": "classify"}, {"norm": "RMSNorm", "placement": "pre"}, "norm", "rms-quality"),
    ({"architecture": "vit", "task": "diffusion"}, {"norm": "LayerNorm, adaptive"}, "norm", "2212.09748"),
    ({"architecture": "cnn", "task": "classify", "batch": 64}, {"norm": "BatchNorm", "initialization": "He normal"},
     "norm", "batchnorm-batch-size"),
    ({"architecture": "cnn", "task": "classify", "batch": 2}, {"norm": "GroupNorm with 32"}, "norm",
     "batchnorm-batch-1-2"),
    ({"architecture": "cnn", "task": "classify", "batch": 1, "width": 72}, {"norm": "GroupNorm with 24"}, "norm",
     "1803.08494"),
    ({"architecture": "cnn", "task": "detect", "batch": 2, "devices": 8}, {"norm": "BatchNorm, synchronized"}, "norm",
     "1711.07240"),
    ({"architecture": "cnn", "task": "detect", "batch": 2}, {"norm": "GroupNorm"}, "norm", "1803.08494"),
    ({"architecture": "cnn", "task": "finetune", "checkpoint": "torch_batch", "batch": 2},
     {"norm": "BatchNorm, with frozen"}, "norm", "1703.06870"),
    ({"architecture": "cnn", "task": "finetune", "checkpoint": "torch_batch", "batch": 64}, {"norm": "BatchNorm as"},
     "norm", "gemma-offset-port"),
    ({"architecture": "cnn", "task": "style"}, {"norm": "InstanceNorm"}, "norm", "1607.08022"),
    ({"architecture": "cnn", "task": "diffusion"}, {"norm": "GroupNorm with 32"}, "norm", "2006.11239"),
    ({"architecture": "cnn", "batch": 64, "variable_length": True}, {"batch statistics": "mask="}, "batch statistics",
     "batchnorm-padding"),
    ({"architecture": "cnn", "batch": 64, "streaming": True}, {"batch statistics": "eval()"}, "batch statistics",
     "batchnorm-decode"),
    ({"architecture": "rnn"}, {"norm": "LayerNorm, on a GRU"}, "norm", "recurrent-layernorm"),
    ({"architecture": "decoder", "hardware": "cuda", "dtype": "bfloat16", "task": "finetune", "checkpoint": "llama",
      "checkpoint_placement": "pre"}, {"speed": "torch.compile"}, "speed", "time-against-flops"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "expected", "topic", "source"), SITUATIONS)
def test_situations(asked: dict[str, Any], expected: dict[str, str], topic: str, source: str) -> None:
    found = advise(Request(**asked), MADE_UP)
    for name, start in expected.items():
        assert found[name].value.startswith(start)
    assert any(source in e.ref for e in found[topic].evidence)


FLIPS = [
    ({"architecture": "decoder"}, {"rms_quality": "wrong as stated"}, "norm", "LayerNorm"),
    ({"architecture": "rnn"}, {"recurrent_layernorm": "not reproduced at this scale"}, "norm", "none"),
    ({"architecture": "decoder", "depth": 80}, {"sandwich_bound": "wrong as stated"}, "placement", "pre"),
    ({"architecture": "decoder", "high_learning_rate": True}, {"qk_norm": "wrong as stated"}, "qk-norm", "none"),
    ({"architecture": "decoder", "placement": "post"}, {"warm_up": "wrong as stated"}, "warm-up",
     "2 / (1 - beta2) steps"),
    ({"architecture": "decoder"},
     {"warm_up": "wrong as stated", "xiong_gradient": "wrong as stated", "post_better": "holds"}, "placement", "post"),
    ({"architecture": "cnn", "batch": 8}, {"batchnorm_batch_size": "holds"}, "norm", "GroupNorm with 32 groups"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "changed", "topic", "then"), FLIPS)
def test_advice_flips_with_the_result_it_rests_on(
    asked: dict[str, Any], changed: dict[str, str], topic: str, then: str
) -> None:
    before, after = (advise(Request(**asked), r)[topic] for r in (MADE_UP, MADE_UP.changed(**changed)))
    assert after.value == then and before.value != then


def test_the_least_batch_follows_the_measurement() -> None:
    def least(outcome: str, rises: dict[str, float], few: str = "wrong as stated") -> int:
        size = Verdict(outcome, "made up", dict(rises))  # type: ignore[arg-type]
        small = Verdict(few, "made up")  # type: ignore[arg-type]
        return least_batch(Results({"batchnorm-batch-size": size, "batchnorm-batch-1-2": small}))[0]

    flat = dict.fromkeys(RISES, 0.0)
    assert least("holds within limits", RISES) == 4
    assert least("not reproduced at this scale", flat) == 2
    assert least("not reproduced at this scale", flat, few="holds") == 3
    assert least("holds", dict.fromkeys(RISES, 2.0)) == 16
    assert least("holds", {}) == 16
    assert least_batch(Results({}))[0] == 16  # what the literature says, where nothing was measured
    size, small = Verdict("holds within limits", "", dict(flat)), Verdict("wrong as stated", "")
    measured = Results({"batchnorm-batch-size": size, "batchnorm-batch-1-2": small})
    assert advise(Request(architecture="cnn", batch=2), measured)["norm"].value == "BatchNorm"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"architecture": "decoder", "placement": "post", "checkpoint_placement": "pre"}, "fixes its placement"),
        ({"architecture": "decoder", "norm": "layer", "checkpoint": "llama"}, "fixes its norm"),
        ({"architecture": "cnn", "norm": "batch", "batch": 1}, "one sample"),
        ({"architecture": "decoder", "norm": "batch"}, "see the future"),
        ({"architecture": "encoder_decoder", "norm": "batch"}, "see the future"),
        ({"architecture": "decoder", "checkpoint": "llama"}, "name it"),
        ({"architecture": "decoder", "checkpoint": "llama", "placement": "post"}, "fixes its placement"),
        ({"architecture": "decoder", "norm": "rms", "placement": "rezero"}, "has no norm"),
        ({"architecture": "decoder", "task": "style"}, "about images"),
        ({"architecture": "vit", "task": "style"}, "feature maps"),
        ({"architecture": "decoder", "norm": "group"}, "over space"),
        ({"architecture": "rnn", "norm": "batch"}, "every step"),
        ({"architecture": "cnn", "placement": "pre"}, "residual branches of transformers"),
        ({"architecture": "rnn", "checkpoint_placement": "pre"}, "about transformers"),
        ({"architecture": "decoder", "task": "finetune"}, "name their convention"),
        ({"architecture": "cnn", "checkpoint": "llama"}, "does not use"),
        ({"architecture": "decoder", "placement": "post", "no_warm_up": True}, "take deepnorm"),
        ({"architecture": "cnn", "norm": "group", "width": 37}, "divides"),
    ],
)
def test_contradictions_are_refused_with_the_reason(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        Request(**asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"architecture": "mlp"}, "architecture must be one of"),
        ({"architecture": "cnn", "batch": 0}, "batch must be an integer >= 1; got 0"),
        ({"architecture": "cnn", "depth": 2.5}, "depth must be an integer"),
        ({"architecture": "cnn", "dtype": "int8"}, "dtype must be one of"),
        ({"architecture": "decoder", "placement": "middle"}, "placement must be one of"),
        ({"architecture": "decoder", "checkpoint": "nosuch"}, "checkpoint must be one of"),
    ],
)
def test_bad_fields_name_what_is_accepted(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**asked)


def _random_request(rng: random.Random) -> dict[str, Any]:
    domains: dict[str, list[Any]] = {
        "architecture": list(get_args(Architecture)),
        "task": list(get_args(Task)),
        "depth": [1, 2, 6, 12, 24, 48, 96],
        "width": [1, 7, 12, 24, 37, 64, 72],
        "batch": [1, 2, 4, 8, 32, 256],
        "devices": [1, 2, 8],
        "dtype": list(get_args(DType)),
        "hardware": list(get_args(Hardware)),
        "variable_length": [False, True],
        "streaming": [False, True],
        "high_learning_rate": [False, True],
        "no_warm_up": [False, True],
        "norm": [None, None, *get_args(Norm)],
        "placement": [None, None, *known()],
        "checkpoint": [None, None, None, *NAMED],
        "checkpoint_placement": [None, None, None, *known()],
    }
    assert set(domains) == {f.name for f in fields(Request)}
    return {
        name: rng.choice(values) for name, values in domains.items() if name == "architecture" or rng.random() < 0.4
    }


def contradictions(found: Advice) -> list[str]:
    """What no advice may say, told from its own fields, not from the rules that made it."""
    r, spec, wrong = found.request, found.spec, []
    if spec is not None and spec.axes == "batch" and not spec.frozen and r.batch * r.devices == 1:
        wrong.append("batch statistics of one sample")
    if spec is not None and spec.axes == "group" and r.width % spec.groups:
        wrong.append("groups that do not divide the width")
    if found.form == "sync" and r.devices == 1:
        wrong.append("synchronized over one process")
    if (found.placement is None) != (r.architecture in ("cnn", "rnn")):
        wrong.append("a placement without a stream, or none with one")
    if (
        found.placement == "post"
        and found["warm-up"].value == "none"
        and r.depth >= 6
        and r.checkpoint_placement is None
    ):
        wrong.append("deep post-norm without warm-up")
    if r.no_warm_up and found.placement is not None and found["warm-up"].value != "none":
        wrong.append("warm-up where there can be none")
    if r.checkpoint_placement is not None and found.placement != r.checkpoint_placement:
        wrong.append("another placement than the checkpoint's")
    if r.checkpoint is not None and found.form != "frozen" and found.spec != NAMED[r.checkpoint]:
        wrong.append("another norm than the checkpoint's")
    if spec is not None and float(found["eps"].value) != pytest.approx(spec.eps, rel=1e-3):
        wrong.append("an eps that is not the spec's")
    if found.placement is not None and placement(found.placement, depth=r.depth, layer=1, kind="ffn") is None:
        wrong.append("an unknown placement")
    for choice in found.choices:
        if not (choice.value and choice.reason and choice.changes_if and choice.evidence):
            wrong.append(f"{choice.topic} lacks a value, a reason, evidence or what would change it")
    return wrong


def test_a_thousand_random_requests() -> None:
    rng, answered, refused = random.Random(0), 0, 0
    outcomes = ["holds", "wrong as stated", "not reproduced at this scale"]
    while answered < 1000:
        results = MADE_UP.changed(**{c.replace("-", "_"): rng.choice(outcomes) for c in HOLDING if rng.random() < 0.3})
        try:
            request = Request(**_random_request(rng))
        except Refused:
            refused += 1
            continue
        found = advise(request, results)
        answered += 1
        assert contradictions(found) == [], request
        compile(found.code, "advice", "exec")
    assert refused > 100  # the draw does reach contradictions


@pytest.mark.parametrize("asked", [s[0] for s in SITUATIONS], ids=lambda a: "-".join(map(str, a.values())))
def test_the_code_runs(asked: dict[str, Any]) -> None:
    small = {**asked, "depth": min(asked.get("depth", 2), 2), "width": min(asked.get("width", 32), 32)}
    found = advise(Request(**small), MADE_UP)
    made: dict[str, Any] = {}
    code = "\n".join(line for line in found.code.splitlines() if "convert_sync" not in line)  # needs a process group
    exec(compile(code.replace("vocab=32000", "vocab=11"), "advice", "exec"), made)
    assert isinstance(made["optimizer"], torch.optim.Optimizer)
    held = [p for group in made["optimizer"].param_groups for p in group["params"]]
    assert len(held) == len(list(made["model"].parameters()))
    assert {p.dtype for p in held} == {torch.float64 if found.request.dtype == "float64" else torch.float32}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_of_the_code_in_half_precision_moves_every_weight_a_little(dtype: str) -> None:
    """Weights in float16 would become NaN: AdamW's eps of 1e-8 is 0 there."""
    made: dict[str, Any] = {}
    found = advise(Request(architecture="decoder", width=8, depth=1, dtype=dtype), MADE_UP)  # type: ignore[arg-type]
    exec(compile(found.code.replace("vocab=32000", "vocab=11"), "advice", "exec"), made)
    before = [p.detach().clone() for p in made["model"].parameters()]
    with made["autocast"]:
        out = made["model"](torch.arange(6).view(1, 6))
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), torch.arange(1, 7))
    assert str(out.dtype) == f"torch.{dtype}"
    loss.backward()
    made["optimizer"].step()
    moved = [(p - q).abs().max().item() for p, q in zip(made["model"].parameters(), before, strict=True)]
    assert all(0 < m < 1e-3 for m in moved)  # AdamW's first step is the rate, 3e-4, and the decay


def test_reasons_and_alternatives_fit_the_request() -> None:
    def said(topic: str, **asked: Any) -> Choice:
        return advise(Request(**asked), MADE_UP)[topic]

    assert "overflow" in said("precision", architecture="decoder", dtype="float16").reason
    assert "overflow" not in said("precision", architecture="decoder", dtype="bfloat16").reason
    assert "LayerNorm" in said("norm", architecture="encoder", norm="batch").changes_if
    assert said("norm", architecture="cnn", batch=1).reason.startswith("1 sample is too few")


def test_contradictions_are_seen() -> None:
    from dataclasses import replace

    good = advise(Request(architecture="cnn", batch=64), MADE_UP)
    assert contradictions(good) == []
    assert contradictions(replace(good, request=replace(good.request, batch=1)))
    assert contradictions(replace(good, placement="pre"))
    assert contradictions(replace(good, choices=(replace(good.choices[0], evidence=()), *good.choices[1:])))


def test_every_lab_reference_is_a_claim_of_the_lab() -> None:
    from normkit.lab.claims import all_claims

    claims = set(all_claims())
    assert set(HOLDING) <= claims
    cited = {
        e.ref
        for s in SITUATIONS
        for c in advise(Request(**s[0]), MADE_UP).choices
        for e in c.evidence
        if e.kind == "lab"
    }
    assert cited <= claims and len(cited) > 10
