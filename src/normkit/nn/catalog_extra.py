"""One line for each of the less common norms: how to build it and an input that suits it, for loops of tests."""

from __future__ import annotations

from normkit.nn.adaptive import AdaLayerNorm, AdaLayerNormZero, SeeDNorm
from normkit.nn.catalog_entry import Entry
from normkit.nn.gated import GatedRMSNorm
from normkit.nn.lengths import L2Norm, PixelNorm, ScaleNorm
from normkit.nn.pointwise import Derf, DynamicTanh, LayerScale
from normkit.nn.power import PowerNorm
from normkit.nn.qk import QKNorm
from normkit.nn.recurrent import (
    LayerNormGRU,
    LayerNormGRUCell,
    LayerNormLSTM,
    LayerNormLSTMCell,
    RMSNormGRU,
    RMSNormGRUCell,
    RMSNormLSTM,
    RMSNormLSTMCell,
)
from normkit.nn.renorm import BatchRenorm, GhostBatchNorm
from normkit.nn.response import TLU, FilterResponseNorm, GlobalResponseNorm


def extra(C: int = 12, H: int = 3) -> tuple[Entry, ...]:
    """Every norm of these files over C features in H heads or groups (H divides C)."""
    D = C // H
    tokens, image = ((4, 5, C),), ((4, C, 3, 5),)
    return (
        Entry("dynamic_tanh", lambda **f: DynamicTanh(C, **f), tokens),
        Entry("dynamic_tanh_channels", lambda **f: DynamicTanh(C, channel_dim=1, **f), image),
        Entry("derf", lambda **f: Derf(C, **f), tokens),
        Entry("derf_channels", lambda **f: Derf(C, channel_dim=1, shift_init=0.1, **f), image),
        Entry("layer_scale", lambda **f: LayerScale(C, 0.1, **f), tokens),
        Entry("scale_norm", lambda **f: ScaleNorm(C, **f), tokens),
        Entry("l2_norm", lambda **f: L2Norm(), tokens, has_parameters=False),
        Entry("l2_norm_gain", lambda **f: L2Norm(C, init=20.0, channel_dim=1, **f), image),
        Entry("pixel_norm", lambda **f: PixelNorm(), image, has_parameters=False),
        Entry("filter_response_norm", lambda **f: FilterResponseNorm(C, **f), image),
        Entry("filter_response_norm_eps", lambda **f: FilterResponseNorm(C, learned_eps=1e-4, tlu=False, **f), image),
        Entry("tlu", lambda **f: TLU(C, **f), image),
        Entry("global_response_norm", lambda **f: GlobalResponseNorm(C, **f), ((4, 3, 5, C),)),
        Entry("global_response_norm_channels", lambda **f: GlobalResponseNorm(C, channel_dim=1, **f), image),
        Entry("seed_norm", lambda **f: SeeDNorm(C, **f), tokens),
        Entry("seed_norm_heads", lambda **f: SeeDNorm(C, heads=H, **f), tokens),
        Entry("ada_layer_norm", lambda **f: AdaLayerNorm(C, 7, **f), ((4, 5, C), (4, 7))),
        Entry("ada_layer_norm_zero", lambda **f: AdaLayerNormZero(C, 7, **f), ((4, 5, C), (4, 7))),
        Entry("ada_rms_norm", lambda **f: AdaLayerNorm(C, 7, centered=False, **f), ((4, 5, C), (4, 7))),
        Entry("gated_before", lambda **f: GatedRMSNorm(C, groups=H, output_dtype="input", **f), ((4, 5, C), (4, 5, C))),
        Entry(
            "gated_after",
            lambda **f: GatedRMSNorm(C, gate_position="after", output_dtype="input", **f),
            ((4, 5, C), (4, 5, C)),
        ),
        Entry("qk_head", lambda **f: QKNorm(D, **f), ((4, 5, H, D), (4, 6, H, D))),
        Entry("qk_per_head", lambda **f: QKNorm(D, H, 1, scope="per_head", **f), ((4, 5, H, D), (4, 6, 1, D))),
        Entry("qk_full", lambda **f: QKNorm(D, H, 1, scope="full", **f), ((4, 5, C), (4, 6, D))),
        Entry(
            "batch_renorm",
            lambda **f: BatchRenorm(C, r_max=3.0, d_max=5.0, **f),
            image,
            stateful=True,
            exact_gradient=False,
        ),
        Entry("ghost_batch_norm", lambda **f: GhostBatchNorm(C, 2, **f), image, stateful=True),
        Entry("power_norm", lambda **f: PowerNorm(C, warmup=1, **f), tokens, stateful=True, exact_gradient=False),
        Entry("layer_norm_gru_cell", lambda **f: LayerNormGRUCell(5, C, **f), ((4, 5), (4, C))),
        Entry("rms_norm_gru_cell", lambda **f: RMSNormGRUCell(5, C, per_gate=True, **f), ((4, 5), (4, C))),
        Entry("layer_norm_lstm_cell", lambda **f: LayerNormLSTMCell(5, C, **f), ((4, 5),)),
        Entry("rms_norm_lstm_cell", lambda **f: RMSNormLSTMCell(5, C, per_gate=True, **f), ((4, 5),)),
        Entry("layer_norm_gru", lambda **f: LayerNormGRU(5, C, **f), ((2, 4, 5),), batch_dim=1),
        Entry("rms_norm_gru", lambda **f: RMSNormGRU(5, C, **f), ((2, 4, 5),), batch_dim=1),
        Entry("layer_norm_lstm", lambda **f: LayerNormLSTM(5, C, **f), ((2, 4, 5),), batch_dim=1),
        Entry("rms_norm_lstm", lambda **f: RMSNormLSTM(5, C, **f), ((2, 4, 5),), batch_dim=1),
    )
