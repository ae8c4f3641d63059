"""Measure a run's generated tasks again with a part of its model off: which part an answer came from.

python -m experiments.hybrids.pathways RUN [ROOT] [eval.items=60 ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from titans_core.interventions import Intervention, has_effect, intervene
from titans_platform.evals import evaluate
from titans_platform.runs.load import find_checkpoint, load_checkpoint, read_config
from titans_platform.tasks import GeneratedTask, build_task
from titans_platform.training.loop import deterministic

PATHWAYS = {
    "all on": Intervention(),
    "memory's output off": Intervention(memory=False),
    "attention off": Intervention(attention="off"),
    "attention cut at its window": Intervention(attention="cut"),
    "decay off": Intervention(decay=False),
}
"""Cut, attention does not cross multiples of its window: several layers reach no further than one window."""


def pathways(run: str, root: Path, overrides: list[str]) -> dict[str, dict[str, float]]:
    """Return the columns of generated tasks by part that is off, of the parts that the model has."""
    point = find_checkpoint(run, root)
    cfg = read_config(point, overrides)
    generated = {
        name: tasks
        for name, tasks in cfg.eval.columns.items()
        if all(isinstance(build_task(task), GeneratedTask) for task in tasks)
    }
    config, values = cfg.eval.model_copy(update={"columns": generated}), {}
    with deterministic(cfg.seed, cfg.threads):
        model, _, objective = load_checkpoint(point, cfg)
        data = objective.open(root)
        for part, change in PATHWAYS.items():
            if change == Intervention() or has_effect(model, change):
                with intervene(model, change):
                    values[part] = evaluate(model, data, config, cfg.data.sequence_length)["columns"]
    return values


def main(run: str, *rest: str) -> None:
    """Print a line for each part."""
    overrides = [word for word in rest if "=" in word]
    (root,) = [word for word in rest if "=" not in word] or ["titans-runs"]
    for part, columns in pathways(run, Path(root), overrides).items():
        shown = ", ".join(f"{name} {value:.3f}" for name, value in columns.items())
        print(f"{part:28} {shown}")


if __name__ == "__main__":
    main(*sys.argv[1:])
