"""`execute`: execute a run, with its workers under Ray Train.

`titans train`, the cells of a grid, the trials of a search and the jobs of a cluster all call it, so locking,
failure records and timing are the same for all of them.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import overload

from titans_platform.errors import Interrupted, TitansError
from titans_platform.files import ignore_disk_full
from titans_platform.runs.folder import CHECKPOINTS
from titans_platform.runs.preemption import interruptible, torch_config
from titans_platform.runs.ray_session import quiet
from titans_platform.runs.result import Result
from titans_platform.runs.spec import Rung, RunSpec
from titans_platform.runs.worker import Outcome, run_worker
from titans_platform.training import checkpoint

MAX_FAILURES = 2
"""How many times Ray Train restarts workers that died."""


class WorkersFailed(TitansError):
    """The workers died more than MAX_FAILURES times without a new checkpoint."""


@overload
def execute(spec: RunSpec, until: None = None, wait: float = 90.0) -> Result: ...
@overload
def execute(spec: RunSpec, until: Rung, wait: float = 90.0) -> Result | dict[str, float]: ...
def execute(spec: RunSpec, until: Rung | None = None, wait: float = 90.0) -> Result | dict[str, float]:
    """Train and evaluate a run, from its last checkpoint if it has one. Returns the result, which is also
    written to ``result.json``.

    A finished run is not run again. With ``until`` the run stops at that rung, with a checkpoint, and
    {column: value} is returned; the next call resumes it. The data must be prepared under ``spec.root``;
    several workers need a Ray session.

    Raises:
        Busy: another process still holds the run after ``wait`` seconds.
        Interrupted: the run was interrupted; the next call resumes it.
        UsageError, Diverged: a retry would fail in the same way. The failure is recorded in the run's folder.
    """
    folder = spec.folder
    with folder.hold(wait):
        if (done := folder.result()) is not None:
            return done
        began, seconds = time.time(), {}
        if folder.begin(spec.commit) and spec.tracking:
            # another commit had begun the run, which starts over
            from titans_platform.tracking import open_store

            open_store(spec.tracking.uri).discard_cell(spec.name)
        # with several workers Train would install its own handler for Ctrl-C in the main thread
        elsewhere = spec.resources.several and threading.current_thread() is threading.main_thread()
        try:
            with interruptible(folder):
                outcome = _in_thread(lambda: _fit(spec, until)) if elsewhere else _fit(spec, until)
            seconds = outcome.seconds
        except Interrupted:
            raise
        except Exception as error:
            with ignore_disk_full():
                folder.record_failure(error, spec.commit)
            raise
        finally:
            folder.clear_interrupt()
            with ignore_disk_full():
                folder.record_time(began, seconds)
        folder.drop_stale()
        return outcome.result


def last_checkpoint_step(spec: RunSpec) -> int:
    """The step of the run's newest checkpoint, intact or not; 0 if there is none."""
    return next(map(checkpoint.step_of, checkpoint.saved(spec.folder.path / CHECKPOINTS)), 0)


def _fit(spec: RunSpec, until: Rung | None) -> Outcome:
    """Run the workers under Ray Train, a single one in this process; restart workers that die as long as
    each attempt writes a new checkpoint.
    """
    quiet()
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    resources, storage = spec.resources, spec.root.resolve() / "ray"
    gpus = {"GPU": resources.gpus_per_worker} if resources.gpus_per_worker else {}
    several = resources.several
    while True:
        before = last_checkpoint_step(spec)
        trainer = TorchTrainer(
            run_worker,
            train_loop_config={"spec": spec, "until": until},
            torch_config=torch_config() if several else None,
            scaling_config=ScalingConfig(
                # 0: train in this process, which saves starting another
                num_workers=resources.workers if several else 0,
                use_gpu=resources.gpus_per_worker > 0,
                resources_per_worker={"CPU": resources.cpus_per_worker} | gpus if several else None,
            ),
            run_config=RunConfig(
                name=spec.name,
                storage_path=str(storage),
                failure_config=FailureConfig(max_failures=MAX_FAILURES),
            ),
        )
        try:
            outcome = trainer.fit().return_value
            break
        except TrainingFailedError as error:
            # a run of weeks may lose workers any number of times
            if last_checkpoint_step(spec) <= before:
                lines = [line for line in str(error).splitlines() if line.strip()]
                reason = lines[-1].strip() if lines else "unknown"
                raise WorkersFailed(f"the workers failed: {reason}") from error
    if isinstance(outcome, TitansError):
        # raised here, so that a run fails with the same error with one worker or several
        raise outcome
    # Ray's own state for restarts; of no use once the run is finished
    shutil.rmtree(storage / spec.name, ignore_errors=True)
    assert isinstance(outcome, Outcome)
    return outcome


def _in_thread(call: Callable[[], Outcome]) -> Outcome:
    """Call in a daemon thread, where Train installs no signal handlers."""
    future: Future[Outcome] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="train").start()
    return future.result()
