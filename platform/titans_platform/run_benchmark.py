"""What a run adds to its steps: checkpoints, MLflow, Ray Train. `titans bench run`."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from titans_platform.config import RunConfig
from titans_platform.files import read_json
from titans_platform.objectives import build_objective
from titans_platform.runs.check import spec_for
from titans_platform.runs.execute import execute
from titans_platform.runs.folder import CHECKPOINTS, TIME
from titans_platform.runs.spec import Tracking
from titans_platform.tracking import open_store
from titans_platform.training import checkpoint
from titans_platform.training.loop import Hooks, Trainer, deterministic

SECOND = 1.0
"""Seconds of a step that the overhead is compared with."""


def run(cfg: RunConfig, steps: int, every: int) -> dict[str, Any]:
    """Train ``steps`` steps in a bare loop, then as a run with a checkpoint each ``every``; seconds.

    `overhead` is what a step of the run takes beside the step itself, checkpoints shared out among steps;
    `share`, that over a step of one second; `before`, what comes before the first step, `after`, what comes
    once the last checkpoint is whole; measuring is left out. Raises UsageError.
    """
    optim = cfg.optim.model_copy(update={"steps": steps})
    saved = cfg.checkpoint.model_copy(update={"every": every})
    cfg = cfg.model_copy(update={"optim": optim, "checkpoint": saved})
    with TemporaryDirectory(prefix="titans-bench-") as folder:
        root = Path(folder)
        build_objective(cfg).prepare(root)
        bare = _bare(cfg, root)
        spec = spec_for(cfg, root, tracking=Tracking(open_store(root).uri, "bench"))
        began = time.perf_counter()
        result = execute(spec)
        wall = time.perf_counter() - began
        after = time.time() - checkpoint.saved(spec.folder.path / CHECKPOINTS)[0].stat().st_mtime
        phases = (read_json(spec.folder.path / TIME) or {})["seconds"]
    loop = sum(phases.get(name, 0.0) for name in ("train", "data wait", "checkpoint", "checkpoint wait"))
    overhead = (loop - result.train_seconds) / steps
    return {
        "steps": steps,
        "checkpoints": len({*range(every, steps + 1, every), steps}),
        "bare": bare / steps,
        "step": result.train_seconds / steps,
        "overhead": overhead,
        "share": overhead / SECOND,
        "before": wall - loop - after,
        "after": after - phases["evaluate"],
        "phases": phases,
    }


def _bare(cfg: RunConfig, root: Path) -> float:
    """Seconds of all steps in a loop that reports to nobody and saves nothing."""
    objective = build_objective(cfg)
    data = objective.open(root)
    with deterministic(cfg.seed, cfg.threads):
        stream = objective.train_stream(data)
        length = cfg.data.sequence_length
        trainer = Trainer(
            objective.build_model(), cfg.optim, stream, objective=objective, sequence_length=length
        )
        began = time.perf_counter()
        trainer.run(Hooks())
        return time.perf_counter() - began
