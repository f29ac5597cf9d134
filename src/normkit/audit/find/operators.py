"""What operators are to a norm."""

from __future__ import annotations

import math

from normkit.audit.trace.graph import Node, Ref, Trace

# Operators by what they are to a norm. Packet names, so that overloads and in-place forms are one entry.
FUSED = frozenset(
    [
        "native_layer_norm",
        "_fused_rms_norm",
        "rms_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "_native_batch_norm_legit_functional",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "batch_norm_with_update",
        "_batch_norm_with_update",
        "_batch_norm_no_update",
        "instance_norm",
    ]
)
STATISTIC = frozenset(
    ["mean", "sum", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm", "einsum", "amax", "max"]
)
ROOT = frozenset(["rsqrt", "sqrt", "reciprocal", "pow"])
WEIGHT_NORM = frozenset(["_weight_norm", "_weight_norm_interface"])
MIXING = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "matmul",
        "convolution",
        "_convolution",
        "conv1d",
        "conv2d",
        "conv3d",
        "mkldnn_convolution",
        "embedding",
        "_softmax",
        "_log_softmax",
        "_grouped_mm",
        "_scaled_mm",
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable",
        "linear",
        "mkldnn_linear",
        "mkldnn_rnn_layer",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "avg_pool2d",
        "_adaptive_avg_pool2d",
        "max_pool2d_with_indices",
        "cumsum",
        "topk",
        "sort",
    ]
)
FIXED = frozenset(["native_group_norm", "as_strided", "repeat"])
"""Operators whose arguments hold the sizes of the tensor that they were called with."""
VIEWS = frozenset(["view", "_unsafe_view", "unsqueeze", "squeeze", "permute", "transpose", "t", "expand", "alias"])
CASTS = frozenset(["_to_copy", "to", "clone"])
ADDS = frozenset(["mul", "add", "div", "sub"])
_PRODUCTS = frozenset(["mm", "bmm", "matmul", "mv", "dot", "vdot"])
_STARTS = frozenset(["parameter", "buffer", "input"])


def packet(node: Node) -> str:
    """The operator's name without its overload, an in-place form under the plain one's."""
    return "" if node.op is None else node.op.overloadpacket.__name__.rstrip("_").removeprefix("aten.")


def sums_by_product(trace: Trace) -> frozenset[int]:
    """Products that sum a value's features, as matmul and einsum write it: x · x, or x² times a column of ones."""
    return frozenset(node.index for node in trace.nodes if packet(node) in _PRODUCTS and _sums(trace, node))


def _sums(trace: Trace, node: Node) -> bool:
    first, second = (arg.value if isinstance(arg, Ref) else -1 for arg in node.args[:2])
    if first < 0 or second < 0:
        return False
    summed, column = trace.values[first].shape, trace.values[second].shape
    if column[-1:] != (1,) and len(column) != 1:
        return False
    if numel(trace, node.outputs[0]) * summed[-1] != numel(trace, first):
        return False
    if _seen_through(trace, first) == _seen_through(trace, second):
        return numel(trace, first) == numel(trace, second)
    return _is_constant(trace, second)


def running_statistics(trace: Trace) -> frozenset[int]:
    """Sums over all tokens up to each one, of a statistic of the token: they mix no features."""
    return frozenset(
        node.index for node in trace.nodes if packet(node) == "cumsum" and _is_statistic(trace, node.inputs[0])
    )


def _is_statistic(trace: Trace, value: int) -> bool:
    producer = trace.producer(_seen_through(trace, value))
    return (
        producer is not None
        and packet(producer) in STATISTIC
        and numel(trace, producer.outputs[0]) < numel(trace, producer.inputs[0])
    )


def _seen_through(trace: Trace, value: int) -> int:
    """What a value is a view or a cast of."""
    producer = trace.producer(value)
    while producer is not None and packet(producer) in VIEWS | CASTS and producer.inputs:
        value = producer.inputs[0]
        producer = trace.producer(value)
    return value


def _is_constant(trace: Trace, value: int) -> bool:
    """Whether a value is made of numbers in the code alone."""
    todo = [value]
    for _ in range(8):
        if not todo:
            return True
        found = trace.values[todo.pop()]
        if found.origin in _STARTS:
            return False
        if found.producer >= 0:
            todo.extend(trace.nodes[found.producer].inputs)
    return False


def numel(trace: Trace, value: int) -> int:
    """How many elements a value has."""
    return math.prod(trace.values[value].shape)
