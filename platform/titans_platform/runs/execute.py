"""`execute`: execute a run, with its workers under Ray Train.

`titans train`, the cells of a grid, the trials of a search and the jobs of a cluster all call it, so locking,
failure records and timing are the same for all of them.
"""

from __future__ import annotations

import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from titans_kernels import forms_used
from titans_platform.config import TaskConfig, hashes_of
from titans_platform.errors import Interrupted, TitansError
from titans_platform.evals import evaluate
from titans_platform.evals.ngrams import count_text
from titans_platform.files import ignore_disk_full
from titans_platform.objectives.base import DataChanged, build_objective, run_name
from titans_platform.provenance import commit, die_with_parent, environment
from titans_platform.runs.check import check_kernels, gpu_arch, training_flops
from titans_platform.runs.folder import CHECKPOINTS, DIVERGED, Result
from titans_platform.runs.preemption import PreemptionGuard, interruptible, torch_config
from titans_platform.runs.ray_session import quiet, return_freed_memory
from titans_platform.runs.reporter import DETAILED, Reporter
from titans_platform.runs.spec import RunSpec
from titans_platform.tasks import eval_version
from titans_platform.training import checkpoint
from titans_platform.training.loop import Hooks, Trainer, deterministic
from titans_platform.training.optim import Diverged, before_decay, save_batch
from titans_platform.training.parallel import (
    all_left,
    data_shard,
    leave,
    profiled,
    rank,
    same_statistics,
    world_size,
)

MAX_FAILURES = 2
"""Number of times that Ray Train restarts workers that died."""


def execute(spec: RunSpec, wait: float = 90.0) -> Result:
    """Train and evaluate a run, from its last checkpoint if it has one. Returns the result, which is also
    written to ``result.json``.

    A finished run is not run again. With ``spec.rung`` the run stops there, with a checkpoint, and the result
    has that column alone and is not written; the next call resumes it. The data must be prepared under
    ``spec.root``; several workers need a Ray session.

    Raises:
        Busy: another process still holds the run after ``wait`` seconds.
        Interrupted: the run was interrupted; the next call resumes it.
        UsageError, Diverged: a retry would fail in the same way. The failure is recorded in the run's folder.
    """
    folder = spec.folder
    with folder.hold(wait):
        if (done := folder.result()) is not None:
            return done
        folder.begin(spec.commit)
        try:
            with interruptible(folder):
                return _fit(spec)
        except Exception as error:
            if not isinstance(error, Interrupted):
                with ignore_disk_full():
                    folder.record_failure(error, spec.commit)
            raise
        finally:
            folder.clear_interrupt()


def _fit(spec: RunSpec) -> Any:
    """Run the workers under Ray Train, a single one in this process.

    Workers that die are restarted as long as each attempt writes a new checkpoint.
    """
    quiet()
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    resources, several, storage = spec.resources, spec.resources.several, spec.root.resolve() / "ray"
    gpus = {"GPU": resources.gpus_per_worker} if resources.gpus_per_worker else {}
    failures = FailureConfig(max_failures=MAX_FAILURES)
    # in the main thread Train would install its own handler for Ctrl-C
    elsewhere = several and threading.current_thread() is threading.main_thread()
    last_start, failure = -1, None
    # a run of weeks may lose workers any number of times
    while (step := checkpoint.last_step(spec.folder.path / CHECKPOINTS)) > last_start:
        last_start = step
        trainer = TorchTrainer(
            run_worker,
            train_loop_config={"spec": spec},
            torch_config=torch_config() if several else None,
            scaling_config=ScalingConfig(
                # 0: train in this process, which saves starting another
                num_workers=resources.workers if several else 0,
                use_gpu=resources.gpus_per_worker > 0,
                resources_per_worker={"CPU": resources.cpus_per_worker} | gpus if several else None,
            ),
            run_config=RunConfig(name=spec.name, storage_path=str(storage), failure_config=failures),
        )
        try:
            outcome = (_in_thread(trainer.fit) if elsewhere else trainer.fit()).return_value
            break
        except TrainingFailedError as error:
            failure = error
            for cause in getattr(error, "worker_failures", {}).values():
                if isinstance(cause, TitansError):
                    raise cause from error
    else:
        reason = (str(failure).strip() or "unknown").splitlines()[-1].strip()
        raise TitansError(f"the workers failed: {reason}") from failure
    if isinstance(outcome, TitansError):
        # raised here, so that a run fails with the same error with one worker or several
        raise outcome
    # Ray's own state for restarts; of no use once the run is finished
    shutil.rmtree(storage / spec.name, ignore_errors=True)
    return outcome


