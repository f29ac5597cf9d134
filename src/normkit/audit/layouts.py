"""In which layouts a model takes an input of a certain name: by the names in use, else by what its documentation says.

Sizes come from the config, or from the config of one modality.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, TARGET_LENGTH = 2, 16, 9
PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "backbone_config")
"""Configs of one part inside a config, in the order in which a size is looked for."""

_TOKENS = frozenset(["input_ids", "decoder_input_ids", "inputs", "input", "qformer_input_ids", "task_inputs"])
_MELS = (
    "num_mel_bins", "input_feat_per_channel", "n_mels", "feature_size", "input_dim", "input_feat_size",
    "feature_projection_input_dim",
)  # fmt: skip
_PER_IMAGE = 4
"""Rows and columns of the patches that an image given with its grid has."""


def layouts(name: str, config: Any, model: nn.Module | None = None) -> list[Tensor]:
    """The layouts in which an input of this name is given to models, the likeliest first."""
    if name in ("input", "inputs") and config is None:
        return []
    found = list(_known(name, config))
    documented = None if model is None else _documented(name, config, model)
    if documented is not None and all(documented.shape != known.shape for known in found):
        found.append(documented)
    return found


def tokens(config: Any, length: int) -> Tensor:
    """Ids that a vocabulary has."""
    vocabulary = number(config, "vocab_size", default=100)
    generator = torch.Generator().manual_seed(0)
    low = min(3, max(0, vocabulary - 1))  # the first ids are often padding and other special tokens
    return torch.randint(low, vocabulary, (BATCH, length), generator=generator)


def floats(*shape: int) -> Tensor:
    """Numbers as they come out of a preprocessor."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def find(config: Any, name: str, default: Any) -> Any:
    """A config value, also from the config of one part."""
    for owner in (config, *(getattr(config, part, None) for part in PARTS)):
        value = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
        if value is not None:
            return value
    return default


