"""One line a norm: how to build it and an input that suits it, for tests, benchmarks and documents to loop over."""

from __future__ import annotations

from normkit.nn.batch import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from normkit.nn.build import build
from normkit.nn.catalog_entry import Entry
from normkit.nn.catalog_extra import extra
from normkit.nn.groups import GroupNorm
from normkit.nn.instance import InstanceNorm1d, InstanceNorm2d, InstanceNorm3d
from normkit.nn.rows import LayerNorm, RMSNorm
from normkit.nn.sync import SyncBatchNorm
from normkit.spec import ANNOTATED_LAYER, FROZEN_BATCH, GEMMA, TORCH_LAYER, NormSpec


def catalog(C: int = 12, H: int = 3) -> tuple[Entry, ...]:
    """Every norm of the package over C features in H heads or groups (H divides C)."""
    tokens, sequence, image = ((4, 5, C),), ((4, C, 5),), ((4, C, 3, 5),)
    video = ((4, C, 2, 3, 2),)
    return (
        Entry("layer_norm", lambda **f: LayerNorm(C, **f), tokens),
        Entry("layer_norm_weightless", lambda **f: LayerNorm(C, elementwise_affine=False, **f), tokens),
        Entry("layer_norm_two_dims", lambda **f: LayerNorm((5, C), **f), tokens),
        Entry("layer_norm_channels", lambda **f: LayerNorm(C, channel_dim=1, **f), image),
        Entry("layer_norm_std", lambda **f: build(ANNOTATED_LAYER.replace(statistic="mean_square"), C, **f), tokens),
        Entry("layer_norm_per_head", lambda **f: build(_PER_HEAD, C, heads=H, **f), ((4, 5, H, C),)),
        Entry("rms_norm", lambda **f: RMSNorm(C, 1e-6, **f), tokens),
        Entry("rms_norm_bias", lambda **f: RMSNorm(C, 1e-6, bias=True, **f), tokens),
        Entry("rms_norm_offset", lambda **f: build(GEMMA, C, **f), tokens),
        Entry("rms_norm_round_first", lambda **f: RMSNorm(C, 1e-6, rounding="before_gain", **f), tokens),
        Entry("rms_norm_partial", lambda **f: RMSNorm(C, 1e-6, partial=0.5, **f), tokens),
        Entry("rms_norm_channels", lambda **f: RMSNorm(C, 1e-6, channel_dim=1, **f), image),
        Entry("rms_norm_groups", lambda **f: build(GEMMA.replace(groups=H), C, **f), tokens),
        Entry("batch_norm", lambda **f: BatchNorm(C, **f), image, stateful=True),
        Entry("batch_norm_1d", lambda **f: BatchNorm1d(C, **f), sequence, stateful=True),
        Entry("batch_norm_1d_tokens", lambda **f: BatchNorm1d(C, channel_dim=-1, **f), tokens, stateful=True),
        Entry("batch_norm_2d", lambda **f: BatchNorm2d(C, **f), image, stateful=True),
        Entry("batch_norm_3d", lambda **f: BatchNorm3d(C, momentum=None, **f), video, stateful=True),
        Entry("batch_norm_frozen", lambda **f: build(FROZEN_BATCH.replace(output_dtype="input"), C, **f), image),
        Entry("sync_batch_norm", lambda **f: SyncBatchNorm(C, **f), image, stateful=True),
        Entry("instance_norm_1d", lambda **f: InstanceNorm1d(C, affine=True, **f), sequence),
        Entry("instance_norm_2d", lambda **f: InstanceNorm2d(C, **f), image),
        Entry("instance_norm_2d_last", lambda **f: InstanceNorm2d(C, channel_dim=-1, **f), ((4, 3, 5, C),)),
        Entry("instance_norm_3d", lambda **f: InstanceNorm3d(C, track_running_stats=True, **f), video, stateful=True),
        Entry("group_norm", lambda **f: GroupNorm(H, C, **f), image),
        Entry("group_norm_one", lambda **f: GroupNorm(1, C, **f), sequence),
        Entry("group_norm_last", lambda **f: GroupNorm(H, C, channel_dim=-1, **f), ((4, 3, 5, C),)),
        *extra(C, H),
    )


_PER_HEAD: NormSpec = TORCH_LAYER.replace(weight_shape="per_head", has_bias=False)

CATALOG: tuple[Entry, ...] = catalog()
