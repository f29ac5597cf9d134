"""Write the tables of docs/placements.md from normkit's own: ``python docs/placements.py --write``."""

from __future__ import annotations

import sys
from pathlib import Path

from normkit import PLACEMENTS, SCHEDULES, Placement, placement, schedule
from normkit.explain.wiring import equation

PAGE = Path(__file__).with_suffix(".md")
DEPTH = 12
BEGIN, END = "<!-- {}: written by docs/placements.py -->", "<!-- end of {} -->"


def branch(row: Placement) -> str:
    """The branch's equation, and what else lies inside F."""
    inside_f = [name for name, used in (("QKV-norm", row.qkv_norm), ("head factors", row.head_scale)) if used]
    return f"`{equation(row)}`" + (f", {' and '.join(inside_f)}" if inside_f else "")


def scale(row: Placement) -> str:
    """Lambda: what it is and where it starts."""
    if row.branch_scale_kind == "fixed":
        return "1" if row.branch_scale == 1 else f"{row.branch_scale:.4g}"
    return f"{row.branch_scale:.4g}, a learned {'scalar' if row.branch_scale_kind == 'scalar' else 'vector'}"


def initialization(row: Placement) -> str:
    """The gain and the matrices that it is for."""
    parts = [f"{row.init_gain:.4f} on {', '.join(row.init_roles)}"] if row.init_roles else []
    parts += [f"0 on {', '.join(row.zero_roles)}"] if row.zero_roles else []
    return "; ".join(parts) or "-"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, tuple("-" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def placements() -> str:
    """Every row of `PLACEMENTS`, for the last of 12 layers of a decoder."""
    head = ("placement", "y", "slots", "alpha", "lambda", "init gain and matrices", "final norm", "paper")
    rows = []
    for name in PLACEMENTS:
        row = placement(name, depth=DEPTH, layer=DEPTH, kind="ffn")
        y = branch(row)
        if row.second_stream:
            y += ", and `s + F(x)` on a second stream"
        if name == "parallel":
            y = "`x + F(N(x)) + G(N(x))`"
        slots = ", ".join(row.slots) or "-"
        final = "yes" if row.final_norm else "no"
        rows.append((f"`{name}`", y, slots, f"{row.alpha:.5g}", scale(row), initialization(row), final, row.source))
    return table(head, rows)


def schedules() -> str:
    """Every row of `SCHEDULES` over 12 layers, equal layers together."""
    rows = []
    for name, row in SCHEDULES.items():
        plan = schedule(name, DEPTH)
        runs: list[list[int]] = []
        both = [tuple(branch(plan.branch(n, kind)) for kind in ("attention", "ffn")) for n in range(1, DEPTH + 1)]
        for n, found in enumerate(both, 1):
            if runs and both[runs[-1][0] - 1] == found:
                runs[-1][1] = n
            else:
                runs.append([n, n])
        for first, last in runs:
            where = f"{first}" if first == last else f"{first} to {last}"
            needs = ", ".join(f"`{n}`" for n in row.needs)
            cells = (where, *both[first - 1], needs, "yes" if row.final_norm else "no", row.source)
            rows.append((f"`{name}`", *cells))
    return table(("schedule", "layers of 12", "attention", "feed-forward", "needs", "final norm", "paper"), rows)


def page(text: str) -> str:
    """The page with its tables brought up to date."""
    for name, made in (("placements", placements()), ("schedules", schedules())):
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{made}\n\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    made = page(PAGE.read_text())
    if "--write" in sys.argv:
        PAGE.write_text(made)
    else:
        print(made)
