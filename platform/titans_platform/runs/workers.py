"""The same cell under Ray Train: in this process, or on several workers that Ray starts again if they die."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titans_platform.config import RunConfig
from titans_platform.errors import TitansError, UsageError
from titans_platform.runs.execute import Rung, Tracked, run_cell

# how often the controller looks after its workers; small runs would do little but wait for its default of 2 s
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")


@dataclass(frozen=True)
class Resources:
    """What a cell is trained on. ``workers`` 0: one, in this process, without a cluster."""

    workers: int = 0
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    max_failures: int = 2
    """Times that workers which died are started again; each goes on from the last checkpoint."""


def fit(
    cfg: RunConfig,
    root: Path,
    name: str,
    resources: Resources = Resources(),
    *,
    extra: Mapping[str, Any] | None = None,
    tracked: Tracked | None = None,
    rung: Rung | None = None,
    checkpoint_every: int | None = None,
) -> dict[str, Any]:
    """Run the cell called ``name`` under Ray Train; its result, or at a ``rung`` its column there.

    Data must be prepared under ``root``. With workers a cluster must be there (`ray.init`), and ``root`` be
    one folder to all of them.
    Raises TitansError: UsageError and Diverged as ``run_cell`` does, or what ended the workers.
    """
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as TrainRunConfig
    from ray.train.torch import TorchTrainer

    root = root.resolve()
    task = {
        "cfg": cfg.model_dump_json(),
        "root": str(root),
        "name": name,
        "extra": dict(extra or {}),
        "tracked": (tracked.uri, tracked.run_id) if tracked else None,
        "rung": (rung.step, rung.column) if rung else None,
        "checkpoint_every": checkpoint_every,
    }
    quiet()
    trainer = TorchTrainer(
        _worker,
        train_loop_config=task,
        scaling_config=ScalingConfig(
            num_workers=resources.workers,
            use_gpu=resources.gpus_per_worker > 0,
            resources_per_worker=_per_worker(resources),
        ),
        run_config=TrainRunConfig(
            name=name,
            storage_path=str(root / "ray"),
            failure_config=FailureConfig(max_failures=resources.max_failures),
        ),
    )
    result = _outcome(trainer)
    # what Ray keeps of a run in order to start it again is of no use once it is finished
    shutil.rmtree(root / "ray" / name, ignore_errors=True)
    return result


def _per_worker(resources: Resources) -> dict[str, float] | None:
    if not resources.workers:
        return None
    gpus = {"GPU": resources.gpus_per_worker} if resources.gpus_per_worker else {}
    return {"CPU": resources.cpus_per_worker} | gpus


def _outcome(trainer: Any) -> dict[str, Any]:
    from ray.train import TrainingFailedError

    try:
        outcome = trainer.fit().return_value
    except TrainingFailedError as error:
        reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), "unknown")
        raise TitansError(f"the workers failed: {reason.strip()}") from error
    if "refused" in outcome:
        # raised anew, so that every way of running ends in the same error
        kind = UsageError if outcome["usage"] else TitansError
        raise kind(outcome["refused"])
    return outcome["result"]


def _worker(task: dict[str, Any]) -> dict[str, Any]:
    """What each worker runs. What another try would only repeat is returned: Ray retries what is raised."""
    from ray.train.torch import get_device

    try:
        result = run_cell(
            RunConfig.model_validate_json(task["cfg"]),
            Path(task["root"]),
            task["name"],
            extra=task["extra"],
            tracked=Tracked(*task["tracked"]) if task["tracked"] else None,
            rung=Rung(*task["rung"]) if task["rung"] else None,
            checkpoint_every=task["checkpoint_every"],
            device=get_device(),
        )
    except TitansError as error:
        return {"refused": str(error), "usage": isinstance(error, UsageError)}
    return {"result": result}


def quiet() -> None:
    """Turn Ray's chatter off in this process."""
    for name in ("ray", "ray.train", "ray.tune", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
