"""Folds: what a norm multiplies by, into its neighbours, where that is exact; each with its proof."""

from normkit.convert.fold.batch import FixedAffine as FixedAffine
from normkit.convert.fold.batch import fold_batch_norm as fold_batch_norm
from normkit.convert.fold.center import layer_to_rms as layer_to_rms
from normkit.convert.fold.gain import fold as fold

__all__ = ["FixedAffine", "fold", "fold_batch_norm", "layer_to_rms"]
