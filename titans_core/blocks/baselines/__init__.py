"""The paper's language baselines, one block a file; docs/method.md has what each contains and from where."""

from titans_core.blocks.baselines.delta import TTTMLP, DeltaNet, GatedDeltaNet, TTTLinear
from titans_core.blocks.baselines.gla import GLA
from titans_core.blocks.baselines.hgrn2 import HGRN2
from titans_core.blocks.baselines.mamba import Mamba
from titans_core.blocks.baselines.mamba2 import Mamba2
from titans_core.blocks.baselines.retnet import RetNet

__all__ = ["GLA", "HGRN2", "TTTMLP", "DeltaNet", "GatedDeltaNet", "Mamba", "Mamba2", "RetNet", "TTTLinear"]
