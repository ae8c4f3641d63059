"""The registry of variants: block classes by name or import path."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ValidationError

from titans_core.blocks.base import Block
from titans_core.blocks.baselines import (
    GLA,
    HGRN2,
    TTTMLP,
    Based,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaNetH2,
    Hyena,
    Mamba,
    Mamba2,
    RetNet,
    Samba,
    TTTLinear,
)
from titans_core.blocks.lmm import LMM
from titans_core.blocks.mac import MAC
from titans_core.blocks.mag import MAG
from titans_core.blocks.mal import MAL
from titans_core.blocks.tnt import TNT
from titans_core.blocks.transformer import Transformer
from titans_core.config import ModelConfig
from titans_kernels import find_class, near

BLOCKS: dict[str, type[Block]] = {
    "lmm": LMM,
    "mac": MAC,
    "mag": MAG,
    "mal": MAL,
    "tnt": TNT,
    "transformer": Transformer,
    "retnet": RetNet,
    "gla": GLA,
    "hgrn2": HGRN2,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "ttt_linear": TTTLinear,
    "ttt_mlp": TTTMLP,
    "samba": Samba,
    "gated_deltanet_h2": GatedDeltaNetH2,
    "based": Based,
    "hyena": Hyena,
}
"""Variants with a short name. ``BLOCKS["mine"] = MyBlock`` adds one to this process."""


def find(variant: str) -> type[Block]:
    """The block class of a variant: a name in `BLOCKS`, or an import path ``package.module:Class``.

    Raises:
        ValueError: there is no such class, or it is not a complete block; one line that begins with
        `variant`.
    """
    block = find_class("variant", variant, BLOCKS, Block)
    if missing := sorted(block.__abstractmethods__):
        raise ValueError(f"variant: {variant} does not define {' and '.join(missing)}, which a block must")
    return block


def resolve(config: ModelConfig) -> type[Block]:
    """The block class of a config, after checking the config.

    Raises:
        ValueError: the variant is unknown, its options are invalid, or its `Block.check` refuses the
            config; one line that begins with the offending field of `ModelConfig`.
    """
    block = find(config.variant)
    try:
        block.read_options(config)
    except ValidationError as error:
        raise ValueError(_option_error(error.errors(include_url=False)[0], block)) from None
    block.check(config)
    return block


def block_parameters(config: ModelConfig) -> int:
    """Number of parameters of one block, counted on the meta device. Raises ValueError as `resolve` does."""
    block = resolve(config)
    with torch.device("meta"):
        return sum(p.numel() for p in block(config).parameters())


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters of the model, a tied embedding counted once, without allocating it.

    Raises:
        ValueError: as the model's constructor.
    """
    embeddings = 1 if config.tie_embeddings else 2
    outside = embeddings * config.vocab_size * config.d_model + config.d_model  # and the last norm
    return config.n_layers * block_parameters(config) + outside


def _option_error(error: Any, block: type[Block]) -> str:
    field = ".".join(["options", *(str(part) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        known = list(block.Options.model_fields)
        hint = near(str(error["loc"][-1]), known) or f"{block.__name__} takes {', '.join(known) or 'none'}"
        return f"{field}: unknown option; {hint}"
    return f"{field}: {error['msg'].replace('Input should be', 'should be')}"
