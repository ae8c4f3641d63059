"""`execute`: the one way a run is run, whoever asks for it.

`titans train`, a cell of a grid, a trial of a search and a job on a cluster all come here: one lock, one
record of failures, one account of time.
"""

from __future__ import annotations

import shutil
import time
from typing import Any

from titans_platform.errors import TitansError
from titans_platform.runs.ray_session import die_with_parent, quiet
from titans_platform.runs.resources import Resources
from titans_platform.runs.spec import Rung, RunSpec
from titans_platform.runs.worker import Outcome, work

MAX_FAILURES = 2
"""Times that workers which died are started again; each goes on from the last checkpoint."""


def execute(spec: RunSpec, until: Rung | None = None, wait: float = 90.0) -> dict[str, Any]:
    """Train and evaluate a run from where it stopped; its result, also in ``result.json``.

    A finished run is not run again. With ``until`` the run stops there, at a checkpoint, and what is returned
    is {column: value}; the next call goes on. Its data must be prepared under ``spec.root``; several workers
    need a Ray session.

    Raises:
        Busy: another process still works on the run after ``wait`` seconds.
        UsageError, Diverged: another try would end the same way. Whatever ends a run is kept in its folder.
    """
    folder = spec.folder
    with folder.hold(wait):
        if (done := folder.result()) is not None:
            return done
        began, seconds = time.time(), {}
        if folder.begin(spec.commit) and spec.tracking:
            _discard_log(spec)
        try:
            outcome = _fit(spec, until)
            seconds = outcome.seconds
        except Exception as error:
            folder.record_failure(error, spec.commit)
            raise
        finally:
            folder.record_time(began, seconds)
        folder.drop_stale()
        return outcome.result


def _discard_log(spec: RunSpec) -> None:
    """The run is made again from nothing by other code: so is its log."""
    from titans_platform.tracking import open_store

    assert spec.tracking
    open_store(spec.tracking.uri).discard_cell(spec.name)


def _fit(spec: RunSpec, until: Rung | None) -> Outcome:
    """The run under Ray Train: in this process, or on several workers that are started again if they die."""
    quiet()
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    resources = spec.resources
    storage = spec.root.resolve() / "ray"
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"spec": spec, "until": until},
        scaling_config=ScalingConfig(
            # 0: this process; another one for a single worker would only cost its start
            num_workers=resources.workers if resources.workers > 1 else 0,
            use_gpu=resources.gpus_per_worker > 0,
            resources_per_worker=_per_worker(resources),
        ),
        run_config=RunConfig(
            name=spec.name,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=MAX_FAILURES),
        ),
    )
    outcome = _outcome(trainer)
    # what Ray keeps of a run in order to start it again is of no use once it is finished
    shutil.rmtree(storage / spec.name, ignore_errors=True)
    return outcome


def _per_worker(resources: Resources) -> dict[str, float] | None:
    if resources.workers == 1:
        return None
    gpus = {"GPU": resources.gpus_per_worker} if resources.gpus_per_worker else {}
    return {"CPU": resources.cpus_per_worker} | gpus


def _outcome(trainer: Any) -> Outcome:
    from ray.train import TrainingFailedError

    try:
        outcome = trainer.fit().return_value
    except TrainingFailedError as error:
        reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), "unknown")
        raise TitansError(f"the workers failed: {reason.strip()}") from error
    if isinstance(outcome, TitansError):
        # raised anew, so that every way of running ends in the same error
        raise outcome
    return outcome


def _worker(task: dict[str, Any]) -> Outcome | TitansError:
    """What each worker runs. Ray retries what is raised, so what another try would repeat is returned."""
    from ray.train.torch import get_device

    spec: RunSpec = task["spec"]
    if spec.resources.workers > 1:
        die_with_parent()
    try:
        return work(spec, task["until"], get_device())
    except TitansError as error:
        return error
