"""ONNX Runtime: a graph of one norm, forward only, weights as constants, outputs bound where they are preallocated.

Its own operators where it has them (SimplifiedLayerNormalization, SkipSimplifiedLayerNormalization), else ONNX's. A
dtype that an operator has no kernel for is cast to float32 around it, as an exported model would do.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from normkit.bench.grid import DTYPES, EPS, HEAD, MOMENTUM, RMS_EPS, Case, Inputs, groups_of
from normkit.bench.providers.step import Step, activations, as_array, as_image

OPSET = 21
OWN = "com.microsoft"


class _Graph:
    """Nodes as they are added; every operator's first output is its name."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def op(self, kind: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> list[str]:
        from onnx import helper

        names = [f"{kind}_{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, domain=domain, **attributes))
        return names

    def constant(self, t: Tensor) -> str:
        from onnx import helper

        t = t.detach()
        name = f"constant_{len(self.constants)}"
        kind = _element_type(t.dtype)
        raw = t.contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else t.reshape(1).view(torch.uint8).numpy()
        data = raw if isinstance(raw, bytes) else raw.tobytes()
        self.constants.append(helper.make_tensor(name, kind, tuple(t.shape), data, raw=True))
        return name


def _element_type(dtype: torch.dtype) -> int:
    from onnx import TensorProto

    return {
        torch.float32: TensorProto.FLOAT,
        torch.bfloat16: TensorProto.BFLOAT16,
        torch.float16: TensorProto.FLOAT16,
        torch.int64: TensorProto.INT64,
    }[dtype]


def _build(case: Case, i: Inputs, cast: bool) -> Any:
    """The model: inputs are x (or what it is a slice of) and the residual or gate."""
    from onnx import TensorProto, helper

    g = _Graph()
    dtype = DTYPES[case.dtype]
    element = _element_type(dtype)
    given = activations(case, i)
    inputs = [helper.make_tensor_value_info(name, element, tuple(t.shape)) for name, t in given.items()]
    inside = {name: g.op("Cast", name, to=TensorProto.FLOAT)[0] if cast else name for name in given}
    results = _norm(case, i, g, inside, torch.float32 if cast else dtype)
    results = [g.op("Cast", r, to=element)[0] for r in results] if cast else results
    shape = tuple(as_array(case, i.x).shape)
    outputs = []
    for name, result in zip(("y", "sum"), results, strict=False):
        g.nodes.append(helper.make_node("Identity", [result], [name]))
        outputs.append(helper.make_tensor_value_info(name, element, shape))
    graph = helper.make_graph(g.nodes, case.norm, inputs, outputs, g.constants)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(OWN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _norm(case: Case, i: Inputs, g: _Graph, inside: dict[str, str], dtype: torch.dtype) -> list[str]:
    def constant(t: Tensor) -> str:
        return g.constant(t.to(dtype))

    def sizes(*values: int) -> str:
        return g.constant(torch.tensor(values))

    x, w = inside["x"], constant(i.weight)
    if case.norm == "qk_rms_norm":
        width = case.shape[-1]
        (x,) = g.op("Slice", x, sizes(0), sizes(width), sizes(1))
        (x,) = g.op("Reshape", x, sizes(case.shape[0], width // HEAD, HEAD))
    if case.norm == "add_rms_norm":
        y, _, _, total = g.op(
            "SkipSimplifiedLayerNormalization", x, inside["other"], w, outputs=4, domain=OWN, epsilon=RMS_EPS
        )
        return [y, total]
    if case.norm in ("rms_norm", "qk_rms_norm", "gated_rms_norm"):
        (y,) = g.op("SimplifiedLayerNormalization", x, w, axis=-1, epsilon=RMS_EPS, stash_type=1)
        if case.norm == "gated_rms_norm":
            gate = inside["other"]
            (silu,) = g.op("Mul", gate, g.op("Sigmoid", gate)[0])
            (y,) = g.op("Mul", y, silu)
        return [y]
    b = constant(i.bias)
    if case.norm == "layer_norm" or (case.norm == "channel_layer_norm" and case.channels_last):
        return g.op("LayerNormalization", x, w, b, axis=-1, epsilon=EPS)
    if case.norm == "channel_layer_norm":
        (x,) = g.op("Transpose", x, perm=[0, 2, 3, 1])
        (y,) = g.op("LayerNormalization", x, w, b, axis=-1, epsilon=EPS)
        return g.op("Transpose", y, perm=[0, 3, 1, 2])
    if case.norm == "instance_norm":
        return g.op("InstanceNormalization", x, w, b, epsilon=EPS)
    if case.norm == "group_norm":  # as torch exports it: ONNX's own operator is expanded into more steps
        groups = groups_of(case.shape[1])
        one, zero = constant(torch.ones(groups)), constant(torch.zeros(groups))
        (h,) = g.op("Reshape", x, sizes(case.shape[0], groups, -1))
        (h,) = g.op("InstanceNormalization", h, one, zero, epsilon=EPS)
        (h,) = g.op("Reshape", h, sizes(*case.shape))
        (h,) = g.op("Mul", h, constant(i.weight.view(-1, 1, 1)))
        return g.op("Add", h, constant(i.bias.view(-1, 1, 1)))
    train = case.norm == "batch_norm_train"
    outputs = g.op(
        "BatchNormalization", x, w, b, constant(i.mean), constant(i.var), outputs=3 if train else 1,
        epsilon=EPS, momentum=1 - MOMENTUM, training_mode=int(train),
    )  # fmt: skip
    return outputs[:1]


def _value(t: Tensor) -> Any:
    """An OrtValue on a tensor's own memory."""
    import onnxruntime as ort

    array = t.view(torch.uint16).numpy() if t.element_size() == 2 else t.numpy()
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _element_type(t.dtype))


def _read(value: Any, like: Tensor) -> Tensor:
    """A copy of what an OrtValue holds (its ``numpy()`` has no bfloat16)."""
    raw = ctypes.string_at(value.data_ptr(), like.numel() * like.element_size())
    return torch.frombuffer(bytearray(raw), dtype=like.dtype).view(like.shape)


def _session(case: Case, inputs: Inputs) -> Any:
    import onnxruntime as ort
    from onnxruntime.capi import onnxruntime_pybind11_state as errors

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = case.threads, 1
    options.log_severity_level = 4
    # Its threads wait busily within a call only: after it they would take some 10 ms from those timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Fresh means memory from the system's allocator for every provider, hence no arena there.
    options.enable_cpu_mem_arena = case.mode == "preallocated"
    refusals = (errors.NotImplemented, errors.Fail, errors.InvalidGraph)  # type: ignore[attr-defined]
    for cast in (False, True):
        try:
            model = _build(case, inputs, cast).SerializeToString()
            return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except refusals:
            continue
    return None


def make(case: Case, inputs: Inputs) -> Step | None:
    """Forward cases; of the channels-last ones the channel layer norm, which is a plain one there."""
    if case.mode == "train" or (case.channels_last and case.norm != "channel_layer_norm"):
        return None
    session = _session(case, inputs)
    if session is None:
        return None
    feeds = {name: _value(t) for name, t in activations(case, inputs).items()}
    outputs = ["y", "sum"] if case.norm == "add_rms_norm" else ["y"]
    like = torch.empty(as_array(case, inputs.x).shape, dtype=inputs.x.dtype)

    if case.mode == "fresh":
        return Step(
            lambda: session.run_with_ort_values(outputs, feeds),
            lambda values: tuple(as_image(case, _read(v, like)) for v in values),
        )
    binding = session.io_binding()
    targets = [torch.empty_like(like) for _ in outputs]
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, value)
    for name, target in zip(outputs, targets, strict=True):
        binding.bind_output(name, "cpu", 0, _element_type(target.dtype), tuple(target.shape), target.data_ptr())

    def into() -> list[Tensor]:  # returning them keeps the memory that the binding only points to
        session.run_with_iobinding(binding)
        return targets

    return Step(into, lambda found: tuple(as_image(case, t) for t in found))
