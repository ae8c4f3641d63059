"""The paper's baselines of language and DNA, one block a file; docs/method.md has what each contains."""

from titans_core.blocks.baselines.based import Based
from titans_core.blocks.baselines.delta import TTTMLP, DeltaNet, GatedDeltaNet, TTTLinear
from titans_core.blocks.baselines.gla import GLA
from titans_core.blocks.baselines.hgrn2 import HGRN2
from titans_core.blocks.baselines.hybrids import GatedDeltaNetH2, Samba
from titans_core.blocks.baselines.hyena import Hyena
from titans_core.blocks.baselines.mamba import Mamba
from titans_core.blocks.baselines.mamba2 import Mamba2
from titans_core.blocks.baselines.retnet import RetNet

__all__ = [
    "GLA",
    "HGRN2",
    "TTTMLP",
    "Based",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaNetH2",
    "Hyena",
    "Mamba",
    "Mamba2",
    "RetNet",
    "Samba",
    "TTTLinear",
]
