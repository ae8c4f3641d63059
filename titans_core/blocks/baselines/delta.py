"""DeltaNet, Gated DeltaNet, TTT-linear and TTT-MLP as configurations of the neural memory."""

from __future__ import annotations

from typing import Any, ClassVar

from titans_core.blocks.lmm import LMM
from titans_core.config import ModelConfig

COMMON: dict[str, Any] = {
    "momentum": False, "value_norm": False, "surprise_bound": None, "theta_bias": 0.0,
    "gates_per": "token", "qk_norm": True, "rule": "paper", "write_budget": None,
}  # fmt: skip
"""Common to all: no momentum, no bound on the surprise, no write budget, values not normalised."""
LINEAR = COMMON | {"depth": 1}
TTT: dict[str, Any] = COMMON | {"chunk_size": 16, "decay": False, "residual": "norm"}


class _MemorySetting(LMM):
    """The LMM with fixed fields of `MemoryConfig`, in ``preset_memory``, and without persistent tokens.

    A config with other values of these fields is refused. The other fields are free: heads, their width,
    convolution, output gate and norm. M_0 is learned, as in the LMM; the papers start from zeros.
    """

    uses_persistent = False
    preset_expansion = None
    unchecked: ClassVar[tuple[str, ...]] = ()
    """Fields of ``preset_memory`` that a config may override."""

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        super().check(config)
        for field, value in cls.preset_memory.items():
            if (setting := getattr(config.memory, field)) != value and field not in cls.unchecked:
                raise ValueError(
                    f"memory.{field}: {setting}, but variant {config.variant} requires {value}; "
                    "set that, or use variant lmm"
                )


class DeltaNet(_MemorySetting):
    """The delta rule (Yang et al. 2024, arXiv 2406.06484): chunks of one token, no decay, beta = 2 theta.

    ``S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T`` with beta in [0, 1]; equal to the paper's
    memory by its Appendix C.
    """

    preset_memory = LINEAR | {"chunk_size": 1, "decay": False, "max_theta": 0.5}


class GatedDeltaNet(_MemorySetting):
    """DeltaNet with a decay before the gradient is taken (Yang et al. 2024, arXiv 2412.06464): `GatedDelta`.

    ``S_t = S_{t-1} (a_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T`` with a_t = 1 - alpha_t, a sigmoid here.
    """

    preset_memory = LINEAR | {"chunk_size": 1, "max_theta": 0.5, "rule": "gated_delta"}


class TTTLinear(_MemorySetting):
    """TTT-linear (Sun et al. 2024, arXiv 2407.04620): ``f(x) = x + LN(x W)``, no momentum, no decay.

    Gradients are taken at the start of each mini-batch of 16 tokens; the step theta_t is a learned function
    of the token. max_theta is one over the mini-batch, as the published rate is over the place in it: without
    LN, tokens that are all alike then take no more than one full step. ``memory.residual: none`` is this
    variant without LN and the residual, as it was before they could be had.
    """

    preset_memory = TTT | {"depth": 1, "max_theta": 1 / 16}
    unchecked = ("residual",)


class TTTMLP(_MemorySetting):
    """TTT-MLP: ``f(x) = x + LN(gelu(x W_1) W_2)``, hidden layer four times as wide, a tenth of the step."""

    preset_memory = TTT | {"depth": 2, "expansion": 4, "activation": "gelu", "max_theta": 0.1 / 16}
