"""How fast prepared tokens are read, for `titans bench data`: beside `datasets` over the same Arrow files.

Speeds are tokens a second of CPU time, which other work on the machine changes less than the clock's.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from titans_platform.data.reading import SourceRows
from titans_platform.data.shards import (
    MANIFEST,
    SHARD_BYTES,
    Manifest,
    SplitInfo,
    SplitWriter,
    parse_manifest,
    write_manifest,
)
from titans_platform.data.store import Folder
from titans_platform.data.stream import Batch, RowStream
from titans_platform.errors import TitansError

SHARD_TOKENS = SHARD_BYTES // 2
BATCH_TOKENS = 2**19
"""Tokens of a batch, the paper's."""
SECONDS = 1.0
"""CPU seconds that each is timed for in a round."""
VOCABULARY, DOCUMENT = 32_000, 1_000
Progress = Callable[[str], None]


def run(
    gigabytes: float, lengths: list[int], rounds: int, shards: int, *, folder: Path | None = None,
    progress: Progress = lambda message: None,
) -> dict[str, Any]:  # fmt: skip
    """Time reading at each row length, reading all of it, and opening ``shards`` tiny shards.

    Files are written under ``folder``, the system's temporary folder where None, and removed. Raises
    TitansError: the rows read are not those written.
    """
    with tempfile.TemporaryDirectory(prefix="titans-bench-", dir=folder) as made:
        progress(f"writing {gigabytes:g} GB of shards")
        source = write_source(
            Path(made) / "large", max(1, round(gigabytes * 1e9 / SHARD_BYTES)), SHARD_TOKENS
        )
        check(source, lengths[0])
        rows = [_timed(source, length, rounds, progress) for length in lengths]
        progress("reading all of it")
        memory = read_all(source, lengths[0])
        progress(f"opening {shards:,} shards")
        opened = open_many(Path(made) / "many", shards)
    return {"shards": len(source[1].train.shards), "rounds": rounds, "rows": rows} | memory | opened


def write_source(folder: Path, shards: int, shard_tokens: int) -> tuple[Path, Manifest]:
    """A source of ``shards`` equal shards of random tokens, in documents of DOCUMENT."""
    folder.mkdir()
    writer = SplitWriter(folder, "train", VOCABULARY, shard_tokens)
    rng, left = np.random.default_rng(0), shard_tokens
    while left:
        n = min(left, DOCUMENT)
        writer.add(rng.integers(0, VOCABULARY, n, np.uint32), np.arange(n) > 0)
        left -= n
    (first,) = writer.close().shards
    infos = [first]
    for i in range(1, shards):
        copy = shutil.copyfile(folder / first.file, folder / f"train-{i:05d}.arrow")
        infos.append(first.model_copy(update={"file": copy.name, "mtime_ns": copy.stat().st_mtime_ns}))
    split = {"tokens": shards * shard_tokens, "shard_tokens": shard_tokens}
    manifest = Manifest(
        schema_version=1, label="bench", content="bench", train=SplitInfo(**split, shards=tuple(infos)),
        validation=SplitInfo(shard_tokens=shard_tokens),
    )  # fmt: skip
    write_manifest(folder, manifest)
    return folder, manifest


def stream_of(source: tuple[Path, Manifest], length: int) -> RowStream:
    """Batches of about BATCH_TOKENS."""
    folder, manifest = source
    return RowStream(
        [SourceRows(Folder(folder), manifest, length, 0, 1.0)], max(1, BATCH_TOKENS // length), 0
    )


def check(source: tuple[Path, Manifest], length: int) -> None:
    """Compare a batch with the tokens where its rows should be. Raises TitansError."""
    stream = stream_of(source, length)
    split = stream.sources[0].train
    for (_, row), tokens in zip(stream.global_rows(0), stream.batch(0).tokens.numpy(), strict=True):
        first = int(split.first_tokens(np.array([row]))[0])
        if not np.array_equal(split.read(first, first + length + 1).tokens, tokens):
            raise TitansError(f"row {row} is not what was written, so reading is not timed")


def _timed(source: tuple[Path, Manifest], length: int, rounds: int, progress: Progress) -> dict[str, Any]:
    """Both readers in turns, each where it stopped the round before."""
    ours, theirs = _batches(stream_of(source, length)), _chunks(source, length)
    samples: dict[str, list[float]] = {"ours": [], "datasets": []}
    for i in range(rounds):
        progress(f"T = {length}, round {i + 1} of {rounds}")
        for name, tokens in (("ours", ours), ("datasets", theirs)):
            samples[name].append(_rate(tokens))
    ratios = [a / b for a, b in zip(samples["ours"], samples["datasets"], strict=True)]
    times = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
    return {"length": length, "times": times} | {name: median(rates) for name, rates in samples.items()}


def _rate(tokens: Iterator[int]) -> float:
    """Tokens a CPU second."""
    next(tokens)
    read, began = 0, time.process_time()
    while (spent := time.process_time() - began) < SECONDS:
        read += next(tokens)
    return read / spent


def _batches(stream: RowStream) -> Iterator[int]:
    """Tokens of each training batch: int64 tensors, in the order of training."""
    step = 0
    while True:
        batch: Batch = stream.batch(step)
        yield batch.loss.numel()
        step += 1


def _chunks(source: tuple[Path, Manifest], length: int) -> Iterator[int]:
    """Tokens of each table of ``length`` rows that `datasets` gives, as they lie in the files."""
    import datasets

    files = [str(source[0] / info.file) for info in source[1].train.shards]
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        found = datasets.load_dataset(
            "arrow", data_files=files, split="train", streaming=True, cache_dir=cache
        )
        while True:
            # its fastest format: numpy's and torch's go through Python objects
            for chunk in found.with_format("arrow").iter(batch_size=length):
                table: Any = chunk
                yield sum(len(column.to_numpy()) for column in table.columns) // 3


def read_all(source: tuple[Path, Manifest], length: int) -> dict[str, Any]:
    """Read every row once; MB that memory grew by after the first batches, and the most that was mapped."""
    stream = stream_of(source, length)
    steps = stream.rows[0] // stream.batch_size
    first, most, mapped, began = 0.0, 0.0, 0.0, time.process_time()
    for step in range(steps):
        stream.batch(step)
        own, files = resident()
        if step <= min(10, steps // 10):
            first = own
        most, mapped = max(most, own), max(mapped, files)
    tokens = steps * stream.batch_size * length
    rate = tokens / max(time.process_time() - began, 1e-9)
    return {"tokens": tokens, "epoch_rate": rate, "grown_mb": most - first, "mapped_mb": mapped}


def resident() -> tuple[float, float]:
    """MB of this process in memory: its own, and those of files."""
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    own, files = (int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))
    return own, files


def open_many(folder: Path, shards: int) -> dict[str, Any]:
    """Seconds from a manifest of many tiny shards to the first batch."""
    write_source(folder, shards, 1024)
    began = time.perf_counter()
    manifest = parse_manifest((folder / MANIFEST).read_bytes(), MANIFEST)
    if problems := Folder(folder).problems(manifest.files, verify=False):
        raise TitansError(next(iter(problems.values())))
    stream = RowStream([SourceRows(Folder(folder), manifest, 8, 0, 1.0)], 8, 0)
    stream.batch(0)
    return {"opened_shards": shards, "open_seconds": time.perf_counter() - began}
