"""Every judge of a measured claim on made-up rows: each outcome that its criterion can give, from both sides."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from normkit.lab.claim import OUTCOMES, Cell, Claim, Row
from normkit.lab.claims import all_claims
from normkit.lab.setups.statistics import t_interval

HOLDS, LIMITS = "holds", "holds within limits"
NOT_SEEN, WRONG = "not reproduced at this scale", "wrong as stated"
MEASURED = {name: claim for name, claim in all_claims().items() if claim.kind == "measured"}
Result = Callable[[Cell], dict[str, Any]]


def vary(value: Any, seed: int, noise: float) -> Any:
    """What another seed would have given: each number moved by a share that differs by seed."""
    if isinstance(value, dict):
        return {name: vary(v, seed, noise) for name, v in value.items()}
    if isinstance(value, list):
        return [vary(v, seed, noise) for v in value]
    return value * (1 + noise * (seed % 3 - 1)) if isinstance(value, float) else value


def made_up(name: str, result: Result, noise: float = 0.001) -> list[Row]:
    claim = MEASURED[name]
    return [
        Row(name, seed, False, cell, vary(result(cell), seed, noise), 1.0, {}, "")
        for cell in claim.cells(False)
        for seed in range(claim.seeds)
    ]


def by(setting: str, name: str, **values: Any) -> Result:
    """One number that depends on one setting; ``other`` is for all that is not named."""
    return lambda cell: {name: float(values.get(str(cell[setting]).replace(" ", "_"), values.get("other")))}


def padding(batch: float, masked: float = 0.0, little: float | None = None) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        own = batch if little is None or cell["padding"] >= 0.25 else little
        training = {"batch": own, "batch with mask": masked, "layer": 0.0}[cell["norm"]]
        evaluation = {"batch": own, "batch with mask": 0.01, "layer": 0.0}[cell["norm"]]
        return {"change_in_training": training, "change_in_evaluation": evaluation}

    return result


def batch_size(batch: Callable[[int], float], group: Callable[[int], float] = lambda size: 9.0) -> Result:
    return lambda cell: {"error": (batch if cell["norm"] == "batch" else group)(cell["batch"])}


def train_eval(forgotten: float, stale: float, matched: float = 0.0) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        if cell["norm"] == "layer":
            forgotten_, stale_, matched_ = 0.0, 0.0, 0.0
        else:
            forgotten_, stale_, matched_ = forgotten, stale, matched
        return {
            "evaluation": 90.0,
            "training": 90.0 - matched_,
            "sorted_evaluation": 90.0,
            "sorted_training": 90.0 - forgotten_,
            "shifted_evaluation": 90.0 - stale_,
            "shifted_training": 90.0,
        }

    return result


def noise(noisy: float, drift: float = 2.0, fastest: float | None = None) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        own = noisy if fastest is None or cell["rate"] < 1 else fastest
        accuracy = {"plain": 50.0, "batch": 95.0, "noisy batch": own}
        moves = {"plain": 1.0, "batch": 1.0, "noisy batch": drift}
        return {"accuracy": accuracy[cell["net"]], "drift": moves[cell["net"]]}

    return result


def outlier(small: float, large: float) -> Result:
    return lambda cell: {"change": (small if cell["size"] < 10 else large) if cell["norm"] == "batch" else 0.0}


def edge(none: float, batch: float) -> Result:
    return lambda cell: {"accuracy": 95.0 if cell["rate"] <= (batch if cell["norm"] == "batch" else none) else 10.0}


def saturation(accuracy: float, saturated: float) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        batch = cell["norm"] == "batch"
        return {"accuracy": accuracy if batch else 50.0, "saturated": saturated if batch else 40.0}

    return result


def outliers(ratio: Callable[[Cell], float]) -> Result:
    return lambda cell: {"output_ratio": ratio(cell), "gradient_ratio": ratio(cell)}


def growth(pre: Callable[[int], float], post: Callable[[int], float] = lambda n: 1.0) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        size = pre if cell["placement"] == "pre" else post
        return {"sizes": [float(size(n)) for n in range(1, cell["depth"] + 1)]}

    return result


def power(name: str, setting: str, variable: str, **exponents: float) -> Result:
    return lambda cell: {name: 3.0 * cell[variable] ** exponents[str(cell[setting]).replace(" ", "_")]}


def width(narrow: float, wide: float) -> Result:
    exponent = {"of variance 1 / d": narrow, "of variance 1": wide}
    return lambda cell: {"gradient": cell["dim"] ** exponent[cell["head"]]}


def update(deepnorm: float, sgd: float | None = None) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        own = deepnorm if cell["optimizer"] == "adam" or sgd is None else sgd
        return {"update": 1e-3 * cell["depth"] ** {"post": 1.5, "pre": 0.7, "deepnorm": own}[cell["placement"]]}

    return result


def sandwich(pre: bool, sandwich: bool, output: bool) -> Result:
    grows = {"pre": pre, "sandwich": sandwich, "output": output}
    return lambda cell: {"written": cell["factor"] if grows[cell["placement"]] else 1.0, "largest_gain": 1.5}


def warm_up(post: float, pre: float, deepnorm: float) -> Result:
    """The losses without warm-up above those with it, and DeepNorm's without."""

    def result(cell: Cell) -> dict[str, Any]:
        cold = {"post": post, "pre": pre, "deepnorm": 0.0}[cell["placement"]]
        base = deepnorm if cell["placement"] == "deepnorm" else 2.5
        return {"loss": base + (cold if cell["warm_up"] == 0 else 0.0)}

    return result


