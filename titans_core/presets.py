"""Model sizes by name: the paper's four (Section 5.1), and small ones for two cores.

Depth and width are one for all variants of a size; what attention adds in parameters (4 d_model^2 a
layer) comes off the feed-forward layer, so that a size compares variants at equal counts. Widths are
ours: the paper prints only the counts.
"""

from __future__ import annotations

from typing import NamedTuple

from titans_core.config import AttentionConfig, MemoryConfig, ModelConfig


class Size(NamedTuple):
    """What a size fixes; ``window`` is also MAC's segment, in tokens."""

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
# SwiGLU hidden width over d_model: the projections of attention and of memory are 4 and 5 d_model^2,
# a unit of expansion is 3
MLP_EXPANSION = {"lmm": 8 / 3, "mac": 4 / 3, "mag": 4 / 3, "mal": 4 / 3, "transformer": 3.0}


def preset(name: str, variant: str = "lmm", vocab_size: int | None = None) -> ModelConfig:
    """The config of a size and variant; ``vocab_size`` None takes the size's own.

    Raises:
        ValueError: there is no such size or variant.
    """
    for value, known, what in ((name, SIZES, "preset"), (variant, MLP_EXPANSION, "variant")):
        if value not in known:
            raise ValueError(f"{what}: {value!r} is not one of {', '.join(known)}")
    size = SIZES[name]
    heads = size.d_model // size.head_dim
    # full attention is the baseline's; the window belongs to the hybrids
    window = None if variant == "transformer" else size.window
    return ModelConfig(
        variant=variant,
        vocab_size=vocab_size or size.vocab_size,
        d_model=size.d_model,
        n_layers=size.n_layers,
        tie_embeddings=size.tie_embeddings,
        persistent_tokens=size.persistent_tokens,
        mlp_expansion=MLP_EXPANSION[variant],
        memory=MemoryConfig(depth=2, heads=heads, chunk_size=size.chunk_size, max_theta=size.max_theta),
        attention=AttentionConfig(heads=heads, window=window, segment_size=size.window),
    )
