"""docs/norms.md lists every norm of the catalog as its docstring and its spec have it.

python -m tests.test_norms_page --write    writes it
"""

import inspect
import re
import sys
from pathlib import Path

from torch.nn import Module

from normkit import functional, nn
from normkit.nn.catalog import CATALOG

PAGE = Path(__file__).parent.parent / "docs" / "norms.md"
FUNCTION = {  # where the names do not say it
    "BatchNorm": "batch_norm",
    "BatchNorm1d": "batch_norm",
    "BatchNorm2d": "batch_norm",
    "BatchNorm3d": "batch_norm",
    "InstanceNorm1d": "instance_norm",
    "InstanceNorm2d": "instance_norm",
    "InstanceNorm3d": "instance_norm",
    "AdaLayerNorm": "modulate",
    "AdaLayerNormZero": "modulate",
    "RMSNorm": "rms_norm",
    "SeeDNorm": "seed_norm",
    "GatedRMSNorm": "rms_norm(gate=)",
    "L2Norm": "l2_norm",
}
HEAD = """# The norms

Every norm of `normkit.nn`, one line each, from its docstring; the docstring has the shapes, the arguments and the
differences from torch's. What one statistic is taken over and every other convention is a `NormSpec`: `module.spec`
where one describes the norm, and `nn.build(spec, features)` for any other combination.

| module | formula | paper | function | `spec` | `mask` |
|---|---|---|---|---|---|
"""


def story(cls) -> str:
    """The docstring, followed through those that point to another."""
    text = inspect.getdoc(cls)
    named = re.match(r"`(\w+)`", text)
    if named:
        text += "\n" + story(getattr(nn, named[1], None) or vars(inspect.getmodule(cls))[named[1]])
    return text


def formula(text: str) -> str:
    """The first formula of y in double backquotes, or the line of an earlier display that sets y or h'."""
    inline = re.search(r"``([^`]*\by = [^`]*)``", text) or re.search(r"``([^`]* = [^`]*)``", text)
    display = re.search(r"::\n\n((?: {4}.+\n)+)", text)
    if display and (inline is None or display.start() < inline.start()):
        lines = [line.strip() for line in display[1].splitlines()]
        last = next(n for start in ("y =", "h' =", "") for n in lines if start in n)
        return re.sub(r"\s{2,}(then )?", "; ", last)
    return re.sub(r"\s+", " ", inline[1])


def row(cls) -> str:
    text = story(cls)
    papers = list(dict.fromkeys(re.findall(r"arXiv:(\d{4}\.\d{4,5})", text)))
    paper = f"[{papers[0]}](https://arxiv.org/abs/{papers[0]})" if papers else "-"
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    function = FUNCTION.get(cls.__name__, snake)
    known = function.split("(")[0] in functional.__all__
    module = next(entry.make() for entry in CATALOG if type(entry.make()) is cls)
    mask = "mask" in inspect.signature(cls.forward).parameters
    shown = formula(text).replace("|", r"\|")
    cells = [f"`{cls.__name__}`", f"`{shown}`", paper, f"`{function}`" if known else "-"]
    cells += ["yes" if hasattr(module, "spec") else "-", "yes" if mask else "-"]
    return "| " + " | ".join(cells) + " |"


def page() -> str:
    public = (getattr(nn, name) for name in nn.__all__)
    classes = [c for c in public if inspect.isclass(c) and issubclass(c, Module)]
    return HEAD + "\n".join(row(c) for c in classes) + "\n"


def test_the_page_is_what_the_docstrings_say():
    assert PAGE.read_text() == page(), "run python -m tests.test_norms_page --write"


def test_every_function_has_a_line():
    text = PAGE.read_text()
    apart = {"norm", "batch_norm_functional"}  # any spec; batch_norm that returns its statistics
    for name in set(functional.__all__) - apart:
        if inspect.isfunction(getattr(functional, name)):
            assert f"`{name}`" in text, name


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(page())
