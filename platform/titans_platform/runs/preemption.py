"""Interruption and preemption: a run that must stop writes a checkpoint first.

There are three signals. A driver that receives Ctrl-C or SIGTERM writes a file to the folder of each run; a
worker process that receives SIGTERM, e.g. from Slurm or Kubernetes, sets a flag; Ray announces that a node is
about to be preempted. All workers of a run poll together at the end of each step, so they stop at the same
step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from titans_platform.errors import Interrupted
from titans_platform.runs.folder import RunFolder
from titans_platform.training.checkpoint import Saver
from titans_platform.training.parallel import rank

GRACE = 60.0
"""Seconds that a run has to finish its step and write a checkpoint."""
ASK_EVERY = 5.0
"""Seconds between polls of Ray for a node that is about to be preempted."""
_ASK_RAY, _PREEMPTED, _INTERRUPTED = 1, 2, 3
_terminated = threading.Event()


class Preempted(Exception):
    """A worker was preempted. The run has not failed: Ray restarts its workers."""


class PreemptionGuard:
    """Stops one worker at a checkpoint; ``several``: the worker is one of several under Ray Train."""

    def __init__(self, folder: RunFolder, several: bool):
        self._folder, self._several, self._saved = folder, several, False
        self._asked = time.monotonic()

    def poll(self, saver: Saver, before_commit: Callable[[], object] | None) -> None:
        """Write a checkpoint and raise if any worker has to stop; call it at the end of a step.

        A collective: all workers must call it at the same steps. Raises Interrupted if a user or driver has
        interrupted the run, Preempted if a worker or node is being taken away.
        """
        reason = saver.max_over_ranks(self._reason())
        if not reason or (reason == _ASK_RAY and not self._preempted()):
            return
        saver.save(before_commit)
        saver.finish()
        step = saver.trainer.progress.step
        if reason == _INTERRUPTED:
            where = f"after step {step}, at a checkpoint"
            raise Interrupted(f"interrupted {where}; run the same command to resume")
        if reason == _PREEMPTED:
            raise Preempted(f"preempted; the checkpoint of step {step} is written")

    def _reason(self) -> int:
        if rank() == 0 and self._folder.interrupt_requested():
            return _INTERRUPTED
        if _terminated.is_set():
            return _PREEMPTED
        due = time.monotonic() - self._asked >= ASK_EVERY
        return _ASK_RAY if due and rank() == 0 and self._several and not self._saved else 0

    def _preempted(self) -> bool:
        """Return True if Ray is about to preempt a node of this run. All workers must call it."""
        from ray.train import get_preemption_info

        self._saved = get_preemption_info() is not None
        # the answer comes from an actor, which takes milliseconds
        self._asked = time.monotonic()
        return self._saved


def install_handlers() -> None:
    """Handle SIGTERM in a worker process: the first one sets a flag, a second one ends the process."""

    def request_end(signum: int, frame: Any) -> None:
        _terminated.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, request_end)


def torch_config() -> Any:
    """Ray Train's `TorchConfig`, with `install_handlers` called in the main thread of each worker."""
    from ray.train.torch import TorchConfig

    class Backend(TorchConfig().backend_cls):  # type: ignore[misc]
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            super().on_start(worker_group, backend_config)
            worker_group.execute(install_handlers)

    class Config(TorchConfig):
        @property
        def backend_cls(self) -> Any:
            return Backend

    return Config()


@contextmanager
def interruptible(folder: RunFolder) -> Iterator[None]:
    """Stop the run at a checkpoint on the first Ctrl-C or SIGTERM within the block.

    A second signal, or GRACE seconds after the first, raises KeyboardInterrupt. Has no effect outside the
    main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timer = threading.Timer(GRACE, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True

    def at_once(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def first(signum: int, frame: Any) -> None:
        for number in before:
            signal.signal(number, at_once)
        if not folder.request_interrupt():
            raise KeyboardInterrupt
        timer.start()
        # not print: the interrupted code may hold the lock of the stream
        os.write(2, b"\nsaving a checkpoint after this step; press Ctrl-C again to stop at once\n")

    before = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_checkpoints(folders: Sequence[RunFolder]) -> None:
    """Ask all running runs to stop at a checkpoint, and wait up to GRACE seconds until they have."""
    interrupted = [folder for folder in folders if folder.is_held() and folder.request_interrupt()]
    deadline = time.monotonic() + GRACE
    while any(f.interrupt_requested() and f.is_held() for f in interrupted) and time.monotonic() < deadline:
        time.sleep(0.1)
