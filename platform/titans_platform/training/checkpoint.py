"""Checkpoints: model, optimiser, progress and RNG state, sharded by torch.distributed.checkpoint.

A checkpoint is a folder named by its step. It is written asynchronously under a temporary name and renamed
when it is complete. Its manifest holds a hash of every file, so that later corruption is detected and the
checkpoint before it is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import async_save

from titans_core.memory_file import flatten_state, restore_state
from titans_core.state import ModelState
from titans_platform.errors import StorageError, TitansError, UsageError, one_line
from titans_platform.files import PATIENCE, backoff, is_transient, retry_transient
from titans_platform.training.loop import Progress, Trainer
from titans_platform.training.parallel import rank

log = logging.getLogger(__name__)
_blake = partial(hashlib.blake2b, digest_size=16)

MANIFEST = "manifest.json"
TRIES = 3
"""Minimum number of consecutive failed writes before a run stops."""


class Saver:
    """Writes a trainer's checkpoints to ``folder`` asynchronously, and keeps the last ``keep``.

    It also keeps the checkpoint of step ``pinned`` and, if the trainer saves it, the one with the lowest
    validation loss.

    Every worker creates one and calls `save` and `finish` at the same steps; a ``with`` block calls `finish`
    at its end. ``waited`` has the seconds that training waited for a write that was unfinished when the next
    one was due, or at the end.

    A transient failure of a write (a full disk, unreachable storage) is logged as a warning, and the next
    checkpoint tries again. After ``patience`` seconds of failures the run stops.
    """

    def __init__(
        self, folder: Path, trainer: Trainer, *, keep: int = 2, pinned: int | None = None,
        patience: float = PATIENCE,
    ):  # fmt: skip
        self.folder, self.trainer, self.keep = folder, trainer, keep
        self.pinned, self.patience = pinned, patience
        self.waited = 0.0
        # the write runs in a thread during training: its collectives must not mix with the steps',
        # nor with the main threads' here
        groups: Any = [dist.new_group(backend="gloo") if dist.is_initialized() else None for _ in range(2)]
        self._group, self._writers = groups
        self._writing: tuple[Path, Future[Any]] | None = None
        self._before_commit: Callable[[], object] | None = None
        self._failures, self._failing_since = 0, 0.0

    def save(self, before_commit: Callable[[], object] | None = None) -> Path:
        """Copy the state and start to write it to ``folder/step-XXXXXXXX``. Returns that path.

        ``before_commit`` is called on rank 0, in the writing thread, before the checkpoint is committed.
        Raises TitansError if writes have failed for too long.
        """
        if error := self._wait():
            now = time.monotonic()
            self._failures += 1
            if self._failures == 1:
                self._failing_since = now
            too_long = now - self._failing_since >= self.patience
            tried = self._failures >= (TRIES if self.patience else 1)
            if not isinstance(error, StorageError) or self.max_over_ranks(too_long and tried):
                raise _with_hint(error)
            log.warning("%s; the next checkpoint tries again", error)
        self._before_commit = before_commit
        return self._begin()

    def finish(self) -> None:
        """Wait for the pending write. If it fails, retry with the current state for ``patience`` seconds.

        Raises TitansError with the path and the reason.
        """
        error = self._wait()
        for seconds in backoff(self.patience):
            if not isinstance(error, StorageError):
                break
            log.warning("%s; trying again in %.0f s", error, seconds)
            time.sleep(seconds)
            self._begin()
            error = self._wait()
        if error:
            raise _with_hint(error)

    def max_over_ranks(self, value: int) -> int:
        """Return the maximum of ``value`` over ranks. A collective: all ranks must call it."""
        if self._group is None:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        return int(largest)

    def _wait(self) -> TitansError | None:
        """Wait for the pending write. Returns why it failed, the same on all ranks, or None."""
        if self._writing is None:
            return None
        (final, future), self._writing = self._writing, None
        started = time.perf_counter()
        try:
            future.result()
        except CheckpointException as failed:
            if rank() == 0:
                shutil.rmtree(_partial(final), ignore_errors=True)
            cause = _cause(failed)
            kind = StorageError if is_transient(cause) else TitansError
            return kind(f"{final}: cannot be written: {one_line(cause)}")
        finally:
            self.waited += time.perf_counter() - started
        self._failures = 0
        return None

    def _begin(self) -> Path:
        final = at_step(self.folder, self.trainer.progress.step)
        if rank() == 0:
            for cut_short in self.folder.glob(".partial-*"):
                shutil.rmtree(cut_short, ignore_errors=True)
        if self._group:
            dist.barrier(self._group)
        # warned from the writing thread, where a filter of this block has no effect
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        with _quiet():
            writer = _Writer(final, deepcopy(self.trainer.progress), self)
            to: dict[str, Any] = {"process_group": self._writers, "no_dist": self._writers is None}
            future = async_save(_state(self.trainer), storage_writer=writer, **to)
        assert isinstance(future, Future)
        self._writing = final, future
        return final

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
            elif error := self._wait():
                log.warning("checkpoint %s", error)
        finally:
            for group in filter(None, (self._group, self._writers)):
                dist.destroy_process_group(group)
            self._group = self._writers = None


class _Writer(FileSystemWriter):
    """Commits a checkpoint, in the writing thread, once all its files are written."""

    def __init__(self, final: Path, progress: Any, saver: Saver):
        self.partial = _partial(final)
        super().__init__(self.partial)
        self.final, self.progress = final, progress
        self.keep, self.before_commit = saver.keep, saver._before_commit
        self.pinned = at_step(final.parent, saver.pinned) if saver.pinned else None

    def finish(self, metadata: Any, results: Any) -> None:
        """Write the manifest and publish the checkpoint, on rank 0 after all ranks have written."""
        super().finish(metadata, results)
        write_manifest(self.partial, self.progress)
        if self.before_commit:
            self.before_commit()
        # a run that skipped a corrupt checkpoint reaches its step again
        shutil.rmtree(self.final, ignore_errors=True)
        os.replace(self.partial, self.final)
        # later ones are corrupt and will be rewritten; they must not count towards keep
        written = [path for path in saved(self.final.parent) if path.name <= self.final.name]
        best = at_step(self.final.parent, self.progress.best_step)
        for old in set(written).difference([self.final, self.pinned, best, *written[: self.keep]]):
            shutil.rmtree(old, ignore_errors=True)


def _with_hint(error: TitansError) -> TitansError:
    """Return the error of a write that is not retried, with the remedy if storage caused it."""
    hint = "; run the same command to resume once it can be" if isinstance(error, StorageError) else ""
    return type(error)(f"{error}{hint}")


def _partial(final: Path) -> Path:
    return final.with_name(f".partial-{final.name}")


def newest(folder: Path) -> Path | None:
    """Return the newest intact checkpoint, or None; a corrupt one is logged. Raises StorageError."""
    for path in saved(folder):
        if (wrong := find_corruption(path)) is None:
            return path
        log.warning("checkpoint %s is not whole (%s); using the one before", path, wrong)
    return None


def restore(folder: Path, trainer: Trainer) -> Path | None:
    """Restore the trainer from the newest intact checkpoint. Returns its path, or None if there is none.

    Every rank calls it; rank 0 chooses. Raises UsageError if there are checkpoints but all are corrupt, or if
    the checkpoint is of another model; StorageError.
    """
    choice = [newest(folder) if rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(choice)
    if path := choice[0]:
        restore_from(path, trainer)
    elif latest := next(iter(saved(folder)), None):
        cause = f"{find_corruption(latest)}, and no checkpoint before it is whole"
        raise UsageError(f"{latest}: {cause}; delete {folder} to train from the start")
    return path


def restore_from(path: Path, trainer: Trainer) -> None:
    """Restore the trainer from one checkpoint; every rank calls it. Raises UsageError, StorageError."""
    state = _state(trainer)
    _load(path, state)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(trainer.model, trainer.optimizer, **parts)
    trainer.states = _load_streams(path, trainer)
    if (own := state["rng"].get(f"rank{rank()}")) is not None:
        set_rng_state(own)
    trainer.progress = retry_transient(lambda: read_manifest(path)).progress


def check_weights(path: Path, model: nn.Module) -> None:
    """Compare the names and shapes of weights with a checkpoint's metadata. Raises UsageError."""
    entries = _saved(path)
    _check_shapes(path, entries, _weights(model, entries))


