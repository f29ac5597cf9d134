"""Every provider that is installed gives float64's answers, on sizes that no vector width divides."""

from __future__ import annotations

import pytest
import torch

from normkit.bench.grid import CHANNEL_NORMS, DTYPES, MODES, NORMS, ROW_NORMS, Case, make_inputs
from normkit.bench.harness import TOLERANCE, error, run_case, warm_case
from normkit.bench.providers import PROVIDERS
from normkit.bench.providers.eager import TORCH
from normkit.bench.providers.step import Step, torch_step
from normkit.bench.results import COPY

ODD = {"rows": (5, 77), "qk": (3, 384), "images": (3, 6, 5, 7)}
QUICK = [name for name in PROVIDERS if name != "torch.compile"]
# Which modes each has, where it is not all of them.
FORWARD = {"onnxruntime", "openvino"}


def odd(norm: str) -> tuple[int, ...]:
    return ODD["qk" if norm == "qk_rms_norm" else "rows" if norm in ROW_NORMS else "images"]


def cases(norm: str) -> list[Case]:
    layouts = (False, True) if norm in CHANNEL_NORMS else (False,)
    return [Case(norm, odd(norm), d, m, 1, last) for d in DTYPES for m in MODES for last in layouts]


def worst(case: Case, name: str) -> float | None:
    """The provider's largest error in tolerances; None where it has nothing for the case."""
    inputs = make_inputs(case)
    exact_inputs = inputs.to(torch.float64)
    for leaf in case.leaves if case.mode == "train" else ():
        getattr(inputs, leaf).requires_grad_()
        getattr(exact_inputs, leaf).requires_grad_()
    with torch.set_grad_enabled(case.mode == "train"):
        exact = torch_step(case, exact_inputs, TORCH[case.norm])
        wanted = exact.outputs(exact.call())
        step = PROVIDERS[name].make(case, inputs)
        if step is None:
            return None
        step.call()  # twice: what is written into given tensors, or donated, is written again
        got = step.outputs(step.call())
    assert [t.shape for t in got] == [t.shape for t in wanted]
    assert {t.dtype for t in got} == {DTYPES[case.dtype]}
    limit = TOLERANCE[case.dtype] * (4 if case.mode == "train" else 1)
    return max(error(a, b.detach()) for a, b in zip(got, wanted, strict=True)) / limit


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("norm", NORMS)
def test_a_provider_is_right_wherever_it_has_something(name: str, norm: str) -> None:
    if not PROVIDERS[name].installed:
        pytest.skip(f"{name} is not installed")
    found = {case: worst(case, name) for case in cases(norm)}
    assert {case.name: off for case, off in found.items() if off is not None and not off <= 1} == {}
    has = {case for case, off in found.items() if off is not None}
    if name in FORWARD:
        assert {c.mode for c in has} == (set() if (name, norm) == ("openvino", "batch_norm_train") else set(MODES[:2]))
        assert all(c.norm == "channel_layer_norm" for c in has if c.channels_last)
    elif name in ("normkit", "jax"):
        assert has == set(found)
    elif name == "torch":
        assert has >= {c for c in found if c.mode != "preallocated"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", NORMS)
def test_compiled_code_is_right(norm: str, mode: str) -> None:
    for case in cases(norm):
        if case.mode == mode and case.dtype != "float16":
            off = worst(case, "torch.compile")
            assert off is not None and off <= 1, case.name


def test_compiled_code_writes_into_the_given_tensor() -> None:
    case = Case("add_rms_norm", (3, 17), "float32", "preallocated", 1)
    off = worst(case, "torch.compile")
    assert off is not None and off <= 1


@pytest.mark.parametrize("name", ["normkit", "torch", "onnxruntime", "openvino", "jax"])
def test_preallocated_outputs_stay_where_they_are(name: str) -> None:
    if not PROVIDERS[name].installed:
        pytest.skip(f"{name} is not installed")
    case = Case("add_rms_norm", (16, 256), "float32", "preallocated", 1)
    with torch.no_grad():
        step = PROVIDERS[name].make(case, make_inputs(case))
        assert step is not None
        places = [[t.data_ptr() for t in step.outputs(step.call())] for _ in range(3)]
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_call_keeps_the_memory_that_it_writes(name: str) -> None:
    """Other libraries hold bare pointers, and timing keeps the call alone: it must keep the tensors behind it."""
    if not PROVIDERS[name].installed:
        pytest.skip(f"{name} is not installed")
    case = Case("rms_norm", (16, 256), "float32", "preallocated", 1)
    with torch.no_grad():
        call = PROVIDERS[name].make(case, make_inputs(case)).call  # type: ignore[union-attr]
        (target,) = call()
    assert any(cell.cell_contents == [target] for cell in call.__closure__ if isinstance(cell.cell_contents, list))


def test_a_residual_sum_gets_its_own_gradient() -> None:
    case = Case("add_rms_norm", (4, 9), "float32", "train", 1)
    inputs = make_inputs(case)
    for name in case.leaves:
        getattr(inputs, name).requires_grad_()
    step = torch_step(case, inputs, TORCH[case.norm])
    with_both = step.outputs(step.call())[2]
    inputs.sum_grad.zero_()
    assert not torch.equal(with_both, step.outputs(step.call())[2])


def test_error_sees_one_wrong_value_a_nan_and_a_wrong_shape() -> None:
    exact = torch.ones(2, 3, 4, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    off = exact.float()
    off[1, 2, 3, 4] = 1.25
    assert error(exact.float(), exact) == 0
    assert error(off, exact) == pytest.approx(0.25)
    off[0, 0, 0, 0] = torch.nan
    assert not error(off, exact) <= 1
    with pytest.raises(ValueError, match="shape"):
        error(off[:1], exact)


def _break(monkeypatch: pytest.MonkeyPatch, name: str, make: object) -> None:
    import dataclasses

    class Broken(type(PROVIDERS[name])):  # type: ignore[misc]
        def make(self, case: Case, inputs: object) -> Step:
            return make(case, inputs)  # type: ignore[operator]

    fields = {f.name: getattr(PROVIDERS[name], f.name) for f in dataclasses.fields(PROVIDERS[name])}
    monkeypatch.setitem(PROVIDERS, name, Broken(**fields))


def test_one_that_is_wrong_or_raises_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("rms_norm", (4, 9), "float32", "fresh", 1)
    _break(monkeypatch, "torch", lambda case, i: Step(lambda: i.x * 2))

    def fails(*_: object) -> Step:
        raise RuntimeError("no kernel\nfor this")

    _break(monkeypatch, "model code", fails)
    rows = {r.provider: r for r in run_case(case, ["normkit", "torch", "model code"])}
    assert rows["torch"].note == "wrong" and rows["torch"].error > 0.1 and rows["torch"].row()["microseconds"] == ""
    assert rows["model code"].note == "failed: RuntimeError: no kernel"
    assert rows["normkit"].note == "" and rows["normkit"].microseconds > 0 and rows["normkit"].copies > 0
    assert list(rows)[-1] == COPY and rows[COPY].copies == 1


@pytest.mark.parametrize("mode", MODES)
def test_normkit_being_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    right = PROVIDERS["normkit"].make

    def wrong(case: Case, inputs: object) -> Step:
        step = right(case, inputs)  # type: ignore[arg-type]
        return Step(step.call, lambda got: (*step.outputs(got)[:-1], step.outputs(got)[-1] * 1.01))

    _break(monkeypatch, "normkit", wrong)
    with pytest.raises(AssertionError, match="normkit is off by"):
        run_case(Case("rms_norm", (4, 9), "float32", mode, 1), ["normkit"])


def test_rows_hold_what_was_measured() -> None:
    case = Case("layer_norm", (64, 256), "float32", "train", 1)
    rows = {r.provider: r for r in run_case(case, ["normkit", "torch"])}
    for r in rows.values():
        passes = 2 if r.provider == COPY else 5
        assert r.gigabytes_per_second == pytest.approx(passes * 64 * 256 * 4 / r.microseconds / 1e3)
        assert r.copies == pytest.approx(r.microseconds / rows[COPY].microseconds)
        assert r.page_faults >= 0 and r.spread >= 0
    assert 0 < rows["torch"].error < TOLERANCE["float32"] * 4


def test_fresh_large_outputs_fault_and_preallocated_ones_do_not() -> None:
    found = {}
    for mode in ("fresh", "preallocated"):
        rows = run_case(Case("layer_norm", (4100, 2048), "float32", mode, 1), ["normkit"])
        found[mode] = rows[0].page_faults
    assert found["fresh"] > 8 > found["preallocated"]  # 8200 small pages, or 16 huge ones


def test_warming_makes_and_calls_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    _break(monkeypatch, "torch", lambda case, i: Step(lambda: called.append(i.x.requires_grad)))
    warm_case(Case("rms_norm", (4, 9), "float32", "train", 1), ["torch"])
    assert called == [True]
