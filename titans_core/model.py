"""The language model: an embedding of tokens, blocks of one variant, a head over the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from titans_core.backbone import Backbone, ModelState
from titans_core.config import ModelConfig
from titans_core.documents import Documents


class ModelOutput(NamedTuple):
    """Logits [B, T, V] and the state after the last token (None when packed)."""

    logits: Tensor
    state: ModelState | None


class LanguageModel(Backbone):
    """Next-token logits from tokens.

    Raises:
        ValueError: the config's variant is unknown, or refuses the config.
    """

    def __init__(self, config: ModelConfig):
        embedding = nn.Embedding(config.vocab_size, config.d_model)
        head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        super().__init__(config, embedding, head)
        if config.tie_embeddings:
            head.weight = embedding.weight

    def forward(
        self,
        tokens_BT: Tensor,
        state: ModelState | None = None,
        *,
        document_starts: Tensor | Documents | None = None,
    ) -> ModelOutput:
        """Logits of the token after each.

        Args:
            tokens_BT: [B, T] int64.
            state: from an earlier call, as `encode` takes it.
            document_starts: [B, T] bool, where packed documents begin, as `encode` takes it.
        """
        # as large as the normalised stream the blocks add to; the tied head keeps logits of order 1
        x = self.embedding(tokens_BT) * self.config.d_model**0.5
        x, state = self.encode(x, state, document_starts)
        return ModelOutput(self.head(x), state)
