"""The blocks: one class and one registry line each. `ModelConfig.variant` is a name of `BLOCKS`."""

from titans_core.blocks.base import Block
from titans_core.blocks.lmm import LMM
from titans_core.blocks.mac import MAC
from titans_core.blocks.mag import MAG
from titans_core.blocks.mal import MAL
from titans_core.blocks.transformer import Transformer

BLOCKS: dict[str, type[Block]] = {
    "lmm": LMM,
    "mac": MAC,
    "mag": MAG,
    "mal": MAL,
    "transformer": Transformer,
}

__all__ = ["BLOCKS", "LMM", "MAC", "MAG", "MAL", "Block", "Transformer"]
