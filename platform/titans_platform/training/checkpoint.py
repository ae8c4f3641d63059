"""Checkpoints: model, optimiser, position and RNG, sharded by torch.distributed.checkpoint.

A checkpoint is a folder named by its step. It is written under another name, in the background, and
renamed when it is whole. Its manifest holds a hash of every file, so that one which is damaged later is
passed over for the one before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import async_save

from titans_platform.errors import TitansError, UsageError
from titans_platform.files import not_written
from titans_platform.training.loop import Phases, Progress, Trainer
from titans_platform.training.parallel import rank

log = logging.getLogger(__name__)

SCHEMA = 2
MANIFEST = "manifest.json"


class Saver:
    """Writes a trainer's checkpoints to ``folder`` while it goes on training, and keeps the last ``keep``.

    The one of step ``pinned`` is kept beside them.

    Every worker makes one and calls `save` and `finish` at the same steps; a ``with`` block finishes at its
    end. ``phases`` is told how long training stood still: "checkpoint" for the copy of the state to CPU
    memory, "checkpoint wait" for a write that was not done when the next was due, or at the end.
    """

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        *,
        keep: int = 2,
        pinned: int | None = None,
        phases: Phases | None = None,
    ):
        self.folder, self.trainer, self.keep, self.pinned = folder, trainer, keep, pinned
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
            final = at_step(self.folder, self.trainer.progress.step)
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
            writer = _Writer(final, deepcopy(self.trainer.progress), self.keep, self.pinned)
            group = self._group
            future = async_save(
                _state(self.trainer), storage_writer=writer, process_group=group, no_dist=group is None
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

    def __init__(self, final: Path, progress: Any, keep: int, pinned: int | None):
        self.partial = final.with_name(f".partial-{final.name}")
        super().__init__(self.partial)
        self.final, self.progress, self.keep = final, progress, keep
        self.pinned = at_step(final.parent, pinned) if pinned else None

    def finish(self, metadata: Any, results: Any) -> None:
        """Called on the first worker, after all workers have written."""
        super().finish(metadata, results)
        write_manifest(self.partial, self.progress)
        # a run that passed over a damaged checkpoint comes to its step again
        shutil.rmtree(self.final, ignore_errors=True)
        os.replace(self.partial, self.final)
        # later ones are damaged and will be written again; they must not push this one out
        written = [path for path in saved(self.final.parent) if path.name <= self.final.name]
        for old in written[self.keep :]:
            if old != self.pinned:
                shutil.rmtree(old, ignore_errors=True)


def newest(folder: Path) -> Path | None:
    """The latest checkpoint that is whole; one that is not is named in the log and passed over."""
    for path in saved(folder):
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
        if latest := next(iter(saved(folder)), None):
            raise UsageError(
                f"{latest}: {fault(latest)}, and no checkpoint before it is whole; delete {folder} "
                "to train from the start"
            )
        return None
    state = _state(trainer)
    _load(path, state)
    set_state_dict(
        trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    if (own := state["rng"].get(f"rank{rank()}")) is not None:
        _set_rng(own)
    trainer.progress = read_manifest(path).progress
    return path


def _chosen(folder: Path) -> Path | None:
    choice = [newest(folder) if rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(choice)
    return choice[0]


def adopt(point: Path, folder: Path, trained: Callable[[Progress], Progress]) -> Path:
    """Copy a checkpoint into another run's folder, with what ``trained`` makes of its progress; its path.

    The copy is there whole or not at all. Raises TitansError: it cannot be written.
    """
    partial, final = folder / f".partial-{point.name}", folder / point.name
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(point, partial, ignore=shutil.ignore_patterns(MANIFEST))
        write_manifest(partial, trained(read_manifest(point).progress))
        os.replace(partial, final)
    except OSError as error:
        raise not_written(final, error) from error
    return final


def check_weights(path: Path, model: nn.Module) -> None:
    """Compare names and shapes of weights with those of a checkpoint; reads none. Raises UsageError."""
    _check_shapes(path, _saved(FileSystemReader(path), path), model.state_dict())


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
    there = _saved(reader, path)
    _check_shapes(path, there, state["model"])
    # a run that resumes with more workers has ranks whose RNG nobody saved: they keep their seed
    state["rng"] = {k: v for k, v in state.get("rng", {}).items() if f"rng.{k}.torch" in there}
    try:
        with _quiet():
            load_sharded(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise UsageError(f"{path}: cannot be loaded: {_reason(error)}; delete this folder") from error


def _saved(reader: FileSystemReader, path: Path) -> dict[str, Any]:
    """What a checkpoint holds, by name: shapes and types."""
    try:
        return reader.read_metadata().state_dict_metadata
    except Exception as error:  # a pickle of another version can raise anything
        raise UsageError(f"{path}: its .metadata cannot be read; delete this folder") from error


def _check_shapes(path: Path, there: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    kept = {key.removeprefix("model."): entry for key, entry in there.items() if key.startswith("model.")}
    for name in [*weights, *kept]:
        here = tuple(weights[name].shape) if name in weights else None
        found = tuple(kept[name].size) if name in kept else None
        if here != found:
            raise UsageError(
                f"{path}: {name} is {found or 'missing'} in the checkpoint and {here or 'missing'} in the "
                "model; give the config the checkpoint was made with, or another folder"
            )


def _reason(error: CheckpointException) -> str:
    failure = next(iter(error.failures.values()))[0]
    return " ".join(str(failure).split())[:200]


def saved(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first, whole or not."""
    return sorted(folder.glob("step-*"), reverse=True)


def step_of(path: Path) -> int:
    """The optimiser steps that a checkpoint is after."""
    return int(path.name.removeprefix("step-"))


def at_step(folder: Path, step: int) -> Path:
    """Where the checkpoint after so many steps lies."""
    return folder / f"step-{step:08d}"


def _rng() -> dict[str, Any]:
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    numpy = np.random.get_state(legacy=False)
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy, **cuda}


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
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module="torch.distributed.*")
        yield


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` holds beside its own hash, which covers all of it."""

    schema: int
    progress: Progress
    files: dict[str, str]
    """BLAKE2b of each other file of the folder, by its name."""


def write_manifest(folder: Path, progress: Progress) -> None:
    """Hash every file of ``folder`` and write its manifest."""
    files = {path.name: _hash(path) for path in sorted(folder.iterdir())}
    content = asdict(Manifest(SCHEMA, progress, files))
    (folder / MANIFEST).write_text(json.dumps(content | {"hash": _hash_of(content)}))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of ``folder``. Raises OSError, and ValueError with the reason in a line."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except ValueError:
        raise ValueError(f"{MANIFEST} is not valid JSON") from None
    if not isinstance(content, dict):
        raise ValueError(f"{MANIFEST} does not hold a JSON object")
    if content.get("schema") == 1:
        raise ValueError(f"written in format 1, without hashes; this version reads format {SCHEMA}")
    if content.pop("hash", None) != _hash_of(content):
        raise ValueError(f"{MANIFEST} does not have the hash it was written with")
    if content.get("schema") != SCHEMA:
        raise ValueError(f"written in format {content.get('schema')!r}; this version reads format {SCHEMA}")
    try:
        return TypeAdapter(Manifest).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{MANIFEST}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def fault(folder: Path) -> str | None:
    """What is wrong with the checkpoint in ``folder``; None where every file is as it was written."""
    try:
        for name, expected in read_manifest(folder).files.items():
            if _hash(folder / name) != expected:
                return f"{name} does not have the hash it was written with"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _blake).hexdigest()


def _hash_of(content: dict[str, object]) -> str:
    return _blake(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _blake(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)
