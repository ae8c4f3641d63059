"""The language model: an embedding of tokens, blocks of one variant, a head over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from titans_core.backbone import Backbone, ModelState
from titans_core.config import ModelConfig
from titans_core.documents import Documents
from titans_core.generation import GREEDY, NOTHING, Reading, Sampling, Writing, read

LOGITS_AT_ONCE = 2**24
"""Logits of a pass with targets that are in memory at once: 64 MiB of float32."""


class ModelOutput(NamedTuple):
    """What a pass gives: logits or losses, and the state after the last token (None when packed)."""

    logits: Tensor | None
    """[B, T, V], or [B, 1, V] of the last token; None where there were targets."""
    state: ModelState | None
    losses: Tensor | None = None
    """[B, T] cross-entropy of the targets in nats."""


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
        targets_BT: Tensor | None = None,
        reset_B: Tensor | None = None,
    ) -> ModelOutput:
        """Logits of the token after each, or the losses of given ones.

        Args:
            tokens_BT: [B, T] int64.
            state: from an earlier call, as `encode` takes it.
            document_starts: [B, T] bool, where packed documents begin, as `encode` takes it.
            last: only the logits of the last token, [B, 1, V].
            targets_BT: [B, T] int64, the token after each: their cross-entropy in place of the logits, of
                which at most LOGITS_AT_ONCE are held, and made again for the backward pass.
            reset_B: [B] bool, rows that begin a new sequence in spite of ``state``, as `encode` takes it.
        """
        x, state = self.features(tokens_BT, state, document_starts, reset_B)
        if targets_BT is not None:
            return ModelOutput(None, state, self._losses(x, targets_BT))
        return ModelOutput(self.head(x[:, -1:] if last else x), state)

    def features(
        self,
        tokens_BT: Tensor,
        state: ModelState | None = None,
        document_starts: Tensor | Documents | None = None,
        reset_B: Tensor | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        """[B, T, D], what ``head`` makes logits of, and the state. Arguments are those of `forward`."""
        # as large as the normalised stream the blocks add to; the tied head keeps logits of order 1
        x_BTD = self.embedding(tokens_BT) * self.config.d_model**0.5
        return self.encode(x_BTD, state, document_starts, reset_B)

    def _losses(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """[B, T] cross-entropy, of a part of the positions after the other where there are many."""
        x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
        rows = max(1, LOGITS_AT_ONCE // self.config.vocab_size)
        if len(x_ND) <= rows:
            return self._cross_entropy(x_ND, targets_N).view_as(targets_BT)
        parts = [
            checkpoint(self._cross_entropy, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(x_ND.split(rows), targets_N.split(rows), strict=True)
        ]
        return torch.cat(parts).view_as(targets_BT)

    def _cross_entropy(self, x_ND: Tensor, targets_N: Tensor) -> Tensor:
        # flat: over a middle dimension, and back, softmax is several times slower
        logits_NV = self.head(x_ND)
        exact = torch.promote_types(logits_NV.dtype, torch.float32)
        return F.cross_entropy(logits_NV.to(exact), targets_N, reduction="none")

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
