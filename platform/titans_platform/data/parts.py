"""Tokenising one source: whole, or in parts, by local processes or as Ray tasks.

The split into parts depends only on the source, so the shards are the same for any number of processes.
Each finished part is kept, with its own manifest; the source's manifest is written last.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import pickle
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from titans_platform.config import DataConfig, digest
from titans_platform.data.encode import Encoded, encode_documents, generate_items
from titans_platform.data.shards import (
    MANIFEST,
    SCHEMA,
    Manifest,
    SplitInfo,
    SplitWriter,
    read_manifest,
    signed,
    write_table,
)
from titans_platform.data.sources import SOURCES, WHOLE, SourcePlan, TextSource
from titans_platform.data.tokenizer import BUILT_IN, Tokenizer, load_tokenizer
from titans_platform.errors import TitansError, UsageError
from titans_platform.files import write_bytes, write_json
from titans_platform.provenance import cores, die_with_parent

PrepareProgress = Callable[[str, int, int, "float | None"], None]
"""Progress callback: source label, documents and tokens so far, fraction done (None if unknown)."""


@dataclass(frozen=True)
class PartJob:
    """One part of a source to tokenise."""

    data: DataConfig
    source: int
    """Which of ``data.sources``."""
    store: Path
    name: str
    """The source's folder in the store."""
    tokenizer: str
    """The copy of the tokenizer's file in the store, or the name of a built-in one."""
    plan: SourcePlan = WHOLE
    number: int | None = None
    """Index of the part; None: the source is not split."""
    limit: int | None = None
    """Maximum number of tokens."""

    @property
    def folder(self) -> str:
        """Folder of the part in the store."""
        return self.name if self.number is None else f"{self.name}/{self.number:05d}"


Runner = Callable[[Iterator[PartJob]], Iterator[tuple[int, Manifest]]]
"""Runs jobs and yields finished parts with their manifests; pulls a job only when it can start it."""


def text_source(data: DataConfig, i: int, store: Path) -> TextSource:
    """Source ``i`` of the data, of another kind than tasks. Raises UsageError."""
    source, cache = data.sources[i], store / "huggingface"
    return SOURCES[source.kind](source, f"data.sources.{i}", cache)


def make_part(job: PartJob, progress: PrepareProgress | None = None) -> Manifest:
    """Tokenise one part, or the whole source, in the store. Raises UsageError."""
    data, source = job.data, job.data.sources[job.source]
    config = source.model_copy(update={"validation_fraction": source.held_out, "max_tokens": job.limit})
    tokenizer = kept_tokenizer(job.store, job.tokenizer)
    origin: dict[str, Any] = {"tokenizer": tokenizer.fingerprint, "revision": job.plan.revision}
    origin["source"] = source.model_dump(mode="json", exclude_defaults=True)
    if config.kind == "task":
        label = "task:" + "+".join(task.task for task in config.tasks)
        encoded = generate_items(config, tokenizer, data, f"data.sources.{job.source}")
        origin["item_tokens"] = data.item_tokens(config)
    else:
        text = text_source(data, job.source, job.store)
        label = text.label
        part = None if job.number is None else job.plan.parts[job.number]
        documents = text.documents(part, job.plan.revision)
        encoded = encode_documents(documents, tokenizer, config, data.seed, several=part is not None)
    with _replacing(job.store / job.folder) as partial:
        manifest = _write(partial, encoded, tokenizer.vocab_size, label, progress)
        if job.number is None:
            _check_not_empty(job, manifest)
        manifest = manifest.model_copy(update=origin)
        write_bytes(partial / MANIFEST, signed(manifest))
    return manifest


def make_source(job: PartJob, run: Runner, progress: PrepareProgress | None) -> None:
    """Tokenise the missing parts of a source. Raises UsageError, TitansError."""
    job = replace(job, plan=_plan(job), limit=job.data.sources[job.source].max_tokens)
    if not job.plan.parts:
        make_part(job, progress)
        return
    finished = dict(_finished(job))

    def missing() -> Iterator[PartJob]:
        """Parts to tokenise, in order, until the first parts hold ``max_tokens`` tokens."""
        for number in range(len(job.plan.parts)):
            first = takewhile(bool, map(finished.get, range(len(job.plan.parts))))
            if job.limit is not None and sum(manifest.tokens for manifest in first if manifest) >= job.limit:
                return
            if number not in finished:
                yield replace(job, number=number)

    for number, manifest in run(missing()):
        finished[number] = manifest
        if progress:
            documents = sum(manifest.documents for manifest in finished.values())
            tokens = sum(manifest.tokens for manifest in finished.values())
            progress(manifest.label, documents, tokens, len(finished) / len(job.plan.parts))
    manifest = _joined(_up_to_limit(job, finished))
    _check_not_empty(job, manifest)
    write_bytes(job.store / job.name / MANIFEST, signed(manifest))


def _check_not_empty(job: PartJob, manifest: Manifest) -> None:
    if not manifest.documents:
        empty = f"data.sources.{job.source}: {manifest.label} is empty"
        raise UsageError(f"{empty}; give a source that holds text")


def _plan(job: PartJob) -> SourcePlan:
    """Return the source's parts; an earlier attempt's if it exists, possibly of another revision."""
    path = job.store / job.name / "plan.json"
    if job.data.sources[job.source].kind == "task":
        return WHOLE
    with suppress(FileNotFoundError, ValueError):
        return SourcePlan(**json.loads(path.read_bytes()))
    if (plan := text_source(job.data, job.source, job.store).plan()).parts:
        write_json(path, plan._asdict())
    return plan


