"""Sequence parallelism: each worker has one part of every row and passes its recurrent state on to the next.

Worker r runs block i on its part as soon as it has the state of block i after the part before, so workers are
one block apart: W workers and L blocks take about (L + W - 1) / (L W) of the time of one worker. The
state is exact in any model, and its gradient goes the same way back.
"""

from __future__ import annotations

import itertools
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn

from titans_core.config import ModelConfig
from titans_core.model import LanguageModel, ModelOutput
from titans_core.relay import Relay
from titans_core.state import ModelState


class SequenceParallel(nn.Module):
    """A language model over the rows that all workers have, of which each computes its own part.

    It is called with the same whole rows and state in every worker. The losses [B, T] that it returns are 0
    outside of the worker's part, so the losses and gradients of all workers add up to the result of a single
    one.

    Args:
        module: the model, with the same weights in every worker.
    """

    def __init__(self, module: LanguageModel):
        super().__init__()
        self.module = module
        # of its own: messages between two workers must not wait for the reduction of gradients
        self._relay = Relay(cast(dist.ProcessGroup, dist.new_group()))

    def forward(
        self, tokens_BT: Tensor, state: ModelState | None = None, *, targets_BT: Tensor,
        reset_B: Tensor | None = None,
    ) -> ModelOutput:  # fmt: skip
        """Losses of this worker's part, and the detached state after the row, in every worker.

        Arguments as of `LanguageModel.forward`. Raises ValueError: the row is shorter than a part.
        """
        relay, T = self._relay, tokens_BT.shape[1]
        parts = row_parts(T, relay.size, self.module.config)
        first, end = parts[relay.rank], parts[relay.rank + 1]
        if relay.rank:
            reset_B = None  # what was reset came with the state
            state = ModelState((state.position if state else 0) + first, (None,) * len(self.module.blocks))
        self.module.relay = relay
        try:
            out = self.module(
                tokens_BT[:, first:end], state, targets_BT=targets_BT[:, first:end], reset_B=reset_B
            )
        finally:
            self.module.relay = None
        assert out.losses is not None
        assert out.state is not None
        # the anchor ties what was sent to the loss: its gradient comes from the worker after
        losses_BT = nn.functional.pad(out.losses + relay.anchor(out.losses), (first, T - end))
        return ModelOutput(None, relay.share(out.state.detach(), tokens_BT.device), losses_BT)


def row_parts(T: int, workers: int, config: ModelConfig) -> list[int]:
    """Return the starts of the workers' parts of a row, on borders of chunks and segments; then T.

    Raises:
        ValueError: a part would be empty.
    """
    unit = config.attention.segment_size or config.memory.chunk_size
    borders = [T * r // workers // unit * unit for r in range(workers)] + [T]
    if min(b - a for a, b in itertools.pairwise(borders)) <= 0:
        raise ValueError(f"{T} tokens have no part of {unit} tokens for each of {workers} workers")
    return borders
