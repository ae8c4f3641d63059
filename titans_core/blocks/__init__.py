"""The blocks, one class each, and the registry by which `ModelConfig.variant` names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from titans_core.blocks.base import Block, Positions
from titans_core.config import ModelConfig
from titans_kernels import Registry, near
from titans_kernels.registry import lazy_exports

if TYPE_CHECKING:
    from titans_core.blocks.lmm import LMM
    from titans_core.blocks.mac import MAC
    from titans_core.blocks.mag import MAG
    from titans_core.blocks.mal import MAL
    from titans_core.blocks.segmented import Segmented
    from titans_core.blocks.transformer import Transformer

__all__ = [
    "BLOCKS", "LMM", "MAC", "MAG", "MAL", "Block", "Positions", "Segmented", "Transformer",
    "block_parameters", "count_parameters", "find", "resolve",
]  # fmt: skip

__getattr__ = lazy_exports(__name__, __all__, "lmm mac mag mal segmented transformer")

BLOCKS = Registry(
    "variant",
    Block,
    {
        "lmm": "titans_core.blocks.lmm:LMM",
        "mac": "titans_core.blocks.mac:MAC",
        "mag": "titans_core.blocks.mag:MAG",
        "mal": "titans_core.blocks.mal:MAL",
        "transformer": "titans_core.blocks.transformer:Transformer",
        "retnet": "titans_core.blocks.baselines.retnet:RetNet",
        "gla": "titans_core.blocks.baselines.gla:GLA",
        "hgrn2": "titans_core.blocks.baselines.hgrn2:HGRN2",
        "mamba": "titans_core.blocks.baselines.mamba:Mamba",
        "mamba2": "titans_core.blocks.baselines.mamba2:Mamba2",
        "deltanet": "titans_core.blocks.baselines.delta:DeltaNet",
        "gated_deltanet": "titans_core.blocks.baselines.delta:GatedDeltaNet",
        "ttt_linear": "titans_core.blocks.baselines.delta:TTTLinear",
        "ttt_mlp": "titans_core.blocks.baselines.delta:TTTMLP",
        "samba": "titans_core.blocks.baselines.hybrids:Samba",
        "gated_deltanet_h2": "titans_core.blocks.baselines.hybrids:GatedDeltaNetH2",
        "based": "titans_core.blocks.baselines.based:Based",
        "hyena": "titans_core.blocks.baselines.hyena:Hyena",
    },
)
"""Variants by name. ``BLOCKS["mine"] = MyBlock`` adds one to this process."""


def find(variant: str) -> type[Block]:
    """Return the block class of a variant: a name in `BLOCKS`, or an import path ``package.module:Class``.

    Raises:
        ValueError: there is no such class, or it is not a complete block; one line that begins with
        `variant`.
    """
    return BLOCKS.find(variant)


def resolve(config: ModelConfig) -> type[Block]:
    """Return the block class of a config, after checking the config.

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
    """Count the parameters of one block on the meta device. Raises ValueError as `resolve` does."""
    block = resolve(config)
    with torch.device("meta"):
        return sum(p.numel() for p in block(config).parameters())


def count_parameters(config: ModelConfig) -> int:
    """Count the parameters of the model, a tied embedding once, without allocating it.

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
