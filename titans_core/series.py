"""The model of real-valued series: a window in, the values that follow it out."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from titans_core.backbone import Backbone
from titans_core.config import ModelConfig
from titans_core.documents import Documents, check_not_empty
from titans_core.state import ModelState


class SeriesOutput(NamedTuple):
    """The predicted values [B, h, C], and the state after the window (None when packed)."""

    prediction: Tensor
    state: ModelState | None


class SeriesModel(Backbone):
    """Predicts the next ``horizon`` values of ``channels`` series at once, from the last token's features.

    A token is ``patch`` steps of all channels, embedded by one linear layer; ``vocab_size`` and
    ``tie_embeddings`` of the config are not used.

    Raises:
        ValueError: the config's variant is unknown, or refuses the config.
    """

    def __init__(self, config: ModelConfig, channels: int, horizon: int, patch: int = 1):
        embedding = nn.Linear(patch * channels, config.d_model, bias=False)
        super().__init__(config, embedding, nn.Linear(config.d_model, horizon * channels, bias=False))
        self.horizon, self.patch = horizon, patch

    def forward(
        self,
        x_BTC: Tensor,
        state: ModelState | None = None,
        *,
        document_starts: Tensor | Documents | None = None,
    ) -> SeriesOutput:
        """Predict the ``horizon`` steps after the last, [B, T, C] to [B, h, C].

        Args:
            x_BTC: [B, T, C] values, T a multiple of ``patch``.
            state: from an earlier call, to continue the series; it may be split between any two patches.
            document_starts: [B, T / patch] bool, True at the patch a packed series begins with; the
                prediction is for the last.

        Raises:
            ValueError: the batch is empty, or T is not a multiple of ``patch``.
        """
        check_not_empty(x_BTC, "x_BTC")
        B, T, C = x_BTC.shape
        if T % self.patch:
            raise ValueError(f"patch: {self.patch} steps do not divide a window of {T} steps")
        x = self.embedding(x_BTC.reshape(B, T // self.patch, self.patch * C))
        x, state = self.encode(x, state, document_starts)
        return SeriesOutput(self.head(x[:, -1]).view(B, self.horizon, C), state)

    def state_bytes(self, length: int) -> int:
        """Bytes one series carries after ``length`` steps."""
        return super().state_bytes(-(-length // self.patch))
