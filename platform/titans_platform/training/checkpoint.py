"""Checkpoints: model, optimiser, position and RNG, sharded by torch.distributed.checkpoint.

A checkpoint is a folder named by its step. It is written under another name, in the background, and
renamed when it is whole. Its manifest holds a hash of every file, so that one which is damaged later is
passed over for the one before.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import async_save

from titans_platform.errors import TitansError, UsageError
from titans_platform.training.loop import Trainer
from titans_platform.training.manifest import fault, read_manifest, write_manifest
from titans_platform.training.parallel import rank
from titans_platform.training.timing import Phases

log = logging.getLogger(__name__)

KEEP = 2


class Saver:
    """Writes a trainer's checkpoints to ``folder`` while it goes on training, and keeps the last ``keep``.

    Every worker makes one and calls `save` and `finish` at the same steps; a ``with`` block finishes at its
    end. ``phases`` is told how long training stood still: "checkpoint" for the copy of the state to CPU
    memory, "checkpoint wait" for a write that was not done when the next was due, or at the end.
    """

    def __init__(self, folder: Path, trainer: Trainer, *, keep: int = KEEP, phases: Phases | None = None):
        self.folder, self.trainer, self.keep = folder, trainer, keep
        self.phases = phases or Phases()
        # the write runs beside the training: its messages must not mix with those of the steps
        self._group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._writing: tuple[Path, Future[Any]] | None = None

    def save(self, before_commit: Callable[[], object] | None = None) -> Path:
        """Copy the state and begin to write it to ``folder/step-XXXXXXXX``; the path it will have.

        ``before_commit`` is called on the first worker before the write begins: what it stores is there
        before the checkpoint counts. Raises TitansError: the write before failed.
        """
        self.finish()
        with self.phases.phase("checkpoint"):
            final = self.folder / f"step-{self.trainer.progress.step:08d}"
            if rank() == 0:
                if before_commit:
                    before_commit()
                self.folder.mkdir(parents=True, exist_ok=True)
                for cut_short in self.folder.glob(".partial-*"):
                    shutil.rmtree(cut_short, ignore_errors=True)
            if self._group:
                dist.barrier(self._group)
            self._writing = final, self._begin(final)
        return final

    def finish(self) -> None:
        """Wait for the write that is going on. Raises TitansError with its path and reason: it failed."""
        if self._writing is None:
            return
        (final, future), self._writing = self._writing, None
        with self.phases.phase("checkpoint wait"):
            try:
                future.result()
            except CheckpointException as error:
                raise TitansError(f"{final}: cannot be written: {_reason(error)}") from error

    def _begin(self, final: Path) -> Future[Any]:
        # said from the thread that writes, where a filter of this block would not hold
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        with _quiet():
            writer = _Writer(final, deepcopy(self.trainer.progress), self.keep)
            future = async_save(
                _state(self.trainer),
                storage_writer=writer,
                process_group=self._group,
                no_dist=self._group is None,
            )
        assert isinstance(future, Future)
        return future

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.finish()
        except TitansError as error:
            if kind is None:
                raise
            log.warning("checkpoint %s", error)
        finally:
            if self._group:
                dist.destroy_process_group(self._group)
                self._group = None


class _Writer(FileSystemWriter):
    """Commits a checkpoint when all its files are there, in the thread that writes them."""

    def __init__(self, final: Path, progress: Any, keep: int):
        super().__init__(_partial(final))
        self.final, self.progress, self.keep = final, progress, keep

    def finish(self, metadata: Any, results: Any) -> None:
        """Called on the first worker, after all workers have written."""
        super().finish(metadata, results)
        _commit(self.final, self.progress, self.keep)


def _commit(final: Path, progress: Any, keep: int) -> None:
    write_manifest(_partial(final), progress)
    # a run that passed over a damaged checkpoint comes to its step again
    shutil.rmtree(final, ignore_errors=True)
    os.replace(_partial(final), final)
    # later ones are damaged and will be written again; they must not push this one out
    for old in [path for path in _steps(final.parent) if path.name <= final.name][keep:]:
        shutil.rmtree(old, ignore_errors=True)


def _partial(final: Path) -> Path:
    return final.with_name(f".partial-{final.name}")


def save(
    folder: Path, trainer: Trainer, before_commit: Callable[[], object] | None = None, *, keep: int = KEEP
) -> Path:
    """Write one checkpoint and wait for it; every worker calls it. The path. Raises TitansError."""
    with Saver(folder, trainer, keep=keep) as saver:
        return saver.save(before_commit)


def newest(folder: Path) -> Path | None:
    """The latest checkpoint that is whole; one that is not is named in the log and passed over."""
    for path in _steps(folder):
        wrong = fault(path)
        if wrong is None:
            return path
        log.warning("checkpoint %s is not whole (%s); using the one before", path, wrong)
    return None


def restore(folder: Path, trainer: Trainer) -> Path | None:
    """Bring the trainer to its newest whole checkpoint; its path, or None where none was ever written.

    Every worker calls it; the first chooses. Raises UsageError: none is whole, or it is another model's.
    """
    path = _chosen(folder)
    if path is None:
        if latest := next(iter(_steps(folder)), None):
            raise UsageError(
                f"{latest}: {fault(latest)}, and no checkpoint before it is whole; delete {folder} "
                "to train from the start"
            )
        return None
    state = _state(trainer)
    _load(path, state)
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    if (own := state["rng"].get(f"rank{rank()}")) is not None:
        _set_rng(own)
    trainer.progress = read_manifest(path).progress
    return path


def _chosen(folder: Path) -> Path | None:
    if not dist.is_initialized():
        return newest(folder)
    choice = [newest(folder) if rank() == 0 else None]
    dist.broadcast_object_list(choice)
    return choice[0]


def load_model(path: Path, model: nn.Module) -> int:
    """Only the weights of the checkpoint at ``path``, into ``model``; the step. Raises UsageError."""
    if (wrong := fault(path)) is not None:
        raise UsageError(f"{path}: not a whole checkpoint: {wrong}; use another step of this run")
    state: dict[str, Any] = {"model": model.state_dict()}
    _load(path, state)
    model.load_state_dict(state["model"])
    return read_manifest(path).progress.step


def _state(trainer: Trainer) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {"model": model, "optimizer": optimizer, "rng": {f"rank{rank()}": _rng()}}


def _load(path: Path, state: dict[str, Any]) -> None:
    reader = FileSystemReader(path)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except Exception as error:  # a pickle of another version can raise anything
        raise UsageError(f"{path}: its .metadata cannot be read; delete this folder") from error
    _check_shapes(path, saved, state["model"])
    # a run that resumes with more workers has ranks whose RNG nobody saved: they keep their seed
    state["rng"] = {k: v for k, v in state.get("rng", {}).items() if f"rng.{k}.torch" in saved}
    try:
        with _quiet():
            load_sharded(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise UsageError(f"{path}: cannot be loaded: {_reason(error)}; delete this folder") from error


def _check_shapes(path: Path, saved: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    kept = {key.removeprefix("model."): entry for key, entry in saved.items() if key.startswith("model.")}
    for name in [*weights, *kept]:
        here = tuple(weights[name].shape) if name in weights else None
        there = tuple(kept[name].size) if name in kept else None
        if here != there:
            raise UsageError(
                f"{path}: {name} is {there or 'missing'} in the checkpoint and {here or 'missing'} in the "
                "model; give the config the checkpoint was made with, or another folder"
            )


def _reason(error: CheckpointException) -> str:
    failure = next(iter(error.failures.values()))[0]
    return " ".join(str(failure).split())[:200]


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


def _rng() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = np.random.get_state(legacy=False)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(_as_tuple(state["python"]))
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(v) for v in value) if isinstance(value, list | tuple) else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch.distributed's warnings about its own deprecated parts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.*")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.*")
        yield
