"""Training steps in a process of their own, with the code of whichever tree is on its path.

Run as a file: ``python step_worker.py JOB``, JOB the JSON that `benchmarks.step` makes. It prints the model's
config and its first losses, then answers each line, a number of steps, with their seconds of CPU and of wall
clock. The timed code may be an older checkout's.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHECKED = 4
"""First steps whose losses are compared."""


class Batch(NamedTuple):
    """As `titans_platform.data.Batch`: tokens and starts [B, T + 1], loss [B, T]."""

    tokens: Tensor
    starts: Tensor
    loss: Tensor


class RandomRows:
    """Rows of random tokens, each one document, as a row of a generated task is."""

    def __init__(self, rows: int, length: int, vocabulary: int):
        self.sizes, self.vocabulary = (rows, length + 1), vocabulary

    def batch(self, step: int) -> Batch:
        """Draw the rows of a step, the same in every tree."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(self.vocabulary, self.sizes, generator=generator)
        starts = torch.zeros(self.sizes, dtype=torch.bool)
        starts[:, 0] = True
        return Batch(tokens, starts, torch.ones_like(starts[:, 1:]))


def trainer_of(job: dict[str, Any]) -> Any:
    """Build the tree's own `Trainer` for a job: model, optim, rows and length."""
    from titans_core import LanguageModel, ModelConfig
    from titans_platform.config import OptimConfig
    from titans_platform.training.loop import Trainer

    # an older checkout does not know every field
    optim = {key: value for key, value in job["optim"].items() if key in OptimConfig.model_fields}
    config = ModelConfig.model_validate(job["model"])
    torch.manual_seed(0)
    stream = RandomRows(job["rows"], job["length"], config.vocab_size)
    return Trainer(LanguageModel(config), OptimConfig(**optim), stream, sequence_length=job["length"])


def serve(job: dict[str, Any]) -> None:
    """Answer until the input ends."""
    torch.set_num_threads(job["threads"])
    trainer = trainer_of(job)
    losses = [trainer.step()["loss"] for _ in range(CHECKED)]
    about = {
        "config": trainer.model.config.model_dump(mode="json"),
        "parameters": trainer.model.num_parameters(),
    }
    print(json.dumps(about | {"losses": losses}), flush=True)
    for line in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(int(line)):
            trainer.step()
        print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall]), flush=True)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
