"""The claims: every module of ``lab/exact`` and ``lab/measured`` has one, called ``CLAIM``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache

from normkit.lab import exact, measured
from normkit.lab.claim import Claim


class UnknownClaim(ValueError):
    """No claim has that id; the message names the nearest."""


@cache
def all_claims() -> dict[str, Claim]:
    """Every claim by its id: the exact ones first, each kind in alphabetical order."""
    found: dict[str, Claim] = {}
    for package in (exact, measured):
        for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda m: m.name):
            if module.name.startswith("_"):
                continue
            claim = importlib.import_module(f"{package.__name__}.{module.name}").CLAIM
            if claim.id.replace("-", "_") != module.name:
                raise ValueError(f"{package.__name__}.{module.name} holds the claim {claim.id!r}: name them alike")
            if claim.id in found:
                raise ValueError(f"two claims have the id {claim.id!r}")
            found[claim.id] = claim
    return found


def select(ids: Iterable[str]) -> list[Claim]:
    """The claims with these ids; ``all``, ``exact`` and ``measured`` stand for many.

    Raises:
        UnknownClaim: an id that no claim has.
    """
    known = all_claims()
    chosen: dict[str, Claim] = {}
    for name in ids:
        if name in ("all", "exact", "measured"):
            chosen |= {c.id: c for c in known.values() if name in ("all", c.kind)}
        elif name in known:
            chosen[name] = known[name]
        else:
            import difflib

            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(near)}?" if near else "`normkit lab list` shows them all"
            raise UnknownClaim(f"no claim has the id {name!r}; {hint}")
    return list(chosen.values())