def depth_loss(**post: float) -> Result:
    return lambda cell: {"loss": post[f"at_{cell['depth']}"] if cell["placement"] == "post" else 2.5}


def steps(post: float) -> Result:
    import math

    def result(cell: Cell) -> dict[str, Any]:
        count = post if cell["placement"] == "post" else 100.0
        return {"steps_to_target": count, "log2_steps": math.log2(count)}

    return result


def inverted(*gaps: float) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        rates = sorted({c["rate"] for c in MEASURED["deepnorm-inverted-beta"].cells(False)})
        gap = gaps[rates.index(cell["rate"])]
        return {"loss": 2.5 + (gap if "+" in cell["gain"] else 0.0)}

    return result


def sensitivity(**spread: float) -> Result:
    """Each model's result is at its best at scale 1 and worse by its spread elsewhere."""
    return lambda cell: {
        "result": 0.1 + (spread[cell["model"].split()[-1].replace("-", "_")] if cell["scale"] != 1 else 0)
    }


def logit(without: float) -> Result:
    return lambda cell: {"largest_logit": without if cell["qk_norm"] == "none" else 5.0, "loss": 2.5}


def caps(**bounded: float) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        method = cell["method"].replace(" ", "_").replace("-", "_")
        size = bounded.get(method, 20.0)
        return {
            "largest_attention_logit": size,
            "largest_output_logit": size,
            "normalizer": size,
            "loss": 2.5,
            "time": 1.1,
        }

    return result


def deep(none: tuple[float, float], rezero: tuple[float, float], layerscale: tuple[float, float]) -> Result:
    nets = {"none": none, "rezero": rezero, "layerscale": layerscale}
    return lambda cell: dict(zip(("log10_first_loss", "accuracy"), nets[cell["net"]], strict=True))


def variances(hidden: float, gradient: float) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        layer = cell["norm"] == "layer"
        return {"hidden_variance": hidden if layer else 1.0, "gradient_variance": gradient if layer else 1.0}

    return result


def dilution(shares: float, effects: float) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        layers = range(1, cell["depth"] + 1)
        return {"shares": [n**shares for n in layers], "effects": [n**effects for n in layers]}

    return result


def smooth(*ratios: float) -> Result:
    """log of plain over BatchNorm in the three measures; the last bins are BatchNorm's alone."""

    def result(cell: Cell) -> dict[str, Any]:
        names = ("loss_range", "gradient_change", "effective_beta")
        plain = cell["norm"] == "none"
        return {
            n: [r if plain else 0.0, r + 1 if plain else 1.0, None if plain else 5.0]
            for n, r in zip(names, ratios, strict=True)
        }

    return result


def speed(norm: float, step: float) -> Result:
    return lambda cell: {"norm": norm, "norm_with_backward": norm, "step": step}


