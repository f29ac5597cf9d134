"""Made-up rows of every exact claim: for each outcome that its judge can give, results that must lead to it."""

from __future__ import annotations

from typing import Any

from normkit.lab.claim import Row

HOLDS, LIMITS, WRONG = "holds", "holds within limits", "wrong as stated"
TINY, BIG = 1e-15, 0.3


def rows(claim: str, *pairs: tuple[dict[str, Any], dict[str, Any]]) -> list[Row]:
    """Rows from (cell, result) pairs; pairs with the same cell are seeds."""
    seen: dict[str, int] = {}
    made = []
    for cell, result in pairs:
        seed = seen.setdefault(str(cell), 0)
        seen[str(cell)] += 1
        made.append(Row(claim, seed, True, cell, result, 0.1, {}, "2026-01-01T00:00:00+00:00"))
    return made


MADE_UP: dict[str, list[tuple[str, list[Row]]]] = {}


def add(claim: str, outcome: str, *pairs: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """One set of rows and what the judge must say to it."""
    MADE_UP.setdefault(claim, []).append((outcome, rows(claim, *pairs)))


def _worked(first: float) -> dict[str, Any]:
    return {
        "layer": [first, -0.44721, 0.44721, 1.34164],
        "rms": [0.365148, 0.7303, 1.095445, 1.460593],
        "root_mean_square": 2.73861,
        "layer_length": 2.0,
        "rms_length": 2.0,
    }


add("worked-example", HOLDS, ({}, _worked(-1.34164)))
add("worked-example", WRONG, ({}, _worked(-1.3415)))

_identity = {"error": TINY, "least_excess": 0.01, "gap_at_zero_mean": TINY}
add("rms-identity", HOLDS, ({"shift": 0.0}, _identity), ({"shift": 1.0}, _identity))
for broken in ({"error": 1e-6}, {"least_excess": -1e-3}, {"gap_at_zero_mean": 1e-6}):
    add("rms-identity", WRONG, ({"shift": 0.0}, _identity), ({"shift": 1.0}, _identity | broken))

_parts = dict.fromkeys(("projection", "along_ones", "layer_radius", "rms_radius", "turned"), TINY)
add("projection", HOLDS, ({"features": 3}, _parts))
for part in _parts:
    add("projection", WRONG, ({"features": 3}, _parts), ({"features": 9}, _parts | {part: 1e-4}))

_gradient = {"torch": TINY, "normkit": TINY, "without_last_term": 0.1}
add("batch-gradient", HOLDS, ({"shape": [2, 3]}, _gradient))
for broken in ({"torch": 1e-3}, {"normkit": 1e-3}, {"without_last_term": TINY}):
    add("batch-gradient", WRONG, ({"shape": [2, 3]}, _gradient | broken))

for outcome, sigma, root in ((HOLDS, TINY, TINY), (LIMITS, 0.3, TINY), (WRONG, 0.3, 0.2)):
    add(
        "identity-affine",
        outcome,
        ({"eps": 0.0, "std": 1.0}, {"sigma": TINY, "root": TINY}),
        ({"eps": 1e-3, "std": 1.0}, {"sigma": sigma, "root": root}),
    )
add(
    "identity-affine",
    WRONG,
    ({"eps": 0.0, "std": 1.0}, {"sigma": 0.1, "root": TINY}),
    ({"eps": 1e-3, "std": 1.0}, {"sigma": 0.1, "root": TINY}),
)

_limits = dict.fromkeys(("instance", "instance_normkit", "layer", "layer_normkit"), TINY) | {"token_layer": 0.4}
add("group-limits", LIMITS, ({"shape": [1]}, _limits | {"group_gains": 6, "layer_gains": 90}))
add("group-limits", HOLDS, ({"shape": [1]}, _limits | {"group_gains": 6, "layer_gains": 6}))
add("group-limits", WRONG, ({"shape": [1]}, _limits | {"group_gains": 6, "layer_gains": 90, "layer": 0.1}))

_variance = {
    "normalized_biased": 1e-8, "normalized_unbiased": 0.1, "accumulated_biased": 0.1, "accumulated_unbiased": 1e-8,
}  # fmt: skip
add("running-variance", HOLDS, ({"batch": 2}, _variance))
add("running-variance", WRONG, ({"batch": 2}, _variance | {"accumulated_unbiased": 0.1, "accumulated_biased": 1e-8}))
add("running-variance", WRONG, ({"batch": 2}, _variance | {"normalized_biased": 0.1, "normalized_unbiased": 1e-8}))


def _constant(nan: bool, without: float, with_eps: float, mean_error: float = 0.0) -> dict[str, Any]:
    return {"nan_without": nan, "without": without, "with": with_eps, "normkit": 0.0, "mean_error": mean_error}


_nan = ({"value": 1.0, "features": 4}, _constant(True, float("nan"), 0.0))
add("eps-constant-row", HOLDS, _nan)
add("eps-constant-row", LIMITS, _nan, ({"value": 0.1, "features": 10}, _constant(False, 1.0, 1e-5, 1e-9)))
add("eps-constant-row", WRONG, ({"value": 1.0, "features": 4}, _constant(False, 0.0, 0.0)))
add("eps-constant-row", WRONG, _nan, ({"value": 3.0, "features": 4}, _constant(True, float("nan"), 0.5)))


def _annotated(small: float, large: float, factor: float = TINY) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [
        ({"features": n, "std": 1.0}, {"difference": d, "factor_error": factor}) for n, d in ((4, small), (512, large))
    ]


add("std-outside", HOLDS, *_annotated(0.13, 1e-3))
add("std-outside", WRONG, *_annotated(0.13, 1e-9))
add("std-outside", WRONG, *_annotated(0.13, 1e-3, factor=0.1))


def _overflow(total: float, **outputs: float) -> dict[str, Any]:
    named = {"float16 .pow(2).sum() / n": 1.0, "float16 .pow(2).mean()": 1.0, "float32": 1.0, "normkit": 1.0}
    short = {"sum": "float16 .pow(2).sum() / n", "mean": "float16 .pow(2).mean()", "wide": "float32"}
    named |= {short[k]: v for k, v in outputs.items()}
    return {"sum_of_squares": total, "times_maximum": total / 65504, "outputs": named}


_at = {"magnitude": 100.0, "features": 4096}
add("fp16-overflow", LIMITS, (_at, _overflow(4.096e7, sum=0.0)))
add("fp16-overflow", HOLDS, (_at, _overflow(4.096e7, sum=0.0, mean=0.0)))
add("fp16-overflow", WRONG, (_at, _overflow(3e7, sum=0.0)))
add("fp16-overflow", WRONG, (_at, _overflow(4.096e7, sum=0.0, wide=0.0)))


def _eps(eps: float, half: float, wide: float = 0.0, small: float = 0.001) -> tuple[dict[str, Any], dict[str, Any]]:
    result = {"float16": 0.0 if half else eps, "bfloat16": eps, "zero_row_float16": half, "zero_row_float32": wide}
    return {"eps": eps}, result | {"small_row_float32": small}


_NAN = float("nan")
add("eps-half", LIMITS, _eps(1e-4, 0.0, small=0.25), _eps(1e-6, 0.0), _eps(1e-8, _NAN))
add("eps-half", LIMITS, _eps(1e-4, 0.0, small=0.25), _eps(1e-6, _NAN))
add("eps-half", HOLDS, _eps(1e-4, 0.0, small=0.002), _eps(1e-6, _NAN), _eps(1e-8, _NAN))
add("eps-half", HOLDS, _eps(1e-4, 0.0, small=0.002), _eps(1e-6, 0.0), _eps(1e-8, _NAN, wide=_NAN))
add("eps-half", WRONG, _eps(1e-4, 0.0), _eps(1e-6, 0.0))

_gpt3 = {"formula": 4_743_168, "norms": 193, "norm_parameters": 4_743_168, "parameters": 174_600_000_000}
add("parameter-share", HOLDS, ({}, _gpt3))
for broken in ({"norm_parameters": 4_743_169}, {"parameters": 120_000_000_000}, {"formula": 1}):
    add("parameter-share", WRONG, ({}, _gpt3 | broken))


def _decay(plain: float, offset: float, predicted: float | None = None) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    ends = {(0.0, 1.0): plain, (0.0, 1.5): 1.5 * plain, (1.0, 1.0): 1.0, (1.0, 1.5): offset}
    return [
        (
            {"offset": o, "start": s},
            {"gains": [s, end], "predicted": end if predicted is None else predicted},
        )
        for (o, s), end in ends.items()
    ]


add("gain-offset-decay", HOLDS, *_decay(0.049, 1.025))
add("gain-offset-decay", WRONG, *_decay(0.5, 1.025))
add("gain-offset-decay", WRONG, *_decay(0.049, 1.4))
add("gain-offset-decay", WRONG, *_decay(0.049, 1.025, predicted=0.5))


def _fold(everything: float, forgot: float, nothing: float = 0.5) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    errors = {"all writers": everything, "all but the embeddings": forgot, "none": nothing}
    return [({"centre": name}, {"error": error}) for name, error in errors.items()]


add("fold-to-rms", HOLDS, *_fold(TINY, 0.5))
add("fold-to-rms", WRONG, *_fold(1e-3, 0.5))
add("fold-to-rms", WRONG, *_fold(TINY, TINY))


def _forms(naive: float, shifted: float) -> dict[str, Any]:
    others = {"two-pass": 1e-7, "corrected two-pass": 1e-7, "shifted by the first value": shifted}
    return {"E[x²] − E[x]²": naive, **others}


_far = {"mean": 1e4, "features": 4096}
add("variance-forms", HOLDS, (_far, _forms(-9.0, 1e-7)), (_far, _forms(-1.0, 1e-7)))
add("variance-forms", WRONG, (_far, _forms(-9.0, 1e-7)), (_far, _forms(0.2, 1e-7)))
add("variance-forms", WRONG, (_far, _forms(-9.0, 0.1)))


def _invariant(swap: tuple[str, str] | None = None) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    from normkit.lab.exact.invariances import CHANGES, PAPERS

    pairs = []
    for name, ignored in PAPERS.items():
        result = {c: TINY if yes else BIG for c, yes in zip(CHANGES, ignored, strict=True)}
        if swap is not None and swap[0] == name:
            result[swap[1]] = BIG if result[swap[1]] == TINY else TINY
        pairs.append(({"norm": name}, result))
    return pairs


add("invariances", HOLDS, *_invariant())
add("invariances", WRONG, *_invariant(("LayerNorm", "weight shift")))
add("invariances", WRONG, *_invariant(("RMSNorm", "input shift")))

add("running-variance-seed", WRONG, ({"batch": 2}, {"biased": 1.0, "unbiased": 1e-7, "factor": 2.0}))
add("running-variance-seed", HOLDS, ({"batch": 2}, {"biased": 1e-7, "unbiased": 0.5, "factor": 1.0}))

_shifted = {"shift": 1.0, "features": 64}
add("gain-cannot-shift", WRONG, (_shifted, {"unexplained": 0.6, "row_mean": 0.5, "row_mean_layer": 0.0}))
add("gain-cannot-shift", HOLDS, (_shifted, {"unexplained": 0.001, "row_mean": 0.0, "row_mean_layer": 0.0}))


def _shape(skewness: float, kurtosis: float) -> dict[str, Any]:
    moments = {"mean": 0.0, "std": 1.0, "skewness": skewness, "kurtosis": kurtosis}
    return {"before": moments, "after": moments, "change": TINY, "histogram": [0.0] * 40}


add("normal-shape", WRONG, ({"shape": "a"}, _shape(0.01, 0.02)), ({"shape": "b"}, _shape(0.01, -1.2)))
add("normal-shape", WRONG, ({"shape": "a"}, _shape(2.0, 0.0)))
add("normal-shape", HOLDS, ({"shape": "a"}, _shape(0.01, 0.02)), ({"shape": "b"}, _shape(-0.02, -0.05)))


def _moves(zero: float, other: float) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    branches = {"half of the norm": zero, "linear, centred": zero, "linear": other, "feed-forward": other}
    return [({"branch": name}, {"moved": moved}) for name, moved in branches.items()]


add("pre-row-mean", LIMITS, *_moves(TINY, 0.3))
add("pre-row-mean", HOLDS, *_moves(TINY, TINY))
add("pre-row-mean", WRONG, *_moves(0.1, 0.3))

_four = {"features": 4, "norm": "LayerNorm"}
add("sphere-radius", WRONG, (_four, {"least": 2.0, "largest": 2.0, "with_eps": 1.9}))
add("sphere-radius", HOLDS, (_four, {"least": 1.0, "largest": 1.0, "with_eps": 0.9}))

for outcome, by_variance, by_moment in ((WRONG, 0.5, TINY), (WRONG, 0.5, 0.5), (HOLDS, TINY, 0.5)):
    add(
        "rms-needs-variance",
        outcome,
        ({"same": "variance"}, {"differ": by_variance}),
        ({"same": "second moment"}, {"differ": by_moment}),
    )


def _counted(**changes: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    from normkit.lab.exact.norm_counts import STATED

    pairs = []
    for family, (placement, per_layer, final) in STATED.items():
        result = {
            "branches": {placement: 4}, "seats": {}, "per_layer": per_layer, "final": 1 if final is None else final,
            "qk_per_layer": 0, "eps": [1e-6],
        }  # fmt: skip
        pairs.append(({"family": family}, result | changes.get(family.replace(" ", "_"), {})))
    return pairs


add("norm-counts", HOLDS, *_counted())
add("norm-counts", HOLDS, *_counted(OLMo_2={"qk_per_layer": 2, "final": 0}))
add("norm-counts", WRONG, *_counted(Llama={"final": 0}))
add("norm-counts", WRONG, *_counted(BERT={"per_layer": 3}))
add("norm-counts", WRONG, *_counted(Gemma_2={"branches": {"pre": 4}}))


def _models(**kinds: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    from normkit.lab.exact.model_table import STATED

    return [
        (
            {"model": name},
            {
                "kinds": {kinds.get(name, kind): 5}, "placements": {placement: 4}, "biases": False,
                "built_from": "its paper",
            },
        )
        for name, (kind, placement) in STATED.items()
    ]  # fmt: skip


add("model-table", HOLDS, *_models())
add("model-table", WRONG, *_models(PaLM="layer"))


def _defaults(eps: list[float], changed: float) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    sources = [({"of": f"library {n}"}, {"eps": [e]}) for n, e in enumerate(eps)]
    return [*sources, ({"mean_square": 1.0}, {"changed": TINY}), ({"mean_square": 1e-4}, {"changed": changed})]


add("eps-defaults", HOLDS, *_defaults([1e-5, 1e-6], 0.001))
add("eps-defaults", LIMITS, *_defaults([1e-5, 1e-6], 0.04))
add("eps-defaults", LIMITS, *_defaults([1e-5, 1e-6, 1e-12], 0.001))
add("eps-defaults", WRONG, *_defaults([1e-12, 1e-6, 1e-8], 0.001))
