"""Residual placements: branches, their initialization, and the reference Transformer."""

from normkit.residual.attention import Attention as Attention
from normkit.residual.attention import FeedForward as FeedForward
from normkit.residual.attention import KeyValueCache as KeyValueCache
from normkit.residual.branch import InnerNorm as InnerNorm
from normkit.residual.branch import Residual as Residual
from normkit.residual.branch import ResidualStack as ResidualStack
from normkit.residual.init import init_for as init_for
from normkit.residual.roles import Matrix as Matrix
from normkit.residual.roles import attention_roles as attention_roles
from normkit.residual.roles import fused_attention_roles as fused_attention_roles
from normkit.residual.roles import mlp_roles as mlp_roles
from normkit.residual.roles import multihead_attention_roles as multihead_attention_roles
from normkit.residual.stream import Stream as Stream
from normkit.residual.stream import finish as finish
from normkit.residual.transformer import Transformer as Transformer
from normkit.residual.transformer import TransformerConfig as TransformerConfig
from normkit.residual.transformer_weights import from_transformers as from_transformers
from normkit.residual.transformer_weights import from_weights as from_weights

__all__ = [
    "Attention",
    "FeedForward",
    "InnerNorm",
    "KeyValueCache",
    "Matrix",
    "Residual",
    "ResidualStack",
    "Stream",
    "Transformer",
    "TransformerConfig",
    "attention_roles",
    "finish",
    "from_transformers",
    "from_weights",
    "fused_attention_roles",
    "init_for",
    "mlp_roles",
    "multihead_attention_roles",
]
