"""How a run that has to end writes a checkpoint first: who says so, and how its workers find out.

A driver that gets Ctrl-C or SIGTERM puts a file into the folder of each run; a worker process that gets
SIGTERM, as from Slurm or Kubernetes, remembers it; Ray tells of nodes that are about to be taken away. The
workers of a run look together at the end of each step, so that all of them stop at the same one.
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
"""Seconds a run has to come to the end of its step and write a checkpoint."""
ASK_EVERY = 5.0
"""Seconds between two questions to Ray, whether a node is about to be taken away."""
_ASK_RAY, _PREEMPTED, _INTERRUPTED = 1, 2, 3
_terminated = threading.Event()


class Preempted(Exception):
    """A worker's process was told to end. Not a fault of the run: Ray starts its workers again."""


class PreemptionGuard:
    """One worker's part in ending at a checkpoint; ``several``: it is one of Ray's."""

    def __init__(self, folder: RunFolder, several: bool):
        self._folder, self._several, self._saved = folder, several, False
        self._asked = time.monotonic()

    def poll(self, saver: Saver, before_commit: Callable[[], object] | None) -> None:
        """At the end of a step: where any worker has been told to end, write a checkpoint, and raise.

        All workers call it at the same steps. Raises Interrupted: the run was asked to end; Preempted.
        """
        told = saver.max_over_ranks(self._told())
        if not told or (told == _ASK_RAY and not self._preempted()):
            return
        saver.save(before_commit)
        saver.finish()
        step = saver.trainer.progress.step
        if told == _INTERRUPTED:
            raise Interrupted(f"interrupted after step {step}, at a checkpoint; the same command goes on")
        if told == _PREEMPTED:
            raise Preempted(f"told to end; the checkpoint of step {step} is written")

    def _told(self) -> int:
        if rank() == 0 and self._folder.interrupt_requested():
            return _INTERRUPTED
        if _terminated.is_set():
            return _PREEMPTED
        due = time.monotonic() - self._asked >= ASK_EVERY
        return _ASK_RAY if due and rank() == 0 and self._several and not self._saved else 0

    def _preempted(self) -> bool:
        """Whether Ray knows that a node of this run is about to be taken away; the workers ask together."""
        from ray.train import get_preemption_info

        self._saved = get_preemption_info() is not None
        # the answer comes by way of an actor, which takes milliseconds
        self._asked = time.monotonic()
        return self._saved


def install_handlers() -> None:
    """In a worker process: the first SIGTERM is remembered, a second one ends it."""

    def told(signum: int, frame: Any) -> None:
        _terminated.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, told)


def torch_config() -> Any:
    """Train's settings for torch, with `install_handlers` called in the main thread of each worker."""
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
    """In the main thread: the first Ctrl-C or SIGTERM asks the run to end at a checkpoint.

    A second one, or GRACE seconds, end it at once with KeyboardInterrupt. In another thread nothing happens.
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
        # what is printed by others may be held by a lock at this moment
        os.write(2, b"\nending at a checkpoint; once more ends at once\n")

    before = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_checkpoints(folders: Sequence[RunFolder]) -> None:
    """Ask the runs that are being worked on to end, and wait until they have, for up to GRACE seconds."""
    asked = [folder for folder in folders if folder.is_held() and folder.request_interrupt()]
    deadline = time.monotonic() + GRACE
    while any(f.interrupt_requested() and f.is_held() for f in asked) and time.monotonic() < deadline:
        time.sleep(0.1)
