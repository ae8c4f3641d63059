"""Classifiers of sequences: a language model's blocks with a small head, and a convolutional network.

Shapes: B batch, T tokens, D model width, K classes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core.backbone import Model
from titans_core.config import ModelConfig
from titans_core.documents import check_not_empty
from titans_core.model import LanguageModel, ModelOutput

Pooling = Literal["mean", "last"]


class ClassOutput(NamedTuple):
    """Logits of the classes, [B, K]."""

    logits: Tensor


class SequenceClassifier(LanguageModel):
    """A language model with a second linear head, over classes.

    The head reads the features of the last position, or their mean over all positions. Features of a position
    do not depend on what comes after it, so sequences are padded on the right with any token.

    Raises:
        ValueError: the config's variant is unknown, or refuses the config.
    """

    added: ClassVar[tuple[str, ...]] = ("classifier.",)

    def __init__(self, config: ModelConfig, classes: int, pooling: Pooling = "mean"):
        super().__init__(config)
        self.pooling: Pooling = pooling
        self.classifier = nn.Linear(config.d_model, classes)
        # uniform predictions at first
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens_BT: Tensor, state: Any = None, *, lengths_B: Tensor | None = None, **kwargs: Any
    ) -> ClassOutput | ModelOutput:
        """Return the classes' logits if ``lengths_B`` is given, otherwise the outputs of `LanguageModel`.

        Args:
            tokens_BT: [B, T] int64, padded on the right.
            state: of a language model.
            lengths_B: [B] int64, at least 1.
            kwargs: further arguments of `LanguageModel.forward`.

        Raises:
            ValueError: ``lengths_B`` with a state or another argument of a language model.
        """
        if lengths_B is None:
            out = super().forward(tokens_BT, state, **kwargs)
            if out.losses is None:
                return out
            return out._replace(losses=out.losses + self._zero_gradient(self.classifier))
        if state is not None or kwargs:
            name = next(iter(kwargs), "state")
            raise ValueError(f"{name}: a classifier reads whole sequences; leave it out, or lengths_B")
        x_BTD, _ = self.features(tokens_BT)
        logits = self.classifier(pool(x_BTD, lengths_B, self.pooling))
        return ClassOutput(logits + self._zero_gradient(self.head))

    def _zero_gradient(self, head: nn.Module) -> Tensor:
        """0, with zero gradients for an unused head: DDP expects a gradient for every parameter."""
        return 0 * torch.stack([p.sum() for p in head.parameters()]).sum()


def pool(x_BTD: Tensor, lengths_B: Tensor, pooling: Pooling) -> Tensor:
    """[B, D], the mean of each sequence's positions, or its last."""
    if pooling == "last":
        return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), lengths_B - 1]
    own_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device) < lengths_B[:, None]
    # not a product with 0: features of padding may be inf or NaN
    return x_BTD.masked_fill(~own_BT[..., None], 0).sum(1) / lengths_B[:, None].to(x_BTD.dtype)


class ConvClassifier(Model):
    """The baseline of GenomicBenchmarks (Gresova et al. 2023): three convolutions, then two linear layers.

    Each convolution has a width of 8, a batch norm, ReLU and max pooling by 2; as published there is nothing
    between the linear layers. Sequences are padded to ``length`` by ``pad``, which it sees.

    Raises:
        ValueError: ``length`` is too short for three convolutions.
    """

    CHANNELS, KERNEL, EMBEDDING, HIDDEN = (16, 8, 4), 8, 100, 512

    def __init__(self, vocab_size: int, classes: int, length: int, pad: int):
        super().__init__()
        self.length, self.pad, left = length, pad, length
        self.embedding = nn.Embedding(vocab_size, self.EMBEDDING)
        layers: list[nn.Module] = []
        for before, after in zip((self.EMBEDDING, *self.CHANNELS), self.CHANNELS, strict=False):
            layers += [
                nn.Conv1d(before, after, self.KERNEL),
                nn.BatchNorm1d(after),
                nn.ReLU(),
                nn.MaxPool1d(2),
            ]
            left = (left - self.KERNEL + 1) // 2
        if left < 1:
            raise ValueError(f"length: {length} tokens are too few for three convolutions")
        self.convolutions = nn.Sequential(*layers, nn.Flatten())
        self.hidden = nn.Linear(left * self.CHANNELS[-1], self.HIDDEN)
        self.classifier = nn.Linear(self.HIDDEN, classes)

    def forward(self, tokens_BT: Tensor, *, lengths_B: Tensor) -> ClassOutput:
        """Logits of the classes; tokens after a sequence's end are ignored.

        Raises:
            ValueError: there is no row or no token, or more tokens than the model's ``length``.
        """
        check_not_empty(tokens_BT)
        length = tokens_BT.shape[1]
        if length > self.length:
            raise ValueError(f"tokens_BT: {length} tokens, but the model takes at most {self.length}")
        valid_BT = torch.arange(length, device=tokens_BT.device) < lengths_B[:, None]
        tokens_BT = tokens_BT.masked_fill(~valid_BT, self.pad)
        tokens_BT = F.pad(tokens_BT, (0, self.length - length), value=self.pad)
        x_BCT = self.embedding(tokens_BT).transpose(1, 2)
        return ClassOutput(self.classifier(self.hidden(self.convolutions(x_BCT))))
