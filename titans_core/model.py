"""The language model: an embedding of tokens, blocks of one variant, a head over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from titans_core.backbone import Backbone
from titans_core.config import ModelConfig
from titans_core.documents import Documents
from titans_core.generation import EMPTY_READING, GREEDY, Reading, Sampling, Writing, read
from titans_core.state import ModelState

LOGITS_PER_BLOCK = 2**24
"""Most logits in memory at a time when losses are computed: 64 MiB of float32."""


class ModelOutput(NamedTuple):
    """Logits or losses, and the state after the last token (None when packed)."""

    logits: Tensor | None
    """[B, T, V], or [B, 1, V] of the last token; None if targets were given."""
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
        start: int = 0,
        targets_BT: Tensor | None = None,
        reset_B: Tensor | None = None,
    ) -> ModelOutput:
        """Next-token logits, or the losses of given targets.

        Args:
            tokens_BT: [B, T] int64.
            state: from an earlier call, to continue its sequences; see `encode`.
            document_starts: [B, T] bool, where packed documents begin; see `encode`.
            last: only the logits of the last token, [B, 1, V].
            start: only the logits from this token on, [B, T - start, V].
            targets_BT: [B, T] int64, the token after each: return their cross-entropy instead of the
                logits. At most LOGITS_PER_BLOCK logits are in memory; they are recomputed in the backward
                pass.
            reset_B: [B] bool, rows that start a new sequence although a state is given; see `encode`.

        Raises:
            ValueError: targets of another shape than the tokens, or with ``last`` or ``start``.
        """
        if targets_BT is not None:
            if targets_BT.shape != tokens_BT.shape:
                raise ValueError(f"targets_BT: {list(targets_BT.shape)} is not {list(tokens_BT.shape)}")
            if last or start:
                raise ValueError("targets_BT: losses are of all tokens; leave out last and start")
        x, state = self.features(tokens_BT, state, document_starts, reset_B)
        if targets_BT is not None:
            return ModelOutput(None, state, self._losses(x, targets_BT))
        return ModelOutput(self.head(x[:, -1:] if last else x[:, start:]), state)

    def features(
        self,
        tokens_BT: Tensor,
        state: ModelState | None = None,
        document_starts: Tensor | Documents | None = None,
        reset_B: Tensor | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        """[B, T, D] inputs of ``head``, and the state. Arguments as in `forward`."""
        return self.encode(self.scaled(self.embedding(tokens_BT)), state, document_starts, reset_B)

    def scaled(self, embedded_BTD: Tensor) -> Tensor:
        """Bring outputs of ``embedding`` to the scale of the normalised residual stream.

        With a tied head the logits are then of order 1.
        """
        return embedded_BTD * self.config.d_model**0.5

    def _losses(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """[B, T] cross-entropy, computed in blocks of positions."""
        x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
        rows = max(1, LOGITS_PER_BLOCK // self.config.vocab_size)
        if len(x_ND) <= rows:
            return self.cross_entropy(x_ND, targets_N).view_as(targets_BT)
        parts = [
            checkpoint(self.cross_entropy, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(x_ND.split(rows), targets_N.split(rows), strict=True)
        ]
        return torch.cat(parts).view_as(targets_BT)

    def cross_entropy(self, x_ND: Tensor, targets_N: Tensor) -> Tensor:
        """[N] cross-entropy, at least in float32."""
        # flattened: softmax over a middle dimension is several times slower
        logits = self.head(x_ND)
        exact = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(exact), targets_N, reduction="none")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        start: Reading = EMPTY_READING,
        sampling: Sampling = GREEDY,
        stop: Sequence[int] = (),
    ) -> list[list[int]]:
        """Generate tokens after each prompt. Arguments and errors as in `Writing`."""
        written: list[list[int]] = [[] for _ in prompts]
        for row, token in self.stream(prompts, max_new_tokens, start=start, sampling=sampling, stop=stop):
            written[row].append(token)
        return written

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        start: Reading = EMPTY_READING,
        sampling: Sampling = GREEDY,
        stop: Sequence[int] = (),
    ) -> Writing:
        """Stream tokens as they are generated: ``for row, token in model.stream(...)``."""
        device = next(self.parameters()).device
        return Writing(
            self, prompts, max_new_tokens, start=start, sampling=sampling, stop=stop, device=device
        )

    def read(self, tokens: Sequence[int], start: Reading = EMPTY_READING) -> Reading:
        """Read a sequence, or more of one, to generate from it any number of times."""
        return read(self, tokens, start, next(self.parameters()).device)
