"""The blocks, one class each, and how `ModelConfig.variant` names them."""

from titans_core.blocks.base import Block, Positions
from titans_core.blocks.lmm import LMM
from titans_core.blocks.mac import MAC
from titans_core.blocks.mag import MAG
from titans_core.blocks.mal import MAL
from titans_core.blocks.registry import (
    BLOCKS,
    block_parameters,
    count_parameters,
    find,
    resolve,
    source_digest,
)
from titans_core.blocks.transformer import Transformer

__all__ = [
    "BLOCKS",
    "LMM",
    "MAC",
    "MAG",
    "MAL",
    "Block",
    "Positions",
    "Transformer",
    "block_parameters",
    "count_parameters",
    "find",
    "resolve",
    "source_digest",
]
