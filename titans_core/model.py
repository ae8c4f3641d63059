"""The language model: an embedding of tokens, blocks of one variant, a head over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from titans_core.backbone import Backbone, ModelState
from titans_core.config import ModelConfig
from titans_core.documents import Documents
from titans_core.generation import GREEDY, NOTHING, Reading, Sampling, Writing, read


class ModelOutput(NamedTuple):
    """Logits [B, T, V], or [B, 1, V] of the last token, and the state after it (None when packed)."""

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
        last: bool = False,
    ) -> ModelOutput:
        """Logits of the token after each.

        Args:
            tokens_BT: [B, T] int64.
            state: from an earlier call, as `encode` takes it.
            document_starts: [B, T] bool, where packed documents begin, as `encode` takes it.
            last: only the logits of the last token, [B, 1, V].
        """
        # as large as the normalised stream the blocks add to; the tied head keeps logits of order 1
        x = self.embedding(tokens_BT) * self.config.d_model**0.5
        x, state = self.encode(x, state, document_starts)
        return ModelOutput(self.head(x[:, -1:] if last else x), state)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        start: Reading = NOTHING,
        sampling: Sampling = GREEDY,
        stop: Sequence[int] = (),
    ) -> list[list[int]]:
        """What is written after each prompt. Arguments and errors are those of `Writing`."""
        written: list[list[int]] = [[] for _ in prompts]
        for row, token in self.stream(prompts, max_new_tokens, start=start, sampling=sampling, stop=stop):
            written[row].append(token)
        return written

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        start: Reading = NOTHING,
        sampling: Sampling = GREEDY,
        stop: Sequence[int] = (),
    ) -> Writing:
        """Each token as it is written: ``for row, token in model.stream(...)``."""
        device = next(self.parameters()).device
        return Writing(
            self, prompts, max_new_tokens, start=start, sampling=sampling, stop=stop, device=device
        )

    def read(self, tokens: Sequence[int], start: Reading = NOTHING) -> Reading:
        """Read a sequence, or more of one; `generate` goes on from it as often as it is asked to."""
        return read(self, tokens, start, next(self.parameters()).device)