def shares(time: float, normkit: float | None = None) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        own = time if normkit is None or cell["implementation"] != "normkit" else normkit
        return {"time_share": own, "operation_share": 0.02}

    return result


def recurrent(layer: float, gru: float, transformer: float = 0.02) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        if cell["part"] == "time":
            return {"saved": gru if cell["net"] == "gru" else transformer}
        return {"error": {"none": 20.0, "layer": layer, "rms": layer}[cell["net"]]}

    return result


def tuned(post: float) -> Result:
    return lambda cell: {
        "tuned": post if cell["placement"] == "post" else 2.5,
        "pretrained": 2.4,
        "forgotten": 0.3,
        "first_over_last_gradient": 0.8,
    }


def decode(decoding: float, prose: float) -> Result:
    def result(cell: Cell) -> dict[str, Any]:
        batch = cell["norm"] == "batch"
        lost = {"full": 0.0, "decoding": decoding if batch else 0.0, "prose": prose if batch else 0.0}
        return {f"{p}_{mode}": 2.5 + lost[p] for p in lost for mode in ("running", "batch")}

    return result


def port(as_they_are: float, mended: float) -> Result:
    return lambda cell: {
        "original": 2.5,
        "as_they_are": as_they_are,
        "with_1_added": mended,
        "logits_as_they_are": 0.9,
    }


