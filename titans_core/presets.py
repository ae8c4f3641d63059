"""Model sizes by name: the paper's four (Section 5.1), and small ones for two cores.

All variants of a size have the same depth and width; the feed-forward layer is sized so that they have the
same number of parameters (`Block.preset_expansion`). The widths are ours: the paper reports only parameter
counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from pydantic import JsonValue

from titans_core.config import AttentionConfig, MemoryConfig, ModelConfig

if TYPE_CHECKING:
    from titans_core.blocks import Block


class Size(NamedTuple):
    """The fields of a size; ``window`` is also MAC's segment, in tokens."""

    d_model: int
    n_layers: int
    tie_embeddings: bool = True
    vocab_size: int = 32_000
    head_dim: int = 64
    chunk_size: int = 64
    max_theta: float = 0.1
    window: int = 1024
    persistent_tokens: int = 16


SMALL = Size(64, 2, vocab_size=260, head_dim=32, chunk_size=16, max_theta=0.5, window=32, persistent_tokens=4)
SIZES = {
    "smoke": SMALL._replace(d_model=32, n_layers=1, head_dim=16),
    "laptop": SMALL,
    "170M": Size(768, 19),
    "340M": Size(1024, 22),
    "400M": Size(1024, 24, tie_embeddings=False),
    "760M": Size(1536, 23),
}


def size_config(name: str, vocab_size: int | None = None) -> ModelConfig:
    """Return the fields that a size fixes, not yet fitted to a variant. Raises ValueError: no such size."""
    if name not in SIZES:
        raise ValueError(f"preset: {name!r} is not one of {', '.join(SIZES)}")
    size = SIZES[name]
    heads = size.d_model // size.head_dim
    return ModelConfig(
        vocab_size=vocab_size or size.vocab_size,
        d_model=size.d_model,
        n_layers=size.n_layers,
        tie_embeddings=size.tie_embeddings,
        persistent_tokens=size.persistent_tokens,
        memory=MemoryConfig(
            depth=2,
            heads=heads,
            chunk_size=size.chunk_size,
            max_theta=size.max_theta,
            write_budget=2.0,  # for all sizes; the baselines of `blocks.baselines.delta` set None
        ),
        attention=AttentionConfig(heads=heads, window=size.window, segment_size=size.window),
    )


def preset(
    name: str,
    variant: str = "lmm",
    vocab_size: int | None = None,
    options: Mapping[str, JsonValue] | None = None,
) -> ModelConfig:
    """Return the config of a size and variant; ``vocab_size`` None takes the size's own.

    Raises:
        ValueError: there is no such size or variant, or the variant refuses its options or the size.
    """
    # imports torch; a size alone needs none
    from titans_core.blocks import find

    sized, block = size_config(name, vocab_size), find(variant)
    update = {
        "variant": variant,
        "options": dict(options or {}),
        "n_layers": _blocks(SIZES[name], block),
        "mlp_expansion": block.preset_expansion or 0.0,
        "memory": {**dict(sized.memory), **block.preset_memory},
        "attention": {**dict(sized.attention), "window": SIZES[name].window if block.preset_window else None},
    }
    config = ModelConfig.model_validate({**dict(sized), **update})
    if block.preset_expansion is None:
        config = config.model_copy(update={"mlp_expansion": _matched_expansion(config, name, block.layers)})
    return config


def _blocks(size: Size, block: type[Block]) -> int:
    """Return the number of blocks that have about as many layers as the size."""
    return max(1, round(size.n_layers / block.layers))


def _matched_expansion(config: ModelConfig, name: str, layers: int) -> float:
    """Return the feed-forward expansion at which the blocks have as many parameters as the Transformer's."""
    from titans_core.blocks import Transformer, block_parameters

    baseline = {"variant": "transformer", "options": {}, "mlp_expansion": Transformer.preset_expansion}
    transformer = block_parameters(config.model_copy(update=baseline))
    target = transformer * SIZES[name].n_layers // config.n_layers
    mixer = block_parameters(config)
    expansion = (target - mixer - layers * config.d_model) / (3 * layers * config.d_model**2)
    if expansion <= 0:
        raise ValueError(
            f"preset: {config.variant} has {mixer:,} parameters a block before its feed-forward layer, and a "
            f"block of size {name} {target:,}; write the model's fields out, or set its preset_expansion"
        )
    return expansion
