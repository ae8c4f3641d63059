"""Model sizes by name: the paper's four (Section 5.1). Small scales live in the studies that use them.

Depth and width are one for all variants of a size; what attention adds in parameters (4 d_model^2 a
layer) comes off the feed-forward layer, so that a size compares variants at equal counts. Widths are
ours: the paper prints only the counts.
"""

from __future__ import annotations

from typing import NamedTuple

from titans_core.config import AttentionConfig, MemoryConfig, ModelConfig


class Size(NamedTuple):
    """Width, layers, and whether the head is the embedding's transpose."""

    d_model: int
    n_layers: int
    tie_embeddings: bool


SIZES = {
    "170M": Size(768, 19, True),
    "340M": Size(1024, 22, True),
    "400M": Size(1024, 24, False),
    "760M": Size(1536, 23, True),
}
HEAD_DIM = 64
# SwiGLU hidden width over d_model: the projections of attention and of memory are 4 and 5 d_model^2,
# a unit of expansion is 3
MLP_EXPANSION = {"lmm": 8 / 3, "mac": 4 / 3, "mag": 4 / 3, "mal": 4 / 3, "transformer": 3.0}


def preset(name: str, variant: str = "lmm", vocab_size: int = 32_000) -> ModelConfig:
    """The config of a size and variant.

    Raises:
        ValueError: there is no such size or variant.
    """
    for value, known, what in ((name, SIZES, "preset"), (variant, MLP_EXPANSION, "variant")):
        if value not in known:
            raise ValueError(f"{what}: {value!r} is not one of {', '.join(known)}")
    size = SIZES[name]
    heads = size.d_model // HEAD_DIM
    window = None if variant == "transformer" else 1024
    return ModelConfig(
        variant=variant,
        vocab_size=vocab_size,
        d_model=size.d_model,
        n_layers=size.n_layers,
        tie_embeddings=size.tie_embeddings,
        persistent_tokens=16,
        mlp_expansion=MLP_EXPANSION[variant],
        memory=MemoryConfig(depth=2, heads=heads, chunk_size=64),
        attention=AttentionConfig(heads=heads, window=window, segment_size=1024),
    )