CASES: list[tuple[str, str, Result]] = [
    ("batchnorm-padding", HOLDS, padding(0.5)),
    ("batchnorm-padding", LIMITS, padding(0.5, little=0.04)),
    ("batchnorm-padding", NOT_SEEN, padding(0.04)),
    ("batchnorm-padding", WRONG, padding(0.5, masked=0.2)),
    ("batchnorm-outliers", HOLDS, by("norm", "change", batch=0.5, layer=0.0)),
    ("batchnorm-outliers", LIMITS, outlier(0.05, 0.5)),
    ("batchnorm-outliers", NOT_SEEN, by("norm", "change", batch=0.05, layer=0.0)),
    ("batchnorm-outliers", WRONG, by("norm", "change", batch=0.5, layer=0.1)),
    ("batchnorm-batch-size", HOLDS, batch_size(lambda b: 15.0 if b < 16 else 8.0)),
    ("batchnorm-batch-size", LIMITS, batch_size(lambda b: 15.0 if b < 4 else 8.0)),
    ("batchnorm-batch-size", LIMITS, batch_size(lambda b: 15.0 if b < 16 else 8.0, lambda b: 16.0 if b < 4 else 8.0)),
    ("batchnorm-batch-size", NOT_SEEN, batch_size(lambda b: 8.5)),
    ("batchnorm-batch-1-2", HOLDS, batch_size(lambda b: 20.0)),
    ("batchnorm-batch-1-2", LIMITS, batch_size(lambda b: 20.0 if b == 1 else 9.0)),
    ("batchnorm-batch-1-2", LIMITS, batch_size(lambda b: 11.0)),
    ("batchnorm-batch-1-2", NOT_SEEN, batch_size(lambda b: 9.0)),
    ("batchnorm-train-eval", HOLDS, train_eval(30.0, 20.0)),
    ("batchnorm-train-eval", LIMITS, train_eval(30.0, 2.0)),
    ("batchnorm-train-eval", LIMITS, train_eval(30.0, 20.0, matched=8.0)),
    ("batchnorm-train-eval", NOT_SEEN, train_eval(3.0, 2.0)),
    ("santurkar-noise", HOLDS, noise(94.5)),
    ("santurkar-noise", LIMITS, noise(94.5, fastest=80.0)),
    ("santurkar-noise", NOT_SEEN, noise(80.0)),
    ("santurkar-noise", NOT_SEEN, noise(94.5, drift=0.5)),
    ("batchnorm-lr", HOLDS, edge(0.25, 2.0)),
    ("batchnorm-lr", LIMITS, edge(0.25, 0.5)),
    ("batchnorm-lr", NOT_SEEN, edge(0.5, 0.5)),
    ("batchnorm-saturation", HOLDS, saturation(90.0, 5.0)),
    ("batchnorm-saturation", LIMITS, saturation(90.0, 41.0)),
    ("batchnorm-saturation", NOT_SEEN, saturation(52.0, 41.0)),
    ("rms-outliers", HOLDS, outliers(lambda cell: 0.5)),
    ("rms-outliers", LIMITS, outliers(lambda cell: 0.5 if cell["mean"] else 1.0)),
    ("rms-outliers", WRONG, outliers(lambda cell: 1.0)),
    ("rms-outliers", WRONG, outliers(lambda cell: 1.4)),
    ("rms-outliers", NOT_SEEN, outliers(lambda cell: 0.9)),
    ("stream-growth", HOLDS, growth(lambda n: 1 + n)),
    ("stream-growth", LIMITS, growth(lambda n: 1 + n, lambda n: 1 + n)),
    ("stream-growth", LIMITS, growth(lambda n: 1.5**n)),
    ("stream-growth", NOT_SEEN, growth(lambda n: 1.5**n, lambda n: 1.5**n)),
    ("xiong-gradient", HOLDS, power("gradient", "placement", "depth", post=0.05, pre=-0.45)),
    ("xiong-gradient", LIMITS, power("gradient", "placement", "depth", post=0.05, pre=-0.1)),
    ("xiong-gradient", NOT_SEEN, power("gradient", "placement", "depth", post=-0.5, pre=0.0)),
    ("xiong-width", HOLDS, width(1.1, 1.1)),
    ("xiong-width", LIMITS, width(0.5, 1.1)),
    ("xiong-width", WRONG, width(0.5, 0.5)),
    ("update-size", HOLDS, update(0.0)),
    ("update-size", LIMITS, update(0.6, sgd=0.0)),
    ("update-size", NOT_SEEN, update(1.6)),
    ("sandwich-bound", HOLDS, sandwich(True, False, False)),
    ("sandwich-bound", LIMITS, sandwich(True, True, False)),
    ("sandwich-bound", WRONG, sandwich(True, True, True)),
    ("sandwich-bound", NOT_SEEN, sandwich(False, False, False)),
    ("warm-up", HOLDS, warm_up(0.3, 0.0, 2.4)),
    ("warm-up", LIMITS, warm_up(0.3, 0.3, 2.4)),
    ("warm-up", LIMITS, warm_up(0.0, 0.0, 2.4)),
    ("warm-up", NOT_SEEN, warm_up(0.0, 0.0, 2.5)),
    ("post-better", HOLDS, depth_loss(at_2=2.4, at_6=2.4)),
    ("post-better", LIMITS, depth_loss(at_2=2.4, at_6=2.6)),
    ("post-better", WRONG, depth_loss(at_2=2.6, at_6=2.6)),
    ("post-better", NOT_SEEN, depth_loss(at_2=2.5, at_6=2.5)),
    ("pre-faster", HOLDS, steps(150.0)),
    ("pre-faster", NOT_SEEN, steps(100.0)),
    ("pre-faster", WRONG, steps(60.0)),
    ("deepnorm-inverted-beta", HOLDS, inverted(0.2, 0.3)),
    ("deepnorm-inverted-beta", LIMITS, inverted(0.0, 0.3)),
    ("deepnorm-inverted-beta", NOT_SEEN, inverted(0.0, 0.01)),
    ("norm-init-sensitivity", HOLDS, sensitivity(norm=0.5, LayerNorm=0.1, Post_LN=0.8, Pre_LN=0.2)),
    ("norm-init-sensitivity", LIMITS, sensitivity(norm=0.5, LayerNorm=0.1, Post_LN=0.2, Pre_LN=0.8)),
    ("norm-init-sensitivity", NOT_SEEN, sensitivity(norm=0.1, LayerNorm=0.5, Post_LN=0.2, Pre_LN=0.8)),
    ("qk-norm", HOLDS, logit(100.0)),
    ("qk-norm", LIMITS, logit(7.0)),
    ("qk-norm", NOT_SEEN, logit(5.0)),
    ("qk-softcap", HOLDS, caps(qk_norm=5.0, attention_soft_cap=5.0, logit_soft_cap=5.0, z_loss=5.0)),
    ("qk-softcap", LIMITS, caps(qk_norm=5.0, attention_soft_cap=5.0)),
    ("qk-softcap", NOT_SEEN, caps()),
    ("rezero-layerscale", HOLDS, deep((13.0, 10.0), (0.4, 97.0), (0.4, 96.0))),
    ("rezero-layerscale", LIMITS, deep((13.0, 10.0), (0.4, 97.0), (0.4, 60.0))),
    ("rezero-layerscale", NOT_SEEN, deep((0.5, 97.0), (0.4, 97.0), (0.4, 96.0))),
    ("mean-variance-hypothesis", HOLDS, variances(1.0, 1.0)),
    ("mean-variance-hypothesis", LIMITS, variances(0.7, 1.0)),
    ("mean-variance-hypothesis", NOT_SEEN, variances(0.9, 0.9)),
    ("mean-variance-hypothesis", WRONG, variances(0.7, 0.7)),
    ("branch-dilution", HOLDS, dilution(-0.5, -0.8)),
    ("branch-dilution", LIMITS, dilution(-0.5, 0.0)),
    ("branch-dilution", NOT_SEEN, dilution(0.0, 0.0)),
    ("landscape-smooth", HOLDS, smooth(1.0, 1.0, 1.0)),
    ("landscape-smooth", LIMITS, smooth(1.0, 1.0, -1.0)),
    ("landscape-smooth", WRONG, smooth(-1.0, -1.0, -1.0)),
    ("landscape-smooth", NOT_SEEN, smooth(0.0, 0.0, 0.0)),
    ("rms-speed", LIMITS, speed(0.5, 0.15)),
    ("rms-speed", LIMITS, speed(0.1, 0.08)),
    ("rms-speed", NOT_SEEN, speed(-0.2, -0.01)),
    ("time-against-flops", HOLDS, shares(0.2)),
    ("time-against-flops", LIMITS, shares(0.2, normkit=0.05)),
    ("time-against-flops", NOT_SEEN, shares(0.05)),
    ("recurrent-layernorm", HOLDS, recurrent(10.0, 0.2)),
    ("recurrent-layernorm", LIMITS, recurrent(20.0, 0.2)),
    ("recurrent-layernorm", NOT_SEEN, recurrent(20.0, 0.01)),
    ("finetune-post", HOLDS, tuned(2.4)),
    ("finetune-post", NOT_SEEN, tuned(2.5)),
    ("finetune-post", WRONG, tuned(2.6)),
    ("batchnorm-decode", HOLDS, decode(0.3, 0.3)),
    ("batchnorm-decode", LIMITS, decode(0.0, 0.3)),
    ("batchnorm-decode", NOT_SEEN, decode(0.0, 0.01)),
    ("gemma-offset-port", HOLDS, port(4.0, 2.5)),
    ("gemma-offset-port", NOT_SEEN, port(2.6, 2.5)),
    ("gemma-offset-port", NOT_SEEN, port(4.0, 3.0)),
    ("rms-quality", HOLDS, by("norm", "loss", layer=2.5, rms=2.51)),
    ("rms-quality", WRONG, by("norm", "loss", layer=2.5, rms=2.6)),
    ("rms-bias", HOLDS, by("norm", "loss", rms=2.5, rms_with_bias=2.51)),
    ("rms-bias", WRONG, by("norm", "loss", rms=2.5, rms_with_bias=2.4)),
]


