"""OpenVINO: a graph of one norm, forward only, from its own operators and the patterns that it fuses.

A preallocated case writes into a tensor that was set once; a fresh one sets a new tensor each time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normkit.bench.grid import DTYPES, EPS, HEAD, RMS_EPS, Case, Inputs, groups_of
from normkit.bench.providers.step import Step, activations, as_array, as_image


@cache
def _core() -> Any:
    import openvino

    return openvino.Core()


def _type(dtype: torch.dtype) -> Any:
    from openvino import Type

    return {torch.float32: Type.f32, torch.bfloat16: Type.bf16, torch.float16: Type.f16}[dtype]


def _shared(t: Tensor) -> Any:
    """A tensor of OpenVINO on a tensor's own memory."""
    import openvino

    array = t.view(torch.uint16).numpy() if t.element_size() == 2 else t.numpy()
    return openvino.Tensor(array, openvino.Shape(list(t.shape)), _type(t.dtype))


def _model(case: Case, i: Inputs) -> Any:
    """Half-precision values are converted to float32 around the norm, and the plugin decides what it runs in."""
    import openvino
    from openvino import opset13 as o

    dtype = DTYPES[case.dtype]
    half = dtype != torch.float32
    parameters = [o.parameter(list(t.shape), _type(dtype)) for t in activations(case, i).values()]
    x, *others = [o.convert(p, "f32") if half else p for p in parameters]

    def constant(t: Tensor) -> Any:
        return o.constant(t.detach().float().numpy())

    def axes(*values: int) -> Any:
        return o.constant(np.array(values, dtype=np.int64))

    def along(t: Tensor, last: bool) -> Any:
        return constant(t if last else t.view(-1, 1, 1))

    def mvn(h: Any, *over: int) -> Any:
        return o.mvn(h, axes(*over), True, EPS, "inside_sqrt")

    def rms(h: Any) -> Any:
        mean = o.reduce_mean(o.power(h, constant(torch.tensor(2.0))), axes(-1), True)
        root = o.sqrt(o.add(mean, constant(torch.tensor(RMS_EPS))))
        return o.multiply(o.multiply(h, o.divide(constant(torch.tensor(1.0)), root)), constant(i.weight))

    def affine(h: Any, last: bool = False) -> Any:
        return o.add(o.multiply(h, along(i.weight, last)), along(i.bias, last))

    if case.norm == "qk_rms_norm":
        width = case.shape[-1]
        x = o.slice(x, axes(0), axes(width), axes(1), axes(1))
        x = o.reshape(x, axes(case.shape[0], width // HEAD, HEAD), False)
    if case.norm == "layer_norm":
        results = [affine(mvn(x, -1), last=True)]
    elif case.norm in ("rms_norm", "qk_rms_norm"):
        results = [rms(x)]
    elif case.norm == "add_rms_norm":
        total = o.add(x, others[0])
        results = [rms(total), total]
    elif case.norm == "gated_rms_norm":
        results = [o.multiply(rms(x), o.swish(others[0]))]
    elif case.norm == "channel_layer_norm":
        results = [affine(mvn(x, -1), last=True) if case.channels_last else affine(mvn(x, 1))]
    elif case.norm == "instance_norm":
        results = [affine(mvn(x, 2, 3))]
    elif case.norm == "group_norm":
        results = [o.group_normalization(x, constant(i.weight), constant(i.bias), groups_of(case.shape[1]), EPS)]
    elif case.norm == "batch_norm":
        results = [
            o.batch_norm_inference(x, constant(i.weight), constant(i.bias), constant(i.mean), constant(i.var), EPS)
        ]
    else:
        return None  # no training-mode batch norm
    make: Any = openvino.Model  # its stub does not say that any node may be a result
    return make([o.convert(r, _type(dtype)) if half else r for r in results], parameters)


def make(case: Case, inputs: Inputs) -> Step | None:
    """Forward cases; of the channels-last ones the channel layer norm, which is a plain one there."""
    if case.mode == "train" or (case.channels_last and case.norm != "channel_layer_norm"):
        return None
    model = _model(case, inputs)
    if model is None:
        return None
    import openvino

    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": case.threads,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        # float32 stays float32 also where the processor has faster units for less.
        "INFERENCE_PRECISION_HINT": "f32" if case.dtype == "float32" else _hint(case.dtype),
    }
    request = _core().compile_model(model, "CPU", config).create_infer_request()
    for k, t in enumerate(activations(case, inputs).values()):
        request.set_input_tensor(k, _shared(t))
    like = torch.empty(as_array(case, inputs.x).shape, dtype=inputs.x.dtype)
    count = 2 if case.norm == "add_rms_norm" else 1

    def read(_: Any) -> tuple[Tensor, ...]:
        found = []
        for k in range(count):
            data = request.get_output_tensor(k).data
            flat = torch.from_numpy(np.array(data).reshape(-1).view(np.uint8)).view(like.dtype)
            found.append(as_image(case, flat.view(like.shape)))
        return tuple(found)

    if case.mode == "preallocated":
        targets = [torch.empty_like(like) for _ in range(count)]
        for k, t in enumerate(targets):
            request.set_output_tensor(k, _shared(t))

        def into() -> list[Tensor]:  # returning them keeps the memory that the request only points to
            request.infer()
            return targets

        return Step(into, lambda found: tuple(as_image(case, t) for t in found))
    kind, shape = _type(like.dtype), openvino.Shape(list(like.shape))

    def fresh() -> None:
        for k in range(count):
            request.set_output_tensor(k, openvino.Tensor(kind, shape))
        request.infer()

    return Step(fresh, read)


def _hint(dtype: str) -> str:
    """The half type where the plugin computes in it, else float32."""
    able = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    name, hint = {"bfloat16": ("BF16", "bf16"), "float16": ("FP16", "f16")}[dtype]
    return hint if name in able else "f32"
