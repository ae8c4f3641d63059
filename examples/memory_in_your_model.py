"""The neural memory as a layer of your own model, with its state carried from call to call.

    python examples/memory_in_your_model.py

`NeuralMemory` maps [B, T, D] to [B, T, D] like any layer, and returns what it remembers as a second value.
The model here reads pairs of a key and a value in one call and must recall the values in the next: without
the carried state it can only guess. Gradients flow through the state, so that the model learns what to
write.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titans_core import MemoryCache, MemoryConfig, NeuralMemory

KEYS, VALUES, PAIRS = 16, 8, 6
"""Different keys and values, and the pairs of a sequence."""


class Notebook(nn.Module):
    """Somebody's model: an embedding, a neural memory with a residual connection, a head over the values.

    Args:
        width: D, the width of the stream.
    """

    def __init__(self, width: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(KEYS + VALUES, width)
        self.norm = nn.RMSNorm(width)
        config = MemoryConfig(depth=2, heads=2, chunk_size=4, max_theta=0.5, write_budget=2.0)
        self.memory = NeuralMemory(width, config)
        self.head = nn.Linear(width, VALUES)

    def forward(self, tokens_BT: Tensor, cache: MemoryCache | None = None) -> tuple[Tensor, MemoryCache]:
        """Logits [B, T, VALUES], and what the memory holds after the last token.

        Args:
            tokens_BT: [B, T] int64.
            cache: what an earlier call returned, to continue its sequences; None starts new ones.
        """
        x_BTD = self.embedding(tokens_BT)
        y_BTD, cache = self.memory(self.norm(x_BTD), cache)
        assert cache is not None  # it is None for packed documents alone
        return self.head(x_BTD + y_BTD), cache


def sample_batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs k v k v ... [B, 2 PAIRS]; their keys, shuffled, and the values of these [B, PAIRS] each."""
    keys = torch.rand(rows, KEYS).argsort(-1)[:, :PAIRS]
    values = torch.randint(VALUES, (rows, PAIRS))
    pairs = torch.stack([keys, KEYS + values], -1).flatten(1)
    order = torch.rand(rows, PAIRS).argsort(-1)
    return pairs, keys.gather(1, order), values.gather(1, order)


@torch.no_grad()
def accuracy(model: Notebook, carried: bool, rows: int = 256) -> float:
    """Share of the questions answered, with the state of the call before or with a new one."""
    pairs, questions, answers = sample_batch(rows)
    _, cache = model(pairs)
    logits, _ = model(questions, cache if carried else None)
    return (logits.argmax(-1) == answers).float().mean().item()


def main() -> None:
    """Train, then ask with and without what was read before."""
    parser = argparse.ArgumentParser(description="Train a model with a neural memory in it.")
    parser.add_argument("--steps", type=int, default=250)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = Notebook()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        pairs, questions, answers = sample_batch(32)
        _, cache = model(pairs)  # write
        logits, _ = model(questions, cache)  # the state is carried, and so are gradients
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % max(1, steps // 8) == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.3f}", flush=True)
    print(f"with the state carried  {accuracy(model, carried=True):.0%} of the questions answered")
    print(f"with a new state        {accuracy(model, carried=False):.0%} (chance {1 / VALUES:.0%})")


if __name__ == "__main__":
    main()
