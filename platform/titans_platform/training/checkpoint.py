"""Checkpoints: model, optimiser, position and RNG, sharded by torch.distributed.checkpoint.

A checkpoint is a folder named by its step. It is written under another name and renamed when whole, so a
folder with a step's name was finished; its manifest says how long each file is, so that one cut short
later is passed over for the one before.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
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
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from titans_platform.errors import TitansError, UsageError
from titans_platform.training.loop import Progress, Trainer

log = logging.getLogger(__name__)

SCHEMA = 1
MANIFEST = "manifest.json"
KEEP = 2


class Damaged(UsageError):
    """A checkpoint whose files have their length but not their content."""


def save(folder: Path, trainer: Trainer) -> Path:
    """Write the trainer's state to ``folder/step-XXXXXXXX``; every rank calls it. The path."""
    final = folder / f"step-{trainer.progress.step:08d}"
    partial = folder / f".partial-{final.name}"
    if _rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
    _barrier()
    try:
        with _quiet():
            save_sharded(_state(trainer), storage_writer=FileSystemWriter(partial), no_dist=_alone())
    except CheckpointException as error:
        raise TitansError(f"{final}: cannot be written: {_reason(error)}") from error
    if _rank() == 0:
        _commit(partial, final, trainer.progress)
        for old in _steps(folder)[KEEP:]:
            shutil.rmtree(old, ignore_errors=True)
    _barrier()
    return final


def newest(folder: Path) -> Path | None:
    """The latest checkpoint that is whole; one that is not is named in the log and passed over."""
    return next(_whole(folder), None)


def restore(folder: Path, trainer: Trainer) -> Path | None:
    """Bring the trainer to its newest checkpoint, where there is one; its path. Raises UsageError."""
    damaged = None
    for path in _whole(folder):
        try:
            _restore(path, trainer)
            return path
        except Damaged as error:
            damaged = error
            _pass_over(path, "damaged")
    if damaged:
        # the weights are half loaded: nothing is left to start from
        raise damaged
    return None


def _restore(path: Path, trainer: Trainer) -> None:
    state = _state(trainer)
    _load(path, state)
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    if (own := state["rng"].get(f"rank{_rank()}")) is not None:
        _set_rng(own)
    trainer.progress = Progress(**_manifest(path)["progress"])


def load_model(path: Path, model: nn.Module) -> int:
    """Only the weights of the checkpoint at ``path``, into ``model``; the step. Raises UsageError."""
    if (fault := _fault(path)) is not None:
        raise UsageError(f"{path}: not a whole checkpoint: {fault}; use another step of this run")
    state: dict[str, Any] = {"model": model.state_dict()}
    _load(path, state)
    model.load_state_dict(state["model"])
    return _manifest(path)["progress"]["step"]


def _state(trainer: Trainer) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {"model": model, "optimizer": optimizer, "rng": {f"rank{_rank()}": _rng()}}


def _load(path: Path, state: dict[str, Any]) -> None:
    reader = FileSystemReader(path)
    try:
        saved = reader.read_metadata().state_dict_metadata
    except Exception as error:  # a pickle: damaged, it can raise anything
        raise Damaged(f"{path}: damaged: its .metadata cannot be read; delete this folder") from error
    _check_shapes(path, saved, state["model"])
    # a run that resumes with more workers has ranks whose RNG nobody saved: they keep their seed
    state["rng"] = {k: v for k, v in state.get("rng", {}).items() if f"rng.{k}.torch" in saved}
    try:
        with _quiet():
            load_sharded(state, storage_reader=reader, no_dist=_alone())
    except CheckpointException as error:
        raise Damaged(f"{path}: damaged: {_reason(error)}; delete this folder") from error


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


def _commit(partial: Path, final: Path, progress: Progress) -> None:
    files = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
    manifest = {"schema": SCHEMA, "progress": asdict(progress), "files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest))
    # a run that passed over a broken checkpoint comes to its step again
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)


def _fault(path: Path) -> str | None:
    try:
        manifest = _manifest(path)
        if manifest["schema"] != SCHEMA:
            return f"written in format {manifest['schema']}, this version reads {SCHEMA}"
        for name, size in manifest["files"].items():
            found = (path / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes of {size}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {error}"
    return None


def _manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_text())


def _whole(folder: Path) -> Iterator[Path]:
    for path in _steps(folder):
        fault = _fault(path)
        if fault is None:
            yield path
        else:
            _pass_over(path, fault)


def _pass_over(path: Path, fault: str) -> None:
    if _rank() == 0:
        log.warning("checkpoint %s is not whole (%s); using the one before", path, fault)


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


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _alone() -> bool:
    return not dist.is_initialized()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that a checkpoint outside a process group is taken to be for one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.*")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.*")
        yield