@pytest.mark.parametrize(("name", "expected", "result"), CASES, ids=[f"{n}: {e}" for n, e, _ in CASES])
def test_judge(name: str, expected: str, result: Result) -> None:
    verdict = MEASURED[name].judge(made_up(name, result))
    assert verdict.outcome == expected, verdict.because
    assert verdict.because and "nan" not in verdict.because
    assert verdict.numbers


def possible(claim: Claim) -> set[str]:
    """The outcomes that a judge's source names, itself or by what `setups.judging` calls them."""
    tree = ast.walk(ast.parse(inspect.getsource(claim.judge)))
    found: set[str] = set()
    for node in tree:
        if isinstance(node, ast.Constant) and node.value in OUTCOMES:
            found.add(str(node.value))
        elif isinstance(node, ast.Name):
            # what `judge_equal` says of seeds that disagree is tested below
            found |= {"NOT_SEEN": {NOT_SEEN}, "WRONG": {WRONG}, "judge_equal": {HOLDS, WRONG}}.get(node.id, set())
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "graded":
            found |= {HOLDS, LIMITS} | ({NOT_SEEN} if len(node.args) == 1 and not node.keywords else set())
    return found


@pytest.mark.parametrize("name", MEASURED)
def test_every_outcome_of_a_judge_has_made_up_rows(name: str) -> None:
    expected = {e for n, e, _ in CASES if n == name}
    assert expected & {HOLDS, LIMITS} and expected & {NOT_SEEN, WRONG}
    assert expected == possible(MEASURED[name])


