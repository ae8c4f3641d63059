"""A trainer with millisecond steps: a model of two matrices on random rows seeded by the step."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_platform.config import OptimConfig
from titans_platform.data import Batch
from titans_platform.training.loop import Trainer

VOCAB, LENGTH = 11, 8


class Rows:
    """Random rows seeded by the step; every third row has only its last token as target."""

    def __init__(self, rows: int = 6):
        self.rows = rows

    def batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(VOCAB, (self.rows, LENGTH + 1), generator=generator)
        starts = torch.zeros(self.rows, LENGTH + 1, dtype=torch.bool)
        loss = torch.ones(self.rows, LENGTH, dtype=torch.bool)
        loss[::3, :-1] = False
        return Batch(tokens, starts, loss)


class Tied(nn.Module):
    """A language model of two matrices (one tied), a vector and a bias."""

    def __init__(self, width: int = 12):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def parameter_groups(self, weight_decay: float) -> list[dict]:
        return [{"params": list(self.parameters()), "weight_decay": weight_decay}]

    def forward(self, tokens_BT: Tensor, document_starts=None, targets_BT=None) -> SimpleNamespace:
        x = self.norm(self.embedding(tokens_BT))
        logits = self.head(x + torch.tanh(self.mix(x).cumsum(1)))
        losses = None
        if targets_BT is not None:
            losses = F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), reduction="none")
            losses = losses.view_as(targets_BT)
        return SimpleNamespace(logits=logits, losses=losses)


def trainer(seed: int = 0, model: nn.Module | None = None, rows: int = 6, **optim) -> Trainer:
    torch.manual_seed(seed)
    cfg = OptimConfig(**({"steps": 12, "global_batch_size": rows, "lr": 1e-2} | optim))
    return Trainer(model or Tied(), cfg, Rows(rows), sequence_length=LENGTH)
