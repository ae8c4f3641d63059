"""The memory layer's speed and space at several lengths, beside a peer's."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

from titans_platform.benchmarks.check import require_right
from titans_platform.benchmarks.subjects import PEER, Shape, Subject
from titans_platform.benchmarks.worker import Worker
from titans_platform.errors import TitansError, UsageError

EXACT_LENGTH = 256
"""Up to this length the peer is asked for what we compute, a step a token; longer, it does not fit."""
LONGEST_PEER = 4096
"""Beyond it the peer needs 10 GB; there, we are compared with ourselves at the base length."""
BASE_LENGTH = 1024

QUICK_SHAPE = Shape(batch=1, heads=2, head_dim=16, expansion=1, depth=2, chunk_size=16)

Progress = Callable[[str], None]


def run(
    lengths: list[int], pairs: int, threads: int, *, shape: Shape | None = None, against: str | None = None,
    base: int = BASE_LENGTH, progress: Progress = lambda message: None,
) -> dict[str, Any]:  # fmt: skip
    """Check the operator, then time each length forward and backward, by turns, ``pairs`` times."""
    if against is not None and against != PEER:
        raise UsageError(f"--against: {against!r} is not known; there is {PEER}")
    version = peer_version() if against else None
    shape = shape or Shape()
    progress("checking the operator against its reference")
    error = require_right(shape.chunk_size)
    rows = []
    for length in lengths:
        subjects = {"ours": Subject("layer", length, shape, threads)}
        subjects["operator"] = Subject("operator", length, shape, threads)
        if against and length <= LONGEST_PEER:
            chunk = 1 if length <= EXACT_LENGTH else shape.chunk_size
            subjects["peer"] = Subject(against, length, shape, threads, chunk)
        if length > LONGEST_PEER:
            subjects["base"] = Subject("layer", base, shape, threads)
        rows.append(_row(length, subjects, pairs, progress))
    return {
        "shape": {**vars(shape), "threads": threads, "pairs": pairs, "base_length": base},
        "peer": {"name": against, "version": version} if against else None,
        "operator_error": error,
        "rows": rows,
    }


def peer_version() -> str:
    """The installed version of the peer, or UsageError."""
    try:
        return importlib.metadata.version(PEER)
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(f"--against: {PEER} is not installed; pip install titans-lab[peers]") from None


def _row(length: int, subjects: dict[str, Subject], pairs: int, progress: Progress) -> dict[str, Any]:
    samples: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(subject)) for name, subject in subjects.items()}
        failure = None
        for i in range(pairs):
            for name in list(workers):
                progress(f"T = {length}, round {i + 1} of {pairs}: {name}")
                try:
                    samples.setdefault(name, []).append(workers[name].step())
                except TitansError as error:
                    if name != "peer":
                        raise
                    # that the peer cannot do it is a result
                    failure = str(error)
                    samples.pop("peer")
                    del workers["peer"]
    row: dict[str, Any] = {"length": length, "peer_failed": failure}
    for name, taken in samples.items():
        row[name] = _summary(subjects[name], taken)
    for other in ("peer", "base"):
        if other in samples:
            row[f"times_{other}"] = _ratio(row["ours"], row[other])
    return row


def _summary(subject: Subject, samples: list[dict[str, float]]) -> dict[str, Any]:
    tokens = subject.shape.batch * subject.length
    speeds = [tokens / s["seconds"] for s in samples]
    summary: dict[str, Any] = {
        "tokens_per_second": median(speeds),
        "samples": speeds,
        "peak_mb": max(s["peak_bytes"] for s in samples) / 2**20,
    }
    if subject.kind == PEER:
        summary["chunk_size"] = subject.peer_chunk
    if subject.kind == "operator":
        rate = max(s["matmul_rate"] for s in samples)
        summary["matmul_gflops"] = rate / 1e9
        summary["share_of_matmul"] = summary["tokens_per_second"] * subject.shape.operator_flops() / rate
    return summary


def _ratio(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Median, least and most of the ratios of neighbouring samples."""
    ratios = [a / b for a, b in zip(ours["samples"], other["samples"], strict=True)]
    return {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
