"""A memory whose last layer alone is written ("TTT with KV binding is secretly linear", arXiv 2602.21204)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.blocks import LMM
from titans_core.config import MemoryConfig, ModelConfig
from titans_core.documents import Documents
from titans_core.memory import NeuralMemory
from titans_core.projections import ConvState
from titans_kernels import state_dtype, without_autocast
from titans_kernels.memory.activations import ACTIVATIONS


class LastLayerMemory(NeuralMemory):
    """Layers below the last stay at their learned weights, as features of queries and keys.

    The memory is a linear one of these features, L2-normalised with ``qk_norm``, and exact in parallel with
    chunks of one token at any depth. Needs ``residual: none``.
    """

    def __init__(self, d_model: int, config: MemoryConfig, *, initialized: bool = True):
        super().__init__(d_model, config, initialized=initialized)
        *below, last = self.initial_weights
        self.feature_weights, self.initial_weights = nn.ParameterList(below), nn.ParameterList([last])
        with torch.no_grad():
            for W in self.feature_weights:
                nn.init.normal_(W, std=W.shape[-2] ** -0.5)

    def project(
        self, x_BTD: Tensor, names: str, conv_state: ConvState, documents: Documents | None = None
    ) -> tuple[list[Tensor], ConvState]:
        heads, conv_state = super().project(x_BTD, names, conv_state, documents)
        projected = [self._features(h) if n in "qk" else h for n, h in zip(names, heads, strict=True)]
        return projected, conv_state

    def _features(self, x_BTHE: Tensor) -> Tensor:
        f, dtype = ACTIVATIONS[self.config.activation], state_dtype(x_BTHE)
        with without_autocast(x_BTHE):
            x = x_BTHE.to(dtype)
            for W in self.feature_weights:
                x = f.value(torch.einsum("bthd,hde->bthe", x, W.to(dtype)))
            return F.normalize(x, dim=-1, eps=1e-6) if self.config.qk_norm else x


class LastLayerLMM(LMM):
    """The LMM with a `LastLayerMemory`."""

    preset_expansion = None

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.memory = LastLayerMemory(config.d_model, config.memory, initialized=False)

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        super().check(config)
        if config.memory.residual != "none":
            raise ValueError(f"memory.residual: {config.memory.residual} is not supported; use none")
