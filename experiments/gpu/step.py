"""Time training steps of rows of a study on one GPU: `python experiments/gpu/step.py ablation 340M LMM ...`.

A step is what one worker of the scale has: 16 rows in micro-batches, packed with documents of changing
lengths, so that a number of documents that a graph takes as a constant shows as a step that compiles again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titans_core import LanguageModel
from titans_kernels import forms_used
from titans_platform.data import Batch
from titans_platform.study.grid import expand, load_study
from titans_platform.training.loop import Trainer, deterministic

ROWS = 16
MEAN_LOG, SPREAD = 6.1, 1.0
"""Of the documents' lengths in tokens, log-normal as web text has them: 446 in the median, 735 the mean."""


class PackedRows:
    """Random tokens by a Zipf distribution in packed documents."""

    def __init__(self, length: int, vocabulary: int):
        self.sizes, self.vocabulary = (ROWS, length + 1), vocabulary

    def batch(self, step: int) -> Batch:
        """Draw the rows of a step."""
        rng = np.random.default_rng(step)
        starts = np.zeros(self.sizes, dtype=bool)
        for row in starts:
            borders = np.cumsum(np.clip(rng.lognormal(MEAN_LOG, SPREAD, row.size // 20), 20, 20_000))
            row[[0, *borders[borders < row.size].astype(int)]] = True
        tokens = torch.from_numpy(np.minimum(rng.zipf(1.3, self.sizes), self.vocabulary) - 1)
        return Batch(tokens, torch.from_numpy(starts), torch.ones(ROWS, self.sizes[1] - 1, dtype=torch.bool))


def measure(config: Any, steps: int, profile: Path | None) -> dict[str, Any]:
    """Train a row for some steps; the first two compile and are not timed."""
    torch._dynamo.reset()
    forms_used(forget=True)
    torch.cuda.reset_peak_memory_stats()
    model, length = LanguageModel(config.model), config.data.sequence_length
    optim = config.optim.model_copy(update={"global_batch_size": ROWS})
    stream = PackedRows(length, config.model.vocab_size)
    trainer = Trainer(model, optim, stream, "cuda", sequence_length=length)
    times, losses = [], []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(trainer.step()["loss"])  # read back, so the device has finished
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        print(f"  step {len(times)}: {times[-1]:.2f} s, loss {losses[-1]:.3f}", flush=True)
    if profile:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as traced

        with traced(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            trainer.step()
            torch.cuda.synchronize()
        order = {"sort_by": "self_cuda_time_total", "row_limit": 60}
        profile.write_text(trace.key_averages().table(**order))
    seconds = sorted(times[2:])[len(times[2:]) // 2]
    return {
        "parameters": model.num_parameters(), "first_seconds": times[0], "step_seconds": seconds,
        "tokens_per_second": ROWS * length / seconds, "gib": torch.cuda.max_memory_allocated() / 2**30,
        "losses": losses, "forms": forms_used(),
    }  # fmt: skip


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study")
    parser.add_argument("scale")
    parser.add_argument("rows", nargs="+", help="rows of the study")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="tables of kernels, a file a row")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch can use")
    for cell in expand(load_study(given.study), given.scale, rows=given.rows):
        print(cell.row, flush=True)
        with deterministic(0, 8):
            path = given.profile and given.profile / f"{cell.row}.txt"
            print(json.dumps(measure(cell.config, given.steps, path)), flush=True)


if __name__ == "__main__":
    main()
