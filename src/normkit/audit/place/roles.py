"""What each operator does to the activations that pass through it.

*Carry* operators move or scale one activation without mixing its elements (views, casts, slices, masks, a learned
scale). *Mix* operators are the learned or attention-like maps that a residual branch is made of.
"""

from __future__ import annotations

from enum import Enum

import torch

from normkit.audit.trace.graph import Node


class Role(Enum):
    """What an operator does to the activations that pass through it."""

    CARRY = "carry"
    MIX = "mix"
    ADD = "add"
    MUL = "mul"
    MERGE = "merge"
    UNARY = "unary"
    POOL = "pool"
    NORM = "norm"
    EMBED = "embed"
    OTHER = "other"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MIX = _names(
    "mm addmm bmm baddbmm addbmm matmul linear mv addmv dot vdot _addmm_activation _trilinear _cdist_forward"
    " convolution _convolution convolution_overrideable mkldnn_convolution _slow_conv2d_forward conv_tbc"
    " _grouped_mm _scaled_mm _scaled_grouped_mm _int_mm lstm gru rnn_tanh rnn_relu mkldnn_rnn_layer _cudnn_rnn"
    " _thnn_fused_lstm_cell _thnn_fused_gru_cell _fft_r2c _fft_c2c _fft_c2r _native_multi_head_attention"
    " _transformer_encoder_layer_fwd _embedding_bag _weight_int4pack_mm _weight_int8pack_mm grid_sampler_2d"
)
_MIX_STARTS = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
CONVOLUTIONS = _names(
    "convolution _convolution convolution_overrideable mkldnn_convolution _slow_conv2d_forward conv_tbc"
)
BATCH_STATISTICS = _names(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update"
    " _batch_norm_no_update cudnn_batch_norm miopen_batch_norm batch_norm_elemt _batch_norm_impl_index"
)
_CARRY = _names(
    "view _unsafe_view reshape _reshape_alias permute transpose t expand clone contiguous alias detach _to_copy slice"
    " select squeeze unsqueeze split split_with_sizes unsafe_split chunk unbind roll flip constant_pad_nd pad"
    " reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d as_strided unfold im2col"
    " col2im index _unsafe_index gather index_select masked_fill masked_select tril triu native_dropout dropout"
    " lift_fresh repeat narrow diagonal view_as_complex view_as_real pixel_shuffle pixel_unshuffle channel_shuffle"
    " native_channel_shuffle upsample_nearest1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"
    " _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_linear1d upsample_trilinear3d _conj real clamp"
    " clamp_min clamp_max nan_to_num neg movedim fill copy take take_along_dim masked_fill_ complex"
)
_UNARY = _names(
    "relu gelu silu tanh sigmoid hardswish hardsigmoid hardtanh leaky_relu elu selu celu mish softplus relu6"
    " threshold prelu _prelu_kernel rrelu log_sigmoid_forward softsign square abs exp log1p glu"
)
_POOL = _names(
    "mean sum amax amin max_pool2d_with_indices max_pool2d max_pool1d avg_pool1d avg_pool2d avg_pool3d"
    " _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool2d adaptive_max_pool2d max_pool3d_with_indices"
    " logsumexp nanmean max"
)
MIXING_POOL = _names("avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices max_pool2d max_pool1d")
_MERGE = _names(
    "cat stack where index_put _index_put_impl scatter masked_scatter index_copy slice_scatter select_scatter"
    " diagonal_scatter as_strided_scatter overlay"
)
_ADD = _names("add sub lerp addcmul index_add scatter_add")
_MUL = _names("mul div")


def op_name(node: Node) -> str:
    """The operator's plain name: no namespace, no overload, no in-place underscore."""
    if node.op is None:
        return "overlay"
    name = node.op._schema.name.split("::")[1]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def role_of(node: Node, name: str) -> Role:
    """The role of an operator, before it is known which of its inputs are activations."""
    if name in _MIX or name.startswith(_MIX_STARTS):
        return Role.MIX
    for names, role in (
        (_CARRY, Role.CARRY),
        (_MERGE, Role.MERGE),
        (_ADD, Role.ADD),
        (_MUL, Role.MUL),
        (_UNARY, Role.UNARY),
        (_POOL, Role.POOL),
    ):
        if name in names:
            return role
    if name == "embedding":
        return Role.EMBED
    if node.op is not None and not node.op._schema.name.startswith(("aten::", "prims::")):
        packed = any(isinstance(argument, torch.ScriptObject) for argument in node.args)  # quantized weights
        if packed or len(node.inputs) > 1:
            return Role.MIX  # a custom kernel of several tensors: attention, a scan, a fused map
    return Role.OTHER