def _in_thread(call: Callable[[], Any]) -> Any:
    """Call in a daemon thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="train").start()
    return future.result()


def run_worker(task: dict[str, Any]) -> Result | TitansError | None:
    """Train in a worker of Ray Train.

    Train retries what is raised, so errors that a retry would repeat are returned. An error that only this
    worker has is raised if the others have not ended too: Train then ends them, as they wait in a collective.
    """
    from ray.train.torch import get_device

    spec: RunSpec = task["spec"]
    if spec.resources.several:
        die_with_parent()
    try:
        return Worker(spec, get_device()).run()
    except TitansError as error:
        if not spec.resources.several or all_left():
            return error
        raise


class Worker:
    """One rank of a run. In a process group every rank creates one and calls `run`; rank 0 writes."""

    def __init__(self, spec: RunSpec, device: torch.device | str = "cpu"):
        self.spec, self.cfg, self.device = spec, spec.config, device
        self.objective = build_objective(spec.config)
        self.data = self.objective.reopen(spec.root, spec.data)
        # a cell may have waited for hours since it was named
        named = run_name(self.cfg, spec.data, spec.resources.hashed_workers)
        if "study" in spec.labels and named != spec.name:
            why = "a file of its tasks, of a class of your own or of start_from has changed"
            raise DataChanged(f"run {spec.name}: {why}; run the command again")
        if rank() == 0:
            spec.folder.keep_data(self.data, hashes_of(self.cfg.eval.model_dump(mode="json")))
        self.reporter = Reporter(spec) if rank() == 0 else None

    def run(self) -> Result | None:
        """Train and evaluate, resuming from the last checkpoint; None on ranks but 0.

        Raises UsageError, Diverged.
        """
        forms_used(forget=True)
        return_freed_memory()
        # with the graphs of more than eight models in a process, torch.compile would run blocks eagerly
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        peak_rss(reset=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            with ExitStack() as at_end, deterministic(self.cfg.seed, self.cfg.threads):
                # leave first: reporting an error may wait for MLflow longer than other ranks wait for this
                at_end.callback(leave)
                trainer = self._train()
                return self._at_rung(trainer, *self.spec.rung) if self.spec.rung else self._finish(trainer)
        except BaseException as error:
            if self.reporter:
                self.reporter.fail(error)
            raise
        finally:
            if self.reporter:
                with ignore_disk_full():
                    self.spec.folder.record_attempt()

    def _train(self) -> Trainer:
        cfg, rung, folder = self.cfg, self.spec.rung, self.spec.folder.path / CHECKPOINTS
        self.objective.check(self.data)
        if arch := gpu_arch(self.device):
            check_kernels(cfg, arch)
        stream = self.data.train_stream(cfg, *data_shard(cfg.optim))
        model, length = self.objective.build_model(), cfg.data.sequence_length
        trainer = Trainer(
            model, cfg.optim, stream, self.device, self.objective, sequence_length=length, seed=cfg.seed
        )
        if checkpoint.restore(folder, trainer) is None:
            if start := self.spec.start:
                checkpoint.restore_from(start, trainer)
                # none of this run's last twentieth is done
                trainer.progress.tail_loss, trainer.progress.tail_steps = 0.0, 0
            elif cfg.start_from:
                checkpoint.load_model(Path(cfg.start_from), trainer.model)
        if not (worlds := trainer.progress.worlds) or worlds[-1][1] != world_size():
            worlds.append([trainer.progress.step, world_size()])
        if self.reporter:
            self.reporter.start(trainer.progress.step)
        saver = checkpoint.Saver(folder, trainer, keep=cfg.checkpoint.keep, pinned=before_decay(cfg.optim))
        if trainer.device.type == "cuda" and (flops := training_flops(cfg)):
            trainer.flops_per_token = flops / cfg.row_tokens
        trace = self.spec.trace.with_name(f"worker-{rank()}.json.gz")
        watched = profiled(trace) if self.spec.profile else nullcontext(lambda: None)
        with saver, watched as stepped:
            trainer.run(self._hooks(saver, trainer, stepped), rung[0] if rung else None)
        return trainer

    def _hooks(self, saver: checkpoint.Saver, trainer: Trainer, stepped: Callable[[], None]) -> Hooks:
        reporter, cfg = self.reporter, self.cfg
        guard = PreemptionGuard(self.spec.folder, self.spec.resources.several)
        # the log up to a checkpoint is durable before the checkpoint is committed
        flush = reporter.journal.sync if reporter else None

        def on_step(step: int, metrics: dict[str, float]) -> None:
            if reporter:
                # cumulative, because only a sample of the steps is logged
                reporter.on_step(step, metrics | {"checkpoint_wait_seconds": saver.waited})
            stepped()
            guard.poll(saver, flush)

        def on_divergence(batch: Any, error: Diverged) -> str:
            folder = self.spec.folder.path / DIVERGED
            return save_batch(folder, batch, trainer.progress.step + 1, rank(), error)

        def on_checkpoint() -> None:
            saver.save(flush)
            if cfg.eval.at == "best" and trainer.progress.best_step == trainer.progress.step:
                # the result needs it, and a later one replaces the best before it
                saver.finish()

        return Hooks(
            on_step=on_step,
            on_checkpoint=on_checkpoint,
            on_divergence=on_divergence,
            validate=lambda: self._validation_loss(trainer),
            checkpoint_every=cfg.checkpoint.every or min(500, max(1, cfg.optim.steps // 10)),
            checkpoint_at=saver.pinned,
            checkpoint_best=cfg.checkpoint.best,
            validate_every=cfg.eval.every or 0,
            patience=cfg.eval.patience or 0,
            telemetry_every=max(1, cfg.optim.steps // DETAILED),
        )

    def _measure(self, trainer: Trainer, columns: Mapping[str, Any], floors: bool = False) -> dict[str, Any]:
        """Evaluate these columns. Collective: every worker gets the same values."""
        same_statistics(trainer.model)
        config = self.cfg.eval.model_copy(update={"columns": columns})
        length, precision = self.cfg.data.sequence_length, self.cfg.optim.precision
        options = {"device": trainer.device, "precision": precision}
        if floors:
            options["ngrams"] = partial(count_text, self.data, self.cfg)
        return evaluate(trainer.model, self.data, config, length, **options)

    def _validation_loss(self, trainer: Trainer) -> float:
        """Return the loss on held-out rows."""
        task = TaskConfig(task=str(self.objective.validation_task))
        return self._measure(trainer, {"validation": (task,)})["columns"]["validation"]

    def _at_rung(self, trainer: Trainer, step: int, column: str) -> Result:
        columns = self._measure(trainer, {column: self.cfg.eval.columns[column]})["columns"]
        if self.reporter:
            self.reporter.reached(step, columns)
        return Result(cell=self.spec.name, columns=columns)

    def _finish(self, trainer: Trainer) -> Result | None:
        started = time.perf_counter()
        if self.reporter:
            self.reporter.phase("evaluate")
        if self.cfg.eval.at == "best" and (best := trainer.progress.best_step):
            point = checkpoint.at_step(self.spec.folder.path / CHECKPOINTS, best)
            checkpoint.load_model(point, trainer.model)
        measured = self._measure(trainer, self.cfg.eval.columns, floors=True)
        if not self.reporter:
            return None
        model, progress, cfg = trainer.model, trainer.progress, self.cfg
        result = Result(
            cell=self.spec.name,
            seed=cfg.seed,
            config=cfg.model_dump(mode="json"),
            data_fingerprint=self.data.fingerprint,
            eval_version=eval_version(cfg.eval),
            # the commit of the driver that started the run: the working tree may have changed since
            commit=self.spec.folder.commit() or commit(),
            environment=environment(),
            # only those used in the process that finished the run
            forms=forms_used(),
            **measured,
            parameters=model.num_parameters(),
            state_bytes=model.state_bytes(cfg.data.sequence_length),
            peak_rss_bytes=peak_rss(),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            train_seconds=progress.seconds,
            eval_seconds=time.perf_counter() - started,
            tokens=progress.step * trainer.tokens_per_step,
            final_train_loss=progress.final_loss,
            telemetry=progress.telemetry,
            best_validation_loss=progress.best_loss if progress.best_step else None,
            best_step=progress.best_step or None,
            world_sizes=progress.worlds,
            mlflow_run_id=self.reporter.journal.run_id,
            study=self.spec.labels.get("study", ""),
            row=self.spec.labels.get("row", ""),
        )
        self.reporter.finish(result)
        return result


def peak_rss(reset: bool = False) -> int:
    """Peak resident memory of this process since the last ``reset``, in bytes.

    Resetting needs Linux; elsewhere it is the peak over the life of the process.
    """
    if sys.platform != "linux":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
    if reset:
        # not permitted in some containers; the peak is then over the life of the process
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