def load_model(path: Path, model: nn.Module) -> int:
    """Load only the weights of the checkpoint at ``path`` into ``model``. Returns the step.

    Raises UsageError.
    """
    if (wrong := find_corruption(path)) is not None:
        raise UsageError(f"{path}: not a whole checkpoint: {wrong}; use another step of this run")
    weights = _weights(model, _saved(path))
    _load(path, {"model": weights})
    model.load_state_dict(weights, strict=False)
    return read_manifest(path).progress.step


def _weights(model: nn.Module, entries: dict[str, Any]) -> dict[str, Any]:
    """Return the model's weights, without the added ones that the checkpoint does not have."""
    added: tuple[str, ...] = getattr(model, "added", ())
    state = model.state_dict()
    return {name: state[name] for name in state if f"model.{name}" in entries or not name.startswith(added)}


def _state(trainer: Trainer) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    state = {"model": model, "optimizer": optimizer, "rng": {f"rank{rank()}": rng_state()}}
    if rank() >= trainer.shard[1]:
        return state
    for group, carried in trainer.states.items():
        structure, tensors = flatten_state(carried)
        # each rank writes the state of its own streams
        saved = {"structure": json.dumps(structure), "tensors": tensors}
        state[f"streams{group or ''}"] = {f"rank{rank()}": saved}
    return state