def _finished(job: PartJob) -> Iterator[tuple[int, Manifest]]:
    """Yield the complete parts."""
    for number in range(len(job.plan.parts)):
        with suppress(FileNotFoundError, UsageError):
            yield number, read_manifest(job.store / replace(job, number=number).folder)


def _up_to_limit(job: PartJob, finished: dict[int, Manifest]) -> dict[str, Manifest]:
    """Return the parts of the source by folder; the last is cut again if it exceeds ``limit``."""
    chosen, remaining = {}, job.limit or math.inf
    for number in range(len(job.plan.parts)):
        part, manifest = replace(job, number=number), finished.get(number)
        if remaining == 0 or manifest is None:
            shutil.rmtree(job.store / part.folder, ignore_errors=True)
            continue
        if manifest.tokens > remaining:
            manifest = make_part(replace(part, limit=int(remaining)))
        chosen[f"{number:05d}"] = manifest
        remaining -= manifest.tokens
    return chosen


def _joined(parts: dict[str, Manifest]) -> Manifest:
    """Join the manifests of all parts."""

    def split(split_name: str) -> SplitInfo:
        infos = {name: getattr(manifest, split_name) for name, manifest in parts.items()}
        sums = {key: sum(getattr(x, key) for x in infos.values()) for key in ("documents", "tokens")}
        named_shards = ((name, shard) for name, info in infos.items() for shard in info.shards)
        shards = [shard.model_copy(update={"file": f"{name}/{shard.file}"}) for name, shard in named_shards]
        largest = max(info.shard_tokens for info in infos.values())
        return SplitInfo(**sums, shard_tokens=largest, shards=tuple(shards))

    content = digest([manifest.content for manifest in parts.values()], 16)
    splits = {"train": split("train"), "validation": split("validation")}
    return next(iter(parts.values())).model_copy(update={"content": content, **splits})


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Open a temporary folder that replaces ``folder`` on success; the caller holds the lock."""
    # left by a dead process, or by one still running on a lost node, which must not write into this one
    for leftover in folder.parent.glob(f"{folder.name}.*partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    folder: Path, encoded: Iterator[Encoded], vocab_size: int, label: str, progress: PrepareProgress | None
) -> Manifest:
    """Write the shards of both splits and the hashes of the items. Returns the manifest."""
    train, validation = (SplitWriter(folder, split, vocab_size) for split in ("train", "validation"))
    hashes: list[int] = []
    for one in encoded:
        (validation if one.validation else train).add(one.tokens, one.loss, one.first)
        if one.item is not None:
            hashes.append(int(one.item, 16))
        if progress:
            documents, tokens = train.documents + validation.documents, train.tokens + validation.tokens
            progress(label, documents, tokens, one.done)
    items = {"hash": np.unique(np.array(hashes, np.uint64))}
    return Manifest(
        # close() first: it hashes what it flushes
        schema_version=SCHEMA, label=label, train=train.close(), validation=validation.close(),
        content=digest([train.content.hexdigest(), validation.content.hexdigest()], 16),
        items=write_table(folder / "items.arrow", items) if hashes else None,
    )  # fmt: skip


def kept_tokenizer(store: Path, kept: str) -> Tokenizer:
    """Load a tokenizer from the store."""
    return load_tokenizer(kept if kept in BUILT_IN else str(store / "tokenizers" / kept))


def default_runner() -> Runner:
    """Return `by_ray` if this process is connected to Ray, as a job is; otherwise local processes."""
    ray = sys.modules.get("ray")
    return by_ray if ray and ray.is_initialized() else by_processes(cores())


def by_processes(processes: int) -> Runner:
    """Return a runner on local processes."""

    def run(jobs: Iterator[PartJob]) -> Iterator[tuple[int, Manifest]]:
        if processes == 1:
            yield from ((job.number or 0, make_part(job)) for job in jobs)
            return
        others = multiprocessing.active_children()
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, context, initializer=_begin_worker) as pool:
            running: dict[Future[Manifest], int] = {}
            try:
                while True:
                    for job in islice(jobs, processes - len(running)):
                        running[pool.submit(make_part, job)] = job.number or 0
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        yield running.pop(future), future.result()
            except BrokenProcessPool:
                died = "a tokenising process died, perhaps out of memory"
                fix = "run the same command again to resume, with fewer --processes"
                raise TitansError(f"{died}; {fix}") from None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in set(multiprocessing.active_children()) - set(others) if running else ():
                    child.terminate()

    return run


def _begin_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    die_with_parent()


def by_ray(jobs: Iterator[PartJob]) -> Iterator[tuple[int, Manifest]]:
    """Run the jobs on Ray Data, one CPU per part; Ray must be initialised."""
    import ray
    import ray.data

    # its import resets the level; progress is shown by our own bars
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # tasks return one small row; with reservations the others would wait for the first one's output size
    context.op_resource_reservation_enabled = False
    # in waves, so that parts beyond max_tokens are not started
    at_once = 4 * max(1, int(ray.cluster_resources().get("CPU", 1)))
    while wave := [{"job": pickle.dumps(job)} for job in islice(jobs, at_once)]:
        tasks = ray.data.from_items(wave, override_num_blocks=len(wave)).map(_ray_task, num_cpus=1)
        for row in tasks.iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, TitansError):
                raise result
            yield result


def _ray_task(row: dict[str, Any]) -> dict[str, Any]:
    """Prepare one part; a TitansError is returned as it is, not wrapped in a RayTaskError."""
    job: PartJob = pickle.loads(row["job"])
    try:
        return {"result": pickle.dumps((job.number or 0, make_part(job)))}
    except TitansError as error:
        return {"result": pickle.dumps(error)}