def number(config: Any, *names: str, default: int) -> int:
    """The first whole number, or the first of a pair, that a config holds under one of some names."""
    for name in names:
        value = find(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default


def _known(name: str, config: Any) -> Iterator[Tensor]:
    if name in _TOKENS:
        yield tokens(config, LENGTH)
    elif name == "bbox":
        yield torch.zeros(BATCH, LENGTH, 4, dtype=torch.int64)
    elif name == "visual_feats":
        yield floats(BATCH, 5, number(config, "visual_feat_dim", default=64))
    elif name == "visual_pos":
        yield floats(BATCH, 5, number(config, "visual_pos_dim", default=4))
    elif name in ("pixel_values", "pixel_values_videos"):
        yield from _images(config, video=name.endswith("videos"))
    elif name == "flattened_patches":
        pixels = floats(BATCH, LENGTH, number(config, "patch_embed_hidden_size", "hidden_size", default=768))
        row = torch.arange(LENGTH).expand(BATCH, LENGTH)
        yield torch.cat([torch.stack([row, torch.zeros_like(row)], -1), pixels], -1)  # each patch after its place
    elif name in ("input_features", "audio_input_features", "audio_mel"):
        mels, frames = number(config, *_MELS, default=80), _frames(config)
        yield from (floats(BATCH, mels, frames), floats(BATCH, frames, mels), floats(BATCH, 1, frames, mels))
    elif name == "audio_mel_mask":  # true where there is no sound
        yield torch.zeros(BATCH, _frames(config), dtype=torch.bool)
    elif name in ("input_values", "decoder_input_values"):
        mels, frames = number(config, "num_mel_bins", default=80), number(config, "max_length", default=128)
        yield from (floats(BATCH, 8000), floats(BATCH, 1, 8000), floats(BATCH, frames, mels))
    elif name in ("image_grid_thw", "video_grid_thw"):
        yield torch.tensor([[1, _PER_IMAGE, _PER_IMAGE]] * BATCH)
    elif name in ("spatial_shapes", "image_sizes", "grid_hws"):
        size = _PER_IMAGE if name != "image_sizes" else _size(config)[0]
        yield torch.tensor([[size, size]] * BATCH)


def _frames(config: Any) -> int:
    return 2 * number(config, "max_source_positions", default=64)


def patches(config: Any) -> Tensor:
    """Images as rows of flattened patches of all of them, as they go with a grid."""
    patch = number(config, "patch_size", "spatial_patch_size", default=14)
    frames = number(config, "temporal_patch_size", default=1)
    return floats(BATCH * _PER_IMAGE**2, _channels(config) * frames * patch * patch)


def _images(config: Any, video: bool) -> Iterator[Tensor]:
    """Images as B C H W, as several for each sample, and as flat patches."""
    channels, (height, width) = _channels(config), _size(config)
    patch = number(config, "patch_size", default=16)
    if not video:
        yield floats(BATCH, channels, height, width)
        if find(config, "image_size", None) is None:
            yield floats(BATCH, channels, 224, 224)
    several = number(config, "num_frames", "frames_per_clip", "tubelet_size", default=2 if video else 1)
    yield floats(BATCH, several, channels, height, width)
    yield floats(BATCH, 16, channels * patch * patch)
    yield patches(config)


def _channels(config: Any) -> int:
    return number(config, "num_channels", "in_channels", "in_chans", default=3)


def _size(config: Any) -> tuple[int, int]:
    size = find(config, "image_size", find(config, "crop_size", find(config, "img_size", 64)))
    if isinstance(size, dict):
        size = [size.get("height", size.get("shortest_edge", 64)), size.get("width", size.get("shortest_edge", 64))]
    height, width = (size[-2], size[-1]) if isinstance(size, list | tuple) and len(size) > 1 else (size, size)
    return (height, width) if isinstance(height, int) and isinstance(width, int) else (64, 64)


# ---- by documentation ----

_ENTRY = r"^\s*{name}\s*\(`?(?:torch\.)?(\w+)`?[^\n]*?of shape\s*`?\(([^`)\n]*)\)"
_SIZES = {
    "batch_size": BATCH, "batch": BATCH, "bs": BATCH, "sequence_length": LENGTH, "seq_len": LENGTH,
    "seq_length": LENGTH, "length": LENGTH, "text_sequence_length": LENGTH, "target_sequence_length": TARGET_LENGTH,
    "target_length": TARGET_LENGTH, "decoder_sequence_length": TARGET_LENGTH, "num_images": 1, "max_num_images": 1,
    "num_frames": 2, "num_choices": 1, "num_tiles": 1, "max_num_tiles": 1, "num_crops": 1, "num_boxes": 1,
    "nb_points_per_image": 1, "point_batch_size": 1, "num_points_per_image": 1, "num_points": 1,
}  # fmt: skip


def _documented(name: str, config: Any, model: nn.Module) -> Tensor | None:
    """The layout that a forward's docstring states, such as ``(`torch.FloatTensor` of shape `(batch_size, ...)`)``."""
    entry = re.search(_ENTRY.format(name=re.escape(name)), inspect.getdoc(model.forward) or "", re.MULTILINE)
    if entry is None:
        return None
    symbols = [symbol.strip() for symbol in entry[2].split(",") if symbol.strip()]
    sizes = [_resolved(symbol, config) for symbol in symbols]
    if not sizes or any(size is None for size in sizes):
        return None
    shape = [size for size in sizes if size is not None]
    if "Float" in entry[1]:
        return floats(*shape)
    if "mask" in name or entry[1] == "BoolTensor":
        return torch.ones(shape, dtype=torch.bool if entry[1] == "BoolTensor" else torch.int64)
    return torch.zeros(shape, dtype=torch.int64)


def target_tokens(config: Any, model: nn.Module) -> Tensor:
    """Tokens of a decoder beside an encoder: a row for each sample, or for each codebook of each sample."""
    known, documented = tokens(config, TARGET_LENGTH), _documented("decoder_input_ids", config, model)
    if documented is None or documented.dim() != 2 or documented.shape[0] == BATCH:
        return known
    return known[:1].expand(documented.shape[0], -1).contiguous()


def _resolved(symbol: str, config: Any) -> int | None:
    """A size that a docstring names: a number, a usual symbol, a value of the config, or a product of these."""
    if "*" in symbol:
        factors = [_resolved(part.strip(), config) for part in symbol.split("*")]
        return None if None in factors else math.prod(factor for factor in factors if factor is not None)
    if symbol.isdigit():
        return int(symbol)
    if symbol == "num_codebooks":
        return number(config, symbol, default=1)
    if symbol in _SIZES:
        return _SIZES[symbol]
    if symbol.endswith(("_length", "_len")) and find(config, symbol, None) is None:
        return LENGTH
    if symbol in ("height", "image_height", "image_size"):
        return _size(config)[0]
    if symbol in ("width", "image_width"):
        return _size(config)[1]
    value = find(config, symbol.removeprefix("config."), None)
    if value is None and symbol == "num_channels":
        value = find(config, "in_channels", 3)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