def _load_streams(path: Path, trainer: Trainer) -> dict[int, ModelState]:
    """Load this rank's states by group of streams, resharded if the world size changed."""
    entries, (number, readers) = _saved(path), trainer.shard
    states: dict[int, ModelState] = {}
    for group in range(trainer.cfg.stream_groups):
        name = f"streams{group or ''}"
        if not (writers := len({key.split(".")[1] for key in entries if key.startswith(f"{name}.")})):
            continue
        # as many shares as were written: each rank reads its own
        ranks = [number] if writers == readers else range(writers)
        saved: dict[str, Any] = {}
        for writer in ranks:
            prefix = f"{name}.rank{writer}.tensors."
            stored = {key.removeprefix(prefix): x for key, x in entries.items() if key.startswith(prefix)}
            tensors = {key: torch.empty(x.size, dtype=x.properties.dtype) for key, x in stored.items()}
            saved[f"rank{writer}"] = {"structure": "", "tensors": tensors}
        _read({name: saved}, path)
        parts = []
        for part in saved.values():
            tensors = {key: x.to(trainer.device) for key, x in part["tensors"].items()}
            parts.append(restore_state(json.loads(part["structure"]), tensors))
        streams = trainer.cfg.global_batch_size
        order = [stream for writer in ranks for stream in range(writer, streams, writers)]
        indices = [order.index(stream) for stream in range(number, streams, readers)]
        states[group] = ModelState.cat(parts).take(indices)
    return states


def _load(path: Path, state: dict[str, Any]) -> None:
    entries = _saved(path)
    _check_shapes(path, entries, state["model"])
    # a run that resumes with more workers has ranks without a saved RNG state: they keep their seed
    state["rng"] = {k: v for k, v in state.get("rng", {}).items() if f"rng.{k}.torch" in entries}
    for name, states in state["rng"].items():
        if f"rng.{name}.cuda" not in entries:  # saved on a CPU
            states.pop("cuda", None)
    # streams are read separately: other ranks may have written them
    _read({key: value for key, value in state.items() if not key.startswith("streams")}, path)


