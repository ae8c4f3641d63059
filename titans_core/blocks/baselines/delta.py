"""DeltaNet, Gated DeltaNet and TTT-linear: settings of the neural memory, by name."""

from __future__ import annotations

from typing import Any, ClassVar

from titans_core.blocks.lmm import LMM
from titans_core.config import ModelConfig


class _MemorySetting(LMM):
    """The LMM with part of its `MemoryConfig` given by ``settings``, whatever the config says there.

    All three have a linear memory without momentum, a bound, persistent tokens or normalised values. What is
    not set is the config's: heads, their width, convolution, gate and norm of the output. M_0 is learned, as
    in the LMM; the papers start from zeros.
    """

    settings: ClassVar[dict[str, Any]]
    uses_persistent = False
    preset_expansion = None

    def __init__(self, config: ModelConfig):
        common = {"depth": 1, "momentum": False, "value_norm": False, "surprise_bound": None}
        common |= {"gates_per": "token", "rule": "paper", "rule_options": {}, "qk_norm": True}
        memory = config.memory.model_copy(update=common | self.settings)
        super().__init__(config.model_copy(update={"memory": memory}))


class DeltaNet(_MemorySetting):
    """The delta rule (Yang et al. 2024, arXiv 2406.06484): chunks of one token, no decay, beta = 2 theta.

    ``S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T`` with beta in [0, 1]; equal to the paper's
    memory by its Appendix C.
    """

    settings: ClassVar[dict[str, Any]] = {
        "chunk_size": 1, "decay": False, "max_theta": 0.5, "theta_bias": 0.0
    }  # fmt: skip


class GatedDeltaNet(_MemorySetting):
    """DeltaNet with a decay before the gradient is taken (Yang et al. 2024, arXiv 2412.06464): `GatedDelta`.

    ``S_t = S_{t-1} (a_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T`` with a_t = 1 - alpha_t, a sigmoid here.
    """

    settings: ClassVar[dict[str, Any]] = {
        "chunk_size": 1, "decay": True, "max_theta": 0.5, "theta_bias": 0.0, "rule": "gated_delta"
    }  # fmt: skip


class TTTLinear(_MemorySetting):
    """TTT-linear (Sun et al. 2024, arXiv 2407.04620): gradients at the start of each 16 tokens, no decay.

    Without the inner LayerNorm and residual of the published layer. max_theta is one over the chunk, as the
    published rate is over the place in its batch: all tokens alike then take no more than one full step.
    """

    settings: ClassVar[dict[str, Any]] = {
        "chunk_size": 16, "decay": False, "max_theta": 1 / 16, "theta_bias": 0.0
    }  # fmt: skip