NOISY: list[tuple[str, Result, dict[str, Any], float]] = [
    ("batchnorm-batch-size", batch_size(lambda b: 15.0 if b < 16 else 8.0), {"norm": "batch", "batch": 4}, 0.5),
    ("batchnorm-train-eval", train_eval(30.0, 20.0), {"norm": "batch"}, 0.5),
    ("santurkar-noise", noise(94.5), {"net": "noisy batch"}, 0.1),
    ("batchnorm-saturation", saturation(90.0, 5.0), {"norm": "batch"}, 0.5),
    ("warm-up", warm_up(0.3, 0.0, 2.4), {"placement": "post", "warm_up": 0}, 0.2),
    ("post-better", depth_loss(at_2=2.4, at_6=2.4), {"placement": "post"}, 0.05),
    ("pre-faster", steps(150.0), {"placement": "post"}, 0.4),
    ("deepnorm-inverted-beta", inverted(0.2, 0.3), {"gain": "(8L)^(+1/4)"}, 0.1),
    ("norm-init-sensitivity", sensitivity(norm=0.5, LayerNorm=0.1, Post_LN=0.8, Pre_LN=0.2), {"model": "Post-LN"}, 0.9),
    ("qk-norm", logit(12.0), {"qk_norm": "none"}, 0.8),
    ("mean-variance-hypothesis", variances(1.0, 1.0), {"norm": "layer"}, 0.3),
    ("landscape-smooth", smooth(1.0, 1.0, 1.0), {"norm": "none"}, 2.0),
    ("time-against-flops", shares(0.2), {}, 0.5),
    ("recurrent-layernorm", recurrent(10.0, 0.2), {"net": "layer"}, 0.9),
    ("finetune-post", tuned(2.4), {"placement": "post"}, 0.05),
    ("rms-quality", by("norm", "loss", layer=2.5, rms=2.51), {"norm": "rms"}, 0.03),
]


@pytest.mark.parametrize(("name", "result", "where", "spread"), NOISY, ids=[n for n, *_ in NOISY])
def test_seeds_that_disagree_do_not_let_it_hold(name: str, result: Result, where: Cell, spread: float) -> None:
    """The same means, with seeds so far apart that the interval reaches past the criterion."""
    judge = MEASURED[name].judge
    calm, noisy = made_up(name, result), made_up(name, result, noise=spread)
    assert judge(calm).outcome == HOLDS
    rows = [n if all(c.cell.get(k) == v for k, v in where.items()) else c for c, n in zip(calm, noisy, strict=True)]
    assert judge(rows).outcome != HOLDS


def test_equal_quality_within_limits() -> None:
    """The mean difference is small, or not, and the interval reaches past the bound."""

    def rows(spread: float, apart: float = 0.0) -> list[Row]:
        losses = {"layer": [2.5] * 5, "rms": [2.5 + apart + spread * k for k in (-2, -1, 0, 1, 2)]}
        return [
            Row("rms-quality", s, False, {"norm": n}, {"loss": v}, 1.0, {}, "")
            for n, found in losses.items()
            for s, v in enumerate(found)
        ]

    judge = MEASURED["rms-quality"].judge
    assert judge(rows(0.005)).outcome == HOLDS
    assert judge(rows(0.1)).outcome == LIMITS
    assert judge(rows(0.1, apart=0.05)).outcome == judge(rows(0.1, apart=-0.05)).outcome == NOT_SEEN
    assert t_interval([0.1 * k for k in (-2, -1, 0, 1, 2)]).high > 0.03