def _read(state: dict[str, Any], path: Path) -> None:
    """Fill ``state`` from the checkpoint. Raises UsageError, StorageError."""

    def load() -> None:
        try:
            load_sharded(state, storage_reader=FileSystemReader(path), no_dist=not dist.is_initialized())
        except CheckpointException as error:
            # the same error on all ranks, so that all of them retry
            raise cause if is_transient(cause := _cause(error)) else error from None

    try:
        with _quiet():
            retry_transient(load)
    except CheckpointException as error:
        raise UsageError(f"{path}: cannot be loaded: {one_line(_cause(error))}; delete it") from error


def _saved(path: Path) -> dict[str, Any]:
    """Metadata (shapes and dtypes) of what a checkpoint holds, by name."""
    try:
        return FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle of another version can raise anything
        raise UsageError(f"{path}: its .metadata cannot be read; delete this folder") from error


def _check_shapes(path: Path, entries: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    kept = {key.removeprefix("model."): entry for key, entry in entries.items() if key.startswith("model.")}
    for name in [*weights, *kept]:
        model_shape = tuple(weights[name].shape) if name in weights else "missing"
        saved_shape = tuple(kept[name].size) if name in kept else "missing"
        if model_shape != saved_shape:
            fix = "give the config the checkpoint was made with, or another folder"
            differ = f"{name} is {saved_shape} in the checkpoint and {model_shape} in the model"
            raise UsageError(f"{path}: {differ}; {fix}")


def _cause(error: CheckpointException) -> BaseException:
    return next(iter(error.failures.values()))[0]


def saved(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, newest first, intact or not. Raises StorageError."""
    return retry_transient(lambda: sorted(folder.glob("step-*"), reverse=True))


def last_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in a folder, intact or not; 0 if there is none."""
    return next(map(step_of, saved(folder)), 0)


def step_of(path: Path) -> int:
    """Return the optimiser step of a checkpoint, from its folder's name."""
    return int(path.name.removeprefix("step-"))


def at_step(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after ``step`` optimiser steps."""
    return folder / f"step-{step:08d}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch.distributed's warnings about its own deprecated parts."""
    with warnings.catch_warnings():
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module="torch.distributed.*")
        yield


def rng_state() -> dict[str, Any]:
    """Return the state of every generator a run draws from."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    numpy = np.random.get_state(legacy=False)
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy, **cuda}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state returned by `rng_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(_as_tuple(state["python"]))
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(v) for v in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of ``manifest.json``, except for the hash of the manifest itself."""

    progress: Progress
    files: dict[str, str]
    """BLAKE2b hash of every other file in the folder, by name."""


def write_manifest(folder: Path, progress: Progress) -> None:
    """Hash every file of ``folder`` and write its manifest."""
    files = {path.name: _hash(path) for path in sorted(folder.iterdir())}
    content = asdict(CheckpointManifest(progress, files))
    (folder / MANIFEST).write_text(json.dumps(content | {"hash": _hash_of(content)}))


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of ``folder``. Raises OSError, or ValueError with a one-line reason."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        if content.pop("hash") != _hash_of(content):
            raise ValueError("it does not have the hash it was written with")
        # earlier versions wrote null for best_step and best_loss until there were any
        fields = content["progress"].items()
        content["progress"] = {k: v for k, v in fields if v is not None or not k.startswith("best_")}
        return TypeAdapter(CheckpointManifest).validate_json(json.dumps(content), strict=True)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is not a checkpoint's: {one_line(error, 160)}") from None


def find_corruption(folder: Path) -> str | None:
    """Name a fault of the checkpoint in ``folder``; None if every file has the hash it was written with.

    Transient storage errors are retried. Raises StorageError.
    """

    def find() -> str | None:
        try:
            for name, expected in read_manifest(folder).files.items():
                if _hash(folder / name) != expected:
                    return f"{name} does not have the hash it was written with"
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        except (OSError, ValueError) as error:
            if is_transient(error):
                raise
            return str(error)
        return None

    return retry_transient(find)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _blake).hexdigest()


def _hash_of(content: dict[str, object]) -> str:
    return _blake(json.dumps(content, sort_keys=True).encode()).hexdigest()
