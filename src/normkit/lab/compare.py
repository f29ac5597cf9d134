"""Compare: norms and placements of one's own beside the built-in ones, by the same trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit.lab.claim import Row
from normkit.lab.executors import Executor, Processes
from normkit.lab.register import absolute
from normkit.lab.run import Task
from normkit.lab.setups.statistics import Interval, t_interval
from normkit.lab.trial import KNOWS_NOTHING, check, knows_frequencies, speed, training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES = ("layer", "rms")
BASE_PLACEMENTS = ("pre", "post")


@dataclass(frozen=True)
class Effort:
    """How much a comparison measures."""

    dim: int
    depth: int
    depths: tuple[int, ...]
    batch: int
    batches: tuple[int, ...]
    rate: float
    rates: tuple[float, ...]
    steps: int
    tokens: int
    rounds: int


QUICK = Effort(32, 2, (1, 2, 6), 8, (1, 4, 8), 3e-3, (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1), 80, 512, 15)
FULL = Effort(
    64, 4, (2, 4, 8, 16), 8, (1, 2, 8, 32), 3e-3, (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0), 400, 2048, 40
)


@dataclass(frozen=True)
class Outcome:
    """What came out for one norm at one placement."""

    norm: str
    placement: str
    reason: str = ""
    """Why there are no numbers; empty where there are."""
    parameters: int = 0
    rates: dict[float, Interval] = field(default_factory=dict)
    """Held-out loss by learning rate."""
    depths: dict[int, Interval] = field(default_factory=dict)
    batches: dict[int, Interval] = field(default_factory=dict)
    worst: dict[float, float] = field(default_factory=dict)
    """The largest held-out loss of the runs at each learning rate."""
    diverged: dict[float, int] = field(default_factory=dict)
    """How many runs diverged at each learning rate."""
    forward: Interval | None = None
    """Time over LayerNorm's."""
    backward: Interval | None = None

    @property
    def name(self) -> str:
        """What tables and plots call it."""
        short = self.norm.rpartition(":")[2]
        return f"{short}, {self.placement.rpartition(':')[2]}"

    @property
    def best_rate(self) -> float:
        """The learning rate with the lowest held-out loss."""
        return min(self.rates, key=lambda rate: self.rates[rate].mean)

    @property
    def quality(self) -> Interval:
        """Held-out loss at the best learning rate."""
        return self.rates[self.best_rate]

    @property
    def highest_rate(self) -> float | None:
        """The highest learning rate at which every run learnt more than how often characters come; None if none did."""
        good = [rate for rate, loss in self.worst.items() if loss < knows_frequencies()]
        return max(good) if good else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: intervals are ``{"mean", "low", "high"}``, null where one seed gives no ends."""
        values = asdict(self)
        for name in ("rates", "depths", "batches"):
            values[name] = {str(k): _interval(v) for k, v in getattr(self, name).items()}
        values |= {n: {str(k): v for k, v in getattr(self, n).items()} for n in ("worst", "diverged")}
        values["forward"], values["backward"] = _interval(self.forward), _interval(self.backward)
        if not self.reason:
            values |= {"best_rate": self.best_rate, "quality": _interval(self.quality)}
            values |= {"highest_rate": self.highest_rate}
        return values


def candidates(norms: Sequence[str], placements: Sequence[str]) -> list[tuple[str, str]]:
    """(norm, placement) of everything to compare: one's own, then the built-in ones that they stand beside.

    Norms go with Pre-Norm unless placements are given; placements go with LayerNorm unless norms are given.
    """
    if placements:
        wirings = dict.fromkeys([*placements, *BASE_PLACEMENTS])
        return [(norm, wiring) for norm in dict.fromkeys(norms or ["layer"]) for wiring in wirings]
    return [(norm, "pre") for norm in dict.fromkeys([*norms, *BASELINES])]


def compare(
    norms: Sequence[str] = (),
    placements: Sequence[str] = (),
    *,
    seeds: int = 3,
    effort: Effort = QUICK,
    executor: Executor | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
    on_start: Callable[[int], None] = lambda count: None,
) -> list[Outcome]:
    """Run one's own norms and placements through the same trials as the built-in ones.

    Args:
        norms: references, see `normkit.lab.register.find_norm`.
        placements: references, see `normkit.lab.register.find_placement`.
        seeds: runs of each setting.
        effort: how much is measured.
        executor: where; two processes by default.
        on_row: called with each measurement.
        on_start: called with the number of measurements to come, twice: checks, then trials.

    Returns:
        One outcome each, in order; one that cannot be built or run has a reason instead of numbers.
    """
    executor = executor or Processes(2)
    pairs = candidates(norms, placements)

    def made(tasks: list[Task]) -> list[Row]:
        on_start(len(tasks))
        rows = []
        for row in executor.run(tasks):
            on_row(row)
            rows.append(row)
        return rows

    checks = made([Task("compare check", check, _cell(pair, dim=effort.dim), 0, effort is QUICK) for pair in pairs])
    sound = {pair: row for pair in pairs for row in checks if _is_of(row, pair) and row.error is None}
    rows = made([task for pair in sound for task in _trials(pair, seeds, effort)])
    outcomes = []
    for pair in pairs:
        own = [row for row in (*checks, *rows) if _is_of(row, pair)]
        reason = next((row.error for row in own if row.error is not None), None)
        if reason is not None:
            outcomes.append(Outcome(*pair, reason=_plain(reason)))
        else:
            outcomes.append(_outcome(pair, own, sound[pair].result["parameters"], effort))
    return outcomes


def _plain(reason: str) -> str:
    """A reason without the type of those exceptions whose message says all, and with files as they were given."""
    return reason.removeprefix("TrialError: ").removeprefix("CandidateError: ").replace(f"{Path.cwd()}/", "")


def _cell(pair: tuple[str, str], **settings: Any) -> dict[str, Any]:
    return {"norm": absolute(pair[0]), "placement": absolute(pair[1]), **settings}


def _is_of(row: Row, pair: tuple[str, str]) -> bool:
    return (row.cell["norm"], row.cell["placement"]) == (absolute(pair[0]), absolute(pair[1]))


def _trials(pair: tuple[str, str], seeds: int, effort: Effort) -> list[Task]:
    base = {"dim": effort.dim, "depth": effort.depth, "batch": effort.batch, "rate": effort.rate, "steps": effort.steps}
    cells = [{**base, "rate": rate} for rate in effort.rates]
    cells += [{**base, "depth": depth} for depth in effort.depths]
    cells += [{**base, "batch": batch} for batch in effort.batches]
    unique = {str(cell): cell for cell in cells}.values()
    clock = {"tokens": effort.tokens, "dim": 8 * effort.dim, "rounds": effort.rounds}
    quick = effort is QUICK
    return [
        task
        for seed in range(seeds)
        for task in (
            *(Task("compare training", training, _cell(pair, **cell), seed, quick) for cell in unique),
            Task("compare speed", speed, _cell(pair, **clock), seed, quick),
        )
    ]


def _outcome(pair: tuple[str, str], rows: list[Row], parameters: int, effort: Effort) -> Outcome:
    trained = [row for row in rows if "rate" in row.cell]
    timed = [row for row in rows if "tokens" in row.cell]

    def at(**settings: Any) -> list[Row]:
        base = {"depth": effort.depth, "batch": effort.batch, "rate": effort.rate} | settings
        return [row for row in trained if all(row.cell[k] == v for k, v in base.items())]

    def losses(found: list[Row]) -> Interval:
        return t_interval([row.result["loss"] for row in found])

    return Outcome(
        *pair,
        parameters=parameters,
        rates={rate: losses(at(rate=rate)) for rate in effort.rates},
        depths={depth: losses(at(depth=depth)) for depth in effort.depths},
        batches={batch: losses(at(batch=batch)) for batch in effort.batches},
        worst={rate: max(row.result["loss"] for row in at(rate=rate)) for rate in effort.rates},
        diverged={rate: sum(row.result["diverged"] for row in at(rate=rate)) for rate in effort.rates},
        forward=t_interval([row.result["forward"] for row in timed]),
        backward=t_interval([row.result["forward and backward"] for row in timed]),
    )


def _interval(value: Interval | None) -> dict[str, float | None] | None:
    if value is None:
        return None
    return {name: v if math.isfinite(v) else None for name, v in value._asdict().items()}


def figure(outcomes: Sequence[Outcome]) -> Figure:
    """Four panels: loss by learning rate, by depth, by batch size, and the norm's time over LayerNorm's."""
    from matplotlib.figure import Figure

    drawn = [o for o in outcomes if not o.reason]
    result = Figure(figsize=(11, 7), layout="constrained")
    ((rates, depths), (batches, times)) = result.subplots(2, 2)
    panels = ((rates, "rates", "learning rate"), (depths, "depths", "layers"), (batches, "batches", "batch size"))
    for axes, name, label in panels:
        for n, outcome in enumerate(drawn):
            _line(axes, getattr(outcome, name), outcome.name, n)
        axes.set_xscale("log", base=10 if name == "rates" else 2)
        if name != "rates" and drawn:
            sizes = list(getattr(drawn[0], name))
            axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel(label)
        axes.set_ylabel("held-out loss, nats a character")
        axes.grid(True, color="0.92")
    for level, said in ((KNOWS_NOTHING, "knows nothing"), (knows_frequencies(), "knows frequencies")):
        rates.axhline(level, color="0.6", linewidth=1, linestyle=":")
        rates.annotate(said, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="0.4")
    if drawn:
        rates.legend(frameon=False)
    for n, outcome in enumerate(drawn):
        for k, value in enumerate((outcome.forward, outcome.backward)):
            assert value is not None
            half = value.half if math.isfinite(value.half) else 0.0
            times.barh(n + 0.38 * k - 0.19, value.mean, 0.36, xerr=half, color=f"C{n}", alpha=1.0 - 0.45 * k)
    times.set_yticks(range(len(drawn)), [o.name for o in drawn])
    times.invert_yaxis()
    times.axvline(1, color="0.4", linewidth=1, linestyle=":")
    times.set_xlabel("time / torch LayerNorm's; light: with backward")
    return result


def _line(axes: Any, values: dict[Any, Interval], label: str, n: int) -> None:
    means = [v.mean for v in values.values()]
    halves = [v.half if math.isfinite(v.half) else 0.0 for v in values.values()]
    axes.errorbar(list(values), means, yerr=halves, marker="o", markersize=4, capsize=2, color=f"C{n}", label=label)
