"""`execute`: the one way a run is run, whoever asks for it; and what each of its workers does.

`titans train`, a cell of a grid, a trial of a search and a job on a cluster all come here: one lock, one
record of failures, one account of time.
"""

from __future__ import annotations

import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch

from titans_core import Model
from titans_kernels import forms_used
from titans_platform.errors import Interrupted, TitansError
from titans_platform.files import ignore_disk_full
from titans_platform.objectives import build_objective
from titans_platform.provenance import commit, environment
from titans_platform.runs.cost import training_flops
from titans_platform.runs.folder import CHECKPOINTS, DIVERGED
from titans_platform.runs.notice import Notice, interruptible, listening
from titans_platform.runs.ray_session import die_with_parent, quiet
from titans_platform.runs.reporter import Reporter
from titans_platform.runs.result import Result
from titans_platform.runs.spec import Rung, RunSpec
from titans_platform.training import checkpoint
from titans_platform.training.divergence import Diverged, save_batch
from titans_platform.training.loop import Hooks, Phases, Trainer, deterministic
from titans_platform.training.parallel import rank, world_size
from titans_platform.training.rates import before_decay
from titans_platform.training.speed import profiled

MAX_FAILURES = 2
"""Times that workers which died are started again without having come to a further checkpoint."""
# optimiser steps of a run at which the inner memory's telemetry is recorded
_WATCHED = 50


class WorkersFailed(TitansError):
    """The workers died once more than MAX_FAILURES."""


class Outcome(NamedTuple):
    """The result of a run, or at a rung {column: value}; and its seconds by phase."""

    result: Result | dict[str, float]
    seconds: dict[str, float]


@overload
def execute(spec: RunSpec, until: None = None, wait: float = 90.0) -> Result: ...
@overload
def execute(spec: RunSpec, until: Rung, wait: float = 90.0) -> Result | dict[str, float]: ...
def execute(spec: RunSpec, until: Rung | None = None, wait: float = 90.0) -> Result | dict[str, float]:
    """Train and evaluate a run from where it stopped; its result, also in ``result.json``.

    A finished run is not run again. With ``until`` the run stops there, at a checkpoint, and what is returned
    is {column: value}; the next call goes on. Its data must be prepared under ``spec.root``; several workers
    need a Ray session.

    Raises:
        Busy: another process still works on the run after ``wait`` seconds.
        Interrupted: the run was asked to end, and the next call goes on.
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
            with interruptible(folder):
                outcome = _fit(spec, until)
            seconds = outcome.seconds
        except Interrupted:
            raise
        except Exception as error:
            with ignore_disk_full():
                folder.record_failure(error, spec.commit)
            raise
        finally:
            folder.has_ended()
            with ignore_disk_full():
                folder.record_time(began, seconds)
        folder.drop_stale()
        return outcome.result


def kept_steps(spec: RunSpec) -> int:
    """The step of the run's newest checkpoint, whole or not; 0 where there is none."""
    return next(map(checkpoint.step_of, checkpoint.saved(spec.folder.path / CHECKPOINTS)), 0)


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

    resources, storage = spec.resources, spec.root.resolve() / "ray"
    gpus = {"GPU": resources.gpus_per_worker} if resources.gpus_per_worker else {}
    several = resources.most > 1

    def fit() -> Outcome:
        trainer = TorchTrainer(
            _worker,
            train_loop_config={"spec": spec, "until": until},
            torch_config=listening() if several else None,
            scaling_config=ScalingConfig(
                # 0: this process; another one for a single worker would only cost its start
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
        return _outcome(trainer)

    def fit_through_deaths() -> Outcome:
        # weeks may see any number of them
        while True:
            kept = kept_steps(spec)
            try:
                return fit()
            except WorkersFailed:
                if kept_steps(spec) <= kept:
                    raise

    in_main = threading.current_thread() is threading.main_thread()
    outcome = _in_thread(fit_through_deaths) if several and in_main else fit_through_deaths()
    # what Ray keeps of a run in order to start it again is of no use once it is finished
    shutil.rmtree(storage / spec.name, ignore_errors=True)
    return outcome


def _in_thread(call: Callable[[], Outcome]) -> Outcome:
    """Run ``call`` beside the main thread, where Train puts no handler of its own on Ctrl-C."""
    future: Future[Outcome] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="train").start()
    return future.result()


def _outcome(trainer: Any) -> Outcome:
    from ray.train import TrainingFailedError

    try:
        outcome = trainer.fit().return_value
    except TrainingFailedError as error:
        reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), "unknown")
        raise WorkersFailed(f"the workers failed: {reason.strip()}") from error
    if isinstance(outcome, TitansError):
        # raised anew, so that every way of running ends in the same error
        raise outcome
    return outcome


