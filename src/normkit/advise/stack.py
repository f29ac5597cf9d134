"""Where the norms of a transformer sit, what bounds its logits, how it starts and warms up."""

from __future__ import annotations

from dataclasses import dataclass

from normkit.advise.evidence import Evidence, Results, paper
from normkit.advise.request import Request
from normkit.placement import placement, schedule

XIONG = paper("Xiong et al. 2020, arXiv:2002.04745", "Post-LN's gradients near the output are large at initialization")
VERY_DEEP = 48
MANY_LAYERS = 32


@dataclass(frozen=True)
class Said:
    """A value with its reason."""

    value: str
    reason: str
    evidence: tuple[Evidence, ...]
    changes_if: str


def choose_placement(r: Request, results: Results) -> Said:
    """Where the norms sit on the residual stream."""
    if r.checkpoint_placement is not None:
        return Said(
            r.checkpoint_placement,
            "an existing checkpoint fixes its placement",
            (paper("Xiong et al. 2020, arXiv:2002.04745", "the two placements compute different functions"),),
            "training from scratch",
        )
    if r.placement is not None:
        return Said(r.placement, "asked for", _source(r.placement, r.depth), "another placement is asked for")
    stable = [c for c in ("xiong-gradient", "warm-up") if results.holds(c, unknown=True)]
    if not stable and results.holds("post-better", unknown=False):
        return Said(
            "post",
            "Pre-LN was found neither to start with smaller gradients nor to need less warm-up; Post-LN ends better",
            (*results.cite("post-better"), *results.cite("xiong-gradient"), *results.cite("warm-up")),
            "if Post-LN needed warm-up or had larger gradients (warm-up, xiong-gradient), pre",
        )
    if (r.high_learning_rate or r.depth >= VERY_DEEP) and results.holds("sandwich-bound", unknown=True):
        why = "at a high learning rate" if r.high_learning_rate else f"over {r.depth} layers"
        return Said(
            "sandwich",
            f"a norm on each branch's output bounds what one branch can write to the stream {why}",
            results.cite("sandwich-bound") or _source("sandwich", r.depth),
            "at an ordinary rate and depth, or if output norms did not bound the writes (sandwich-bound), pre",
        )
    evidence = tuple(e for c in stable for e in results.cite(c)) or (XIONG,)
    return Said(
        "pre",
        "its gradients do not grow towards the output, so it trains with little warm-up at common rates",
        evidence,
        "at a high learning rate or a depth past 48, sandwich; where Post-LN is needed for quality, deepnorm",
    )


def choose_qk_norm(r: Request, results: Results) -> Said:
    """Whether queries and keys are normalized."""
    if r.checkpoint is not None or r.checkpoint_placement is not None:
        return Said("as in the checkpoint", "an existing checkpoint fixes it", (_QK,), "training from scratch")
    wanted = r.high_learning_rate or r.depth >= MANY_LAYERS
    bounds = results.holds("qk-norm", unknown=True)
    evidence = results.cite("qk-norm") or (_QK,)
    if wanted and bounds:
        return Said("head", "it bounds the attention logits, which grow at high rates and in deep stacks", evidence,
                    "at an ordinary learning rate and depth it is not needed")  # fmt: skip
    reason = "logits stay moderate at this rate and depth" if bounds else "it was not found to bound the logits"
    return Said(
        "none", reason, evidence, f"at a high learning rate or from {MANY_LAYERS} layers on (qk-norm), per head"
    )


_QK = paper("Dehghani et al. 2023 (ViT-22B), arXiv:2302.05442", "QK-norm prevents diverging attention logits")


def choose_warm_up(r: Request, wiring: str | None, results: Results) -> Said:
    """How the learning rate starts."""
    adam = paper("Ma and Yarats 2019, arXiv:1910.04209", "2 / (1 - beta2) linear steps make up for Adam's bias")
    if wiring is None:
        return Said("none needed", "no residual stream of a transformer is trained here",
                    (paper("Goyal et al. 2017, arXiv:1706.02677", "warm-up is for very large batches"),),
                    "with thousands of samples a step, 5 epochs")  # fmt: skip
    if r.no_warm_up:
        return Said("none", "asked for without", results.cite("warm-up") or (XIONG,), "if it is allowed, a short one")
    if wiring in ("post", "mix", "hybrid") and results.holds("warm-up", unknown=True):
        return Said(
            "4000 steps, or 10 % of a short run",
            "Post-LN's first steps are too large without it",
            (*(results.cite("warm-up") or (XIONG,)), paper("Vaswani et al. 2017, arXiv:1706.03762", "4000 steps")),
            "with pre, sandwich or deepnorm a short one does; if Post-LN did not need it (warm-up), too",
        )
    return Said("2 / (1 - beta2) steps", "enough for Adam's second moment to settle; the placement needs no more",
                (*results.cite("warm-up"), adam), "with Post-LN, thousands")  # fmt: skip


def choose_initialization(r: Request, wiring: str | None, form: str) -> Said:
    """How the weights start."""
    if r.checkpoint is not None:
        return Said("from the checkpoint", "the weights are there", (paper("the checkpoint's own"),), "from scratch")
    if wiring is None:
        if r.architecture == "cnn":
            goyal, he = paper("Goyal et al. 2017, arXiv:1706.02677", "section 5.1"), "He et al. 2015, arXiv:1502.01852"
            return Said("He normal; the last gain of each residual branch at 0", "branches start as the identity",
                        (goyal, paper(he)), "without residual branches, gains of 1")  # fmt: skip
        return Said("torch's own", "gates are normalized, so the scale of the matrices matters little",
                    (paper("Ba et al. 2016, arXiv:1607.06450", "section 5.1"),), "a cell without norms")  # fmt: skip
    if form == "adaptive":
        return Said("the projection of the condition at 0", "each branch starts as the identity",
                    (paper("Peebles and Xie 2023 (DiT), arXiv:2212.09748"),), "without a condition")  # fmt: skip
    gain = _gain(wiring, r.depth)
    value = "Xavier normal" if gain == 1 else f"Xavier normal, value path times {gain:.4g}"
    return Said(value, f"what {wiring} prescribes (normkit.init_for)", _source(wiring, r.depth), "another placement")


def _gain(wiring: str, depth: int) -> float:
    branch = schedule(wiring, depth).branch(1, "ffn")
    return branch.init_gain if branch.init_roles else 1.0


def _source(name: str, depth: int) -> tuple[Evidence, ...]:
    return (paper(placement(name, depth=depth, layer=1, kind="ffn").source, f"defines {name}"),)
