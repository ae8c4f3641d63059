"""DeltaNet, Gated DeltaNet and TTT-linear: settings of the neural memory, by name."""

from __future__ import annotations

from typing import Any

from titans_core.blocks.lmm import LMM
from titans_core.config import ModelConfig

COMMON: dict[str, Any] = {
    "depth": 1, "momentum": False, "value_norm": False, "surprise_bound": None, "theta_bias": 0.0,
    "gates_per": "token", "qk_norm": True, "rule": "paper", "rule_options": {},
}  # fmt: skip
"""What the three have in common: a linear memory without momentum, a bound or normalised values."""


class _MemorySetting(LMM):
    """The LMM with the fields of `MemoryConfig` in ``preset_memory``, and no persistent tokens.

    A config that says otherwise of one of them is refused. The others are the config's: heads, their width,
    convolution, gate and norm of the output. M_0 is learned, as in the LMM; the papers start from zeros.
    """

    uses_persistent = False
    preset_expansion = None

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        super().check(config)
        for field, value in cls.preset_memory.items():
            if (given := getattr(config.memory, field)) != value:
                raise ValueError(
                    f"memory.{field}: {given}, but {config.variant} is the memory with {value} there; "
                    "write that, or take variant lmm"
                )


class DeltaNet(_MemorySetting):
    """The delta rule (Yang et al. 2024, arXiv 2406.06484): chunks of one token, no decay, beta = 2 theta.

    ``S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T`` with beta in [0, 1]; equal to the paper's
    memory by its Appendix C.
    """

    preset_memory = COMMON | {"chunk_size": 1, "decay": False, "max_theta": 0.5}


class GatedDeltaNet(_MemorySetting):
    """DeltaNet with a decay before the gradient is taken (Yang et al. 2024, arXiv 2412.06464): `GatedDelta`.

    ``S_t = S_{t-1} (a_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T`` with a_t = 1 - alpha_t, a sigmoid here.
    """

    preset_memory = COMMON | {"chunk_size": 1, "max_theta": 0.5, "rule": "gated_delta"}


class TTTLinear(_MemorySetting):
    """TTT-linear (Sun et al. 2024, arXiv 2407.04620): gradients at the start of each 16 tokens, no decay.

    Without the inner LayerNorm and residual of the published layer. max_theta is one over the chunk, as the
    published rate is over the place in its batch: all tokens alike then take no more than one full step.
    """

    preset_memory = COMMON | {"chunk_size": 16, "decay": False, "max_theta": 1 / 16}