def _worker(task: dict[str, Any]) -> Outcome | TitansError:
    """What each worker runs. Ray retries what is raised, so what another try would repeat is returned."""
    from ray.train.torch import get_device

    spec: RunSpec = task["spec"]
    if spec.resources.most > 1:
        die_with_parent()
    try:
        return work(spec, task["until"], get_device())
    except TitansError as error:
        return error


def work(spec: RunSpec, until: Rung | None = None, device: torch.device | str = "cpu") -> Outcome:
    """Train and evaluate, from the last checkpoint on.

    In a process group every rank calls this and evaluates; rank 0 writes. Raises UsageError, Diverged.
    """
    return _Worker(spec, device).run(until)


class _Worker:
    """One rank of a run."""

    def __init__(self, spec: RunSpec, device: torch.device | str):
        self.spec, self.cfg, self.device = spec, spec.config, device
        self.phases = Phases()
        with self.phases.phase("data"):
            self.objective = build_objective(self.cfg)
            self.data = self.objective.open(spec.root)
        with self.phases.phase("record"):
            made_of = self.objective.inputs(self.data)
            self.reporter = Reporter(spec, made_of) if rank() == 0 else None

    def run(self, until: Rung | None) -> Outcome:
        forms_used(forget=True)
        peak_rss(reset=True)
        try:
            with deterministic(self.cfg.seed, self.cfg.threads):
                trainer = self._trained(until)
                result = self._at_rung(trainer, until) if until else self._finished(trainer)
        except BaseException as error:
            if self.reporter:
                self.reporter.fail(error)
            raise
        return Outcome(result, dict(self.phases.seconds))

    def _trained(self, until: Rung | None) -> Trainer:
        with self.phases.phase("build"):
            self.objective.check(self.data)
            stream = self.objective.train_stream(self.data, rank(), world_size())
            trainer = Trainer(
                self.objective.build_model(),
                self.cfg.optim,
                stream,
                self.device,
                self.objective,
                sequence_length=self.cfg.data.sequence_length,
            )
        checkpoints = self.spec.folder.path / CHECKPOINTS
        with self.phases.phase("checkpoint"):
            restored = checkpoint.restore(checkpoints, trainer)
            if restored is None and self.cfg.start_from:
                checkpoint.load_model(Path(self.cfg.start_from), trainer.model)
        _note_world(trainer)
        if self.reporter:
            self.reporter.start(trainer.progress.step)
        keep, pinned = self.cfg.checkpoint.keep, before_decay(self.cfg.optim)
        # a run that may go back keeps those that any other attempt at it would have
        every = self.cfg.checkpoint_interval if self.cfg.optim.on_divergence == "rewind" else 1
        saver = checkpoint.Saver(
            checkpoints, trainer, keep=keep, every=every, pinned=pinned, phases=self.phases
        )
        if trainer.device.type == "cuda" and (flops := training_flops(self.cfg)):
            trainer.flops_per_token = flops / self.cfg.row_tokens
        trace = self.spec.trace.with_name(f"worker-{rank()}.json.gz")
        watched = profiled(trace) if self.spec.profile else nullcontext(lambda: None)
        with self.phases.phase("train"), saver, watched as stepped:
            trainer.run(self._hooks(saver, trainer, stepped), until.step if until else None)
        return trainer

    def _hooks(self, saver: checkpoint.Saver, trainer: Trainer, stepped: Callable[[], None]) -> Hooks:
        reporter, model = self.reporter, trainer.model
        assert isinstance(model, Model)
        notice = Notice(self.spec.folder, self.spec.resources.most > 1)
        # what a checkpoint covers is kept for MLflow before the checkpoint counts
        flush = reporter.flush if reporter else None

        def on_step(step: int, metrics: dict[str, float]) -> None:
            if reporter:
                # so far: the steps of which one waited are seldom those that are logged
                waited = self.phases.seconds["checkpoint wait"]
                reporter.on_step(step, metrics | {"checkpoint_wait_seconds": waited})
            stepped()
            notice.look(saver, flush)

        return Hooks(
            on_step=on_step,
            on_checkpoint=lambda: saver.save(flush),
            on_divergence=self._keep_batch(trainer),
            rewind=lambda: self._rewind(saver, trainer),
            validate=lambda: self.objective.validation_loss(model, self.data, trainer.device),
            checkpoint_every=self.cfg.checkpoint_interval,
            checkpoint_at=saver.pinned,
            checkpoint_best=self.cfg.checkpoint.best,
            validate_every=self.cfg.eval.every or 0,
            patience=self.cfg.eval.patience or 0,
            telemetry_every=max(1, self.cfg.optim.steps // _WATCHED),
            phases=self.phases,
        )

    def _keep_batch(self, trainer: Trainer) -> Callable[[Any, Diverged], str]:
        folder = self.spec.folder.path / DIVERGED
        return lambda batch, error: save_batch(folder, batch, trainer.progress.step + 1, rank(), error)

    def _rewind(self, saver: checkpoint.Saver, trainer: Trainer) -> bool:
        """Back to the last checkpoint that was due; whether there is one."""
        saver.finish()
        found = checkpoint.rewind(saver.folder, trainer, saver.every)
        _note_world(trainer)
        return found is not None

    def _measure(self, trainer: Trainer, *columns: str) -> dict[str, Any]:
        """These columns, all if none is given."""
        assert isinstance(trainer.model, Model)
        return self.objective.evaluate(trainer.model, self.data, columns, device=trainer.device)

    def _at_rung(self, trainer: Trainer, rung: Rung) -> dict[str, float]:
        measured = self._measure(trainer, rung.column)
        return self.reporter.reached(rung, measured["columns"]) if self.reporter else {}

    def _finished(self, trainer: Trainer) -> Result | dict[str, float]:
        started = time.perf_counter()
        if self.reporter:
            self.reporter.phase("evaluate")
        if self.cfg.eval.at == "best" and (best := trainer.progress.best_step):
            point = checkpoint.at_step(self.spec.folder.path / CHECKPOINTS, best)
            with self.phases.phase("checkpoint"):
                checkpoint.load_model(point, trainer.model)
        with self.phases.phase("evaluate"):
            measured = self._measure(trainer)
        if not self.reporter:
            return {}
        result = self._result(trainer, measured, time.perf_counter() - started)
        with self.phases.phase("record"):
            self.reporter.finish(result)
        return result

    def _result(self, trainer: Trainer, measured: dict[str, Any], eval_seconds: float) -> Result:
        """All that is kept of the run: numbers, and what they are a function of."""
        model, progress, cfg = trainer.model, trainer.progress, self.cfg
        assert isinstance(model, Model)
        assert self.reporter
        return Result(
            cell=self.spec.name,
            seed=cfg.seed,
            config=cfg.model_dump(mode="json"),
            data_fingerprint=self.data.fingerprint,
            eval_version=self.objective.eval_version(),
            # of the driver that began it: the tree may have moved on since
            commit=self.spec.folder.commit() or commit(),
            environment=environment(),
            # of the operators, in the process that finished the run
            forms=forms_used(),
            **measured,
            parameters=model.num_parameters(),
            state_bytes=model.state_bytes(cfg.data.sequence_length),
            peak_rss_bytes=peak_rss(),
            train_seconds=progress.seconds,
            eval_seconds=eval_seconds,
            tokens=progress.step * trainer.tokens_per_step,
            final_train_loss=progress.final_loss,
            telemetry=progress.telemetry,
            best_validation_loss=progress.best_loss,
            best_step=progress.best_step,
            batches_left_out=progress.offset,
            rewinds=progress.rewinds,
            world_sizes=progress.worlds,
            mlflow_run_id=self.reporter.run_id,
            study=self.spec.labels.get("study", ""),
            row=self.spec.labels.get("row", ""),
        )


def peak_rss(reset: bool = False) -> int:
    """The most memory (resident set size) this process held since the last ``reset``, in bytes.

    Resetting needs Linux; elsewhere it is the peak over the life of the process.
    """
    if sys.platform != "linux":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
    if reset:
        # some containers do not allow it; then the peak is that of the process
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _note_world(trainer: Trainer) -> None:
    """Write down from which step on so many workers train."""
    worlds, size = trainer.progress.worlds, world_size()
    if not worlds or worlds[-1][1] != size:
        worlds.append([trainer.progress.step, size])
