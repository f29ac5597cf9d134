"""What a stranger finds in each public docstring: a formula, arguments, what comes back, what is raised, torch."""

import inspect
import re

import pytest
from torch.nn import Module

from normkit import functional, nn

CLASSES = [getattr(nn, n) for n in nn.__all__ if inspect.isclass(getattr(nn, n)) and issubclass(getattr(nn, n), Module)]
FUNCTIONS = [getattr(functional, n) for n in functional.__all__ if inspect.isfunction(getattr(functional, n))]
HELPERS = [getattr(nn, n) for n in nn.__all__ if getattr(nn, n) not in CLASSES]


def text_of(thing) -> str:
    return inspect.getdoc(thing) or ""


def parameters(thing) -> list[str]:
    return [n for n in inspect.signature(thing).parameters if n not in ("self", "args", "kwargs")]


@pytest.mark.parametrize("thing", CLASSES + FUNCTIONS, ids=lambda t: f"{t.__module__.split('.')[1]}.{t.__name__}")
def test_a_norms_docstring_says_everything(thing):
    text = text_of(thing)
    if re.match(r"`\w+` .*see there|`\w+` with", text):  # one of a family, which says all
        named = re.match(r"`(\w+)`", text).group(1)
        text = text + text_of(vars(nn).get(named) or vars(inspect.getmodule(thing))[named])
    missing = []
    if not re.search(r"``\w+.* = |::\n", text):
        missing.append("formula")
    for section in ("Args:", "Raises:", "Shape:" if inspect.isclass(thing) else "Returns:"):
        if section not in text:
            missing.append(section)
    if "torch" not in text.replace("`torch.func`", ""):
        missing.append("how it differs from torch's")
    missing += [name for name in parameters(thing) if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"{thing.__name__} lacks {missing}"


@pytest.mark.parametrize("thing", CLASSES + FUNCTIONS, ids=lambda t: f"{t.__module__.split('.')[1]}.{t.__name__}")
def test_a_norms_docstring_names_its_paper(thing):
    if thing in (nn.Norm, functional.norm, functional.batch_norm_functional, functional.l2_norm):
        return  # any norm; as batch_norm; older than papers on it
    text = text_of(thing)
    named = re.match(r"`(\w+)`", text)
    if named:
        text += text_of(vars(nn).get(named.group(1)) or vars(inspect.getmodule(thing))[named.group(1)])
    assert re.search(r"arXiv:\d{4}\.\d{4,5}|et al\. \d{4}", text)


@pytest.mark.parametrize("thing", HELPERS, ids=lambda t: t.__name__)
def test_helpers_say_what_they_take(thing):
    text = text_of(thing)
    assert all(re.search(rf"\b{name}\b", text) for name in parameters(thing)) or "for the arguments" in text
