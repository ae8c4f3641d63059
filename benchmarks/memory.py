"""The memory layer's speed and memory on a CPU, for `titans bench memory`.

What is timed, the subjects, is here; how it is checked, timed and interleaved is `titans_kernels.bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from titans_kernels.bench.check import judge
from titans_kernels.bench.inputs import make
from titans_kernels.bench.machine import ceilings, describe
from titans_kernels.bench.peers import titans_pytorch, versions
from titans_kernels.bench.process import Worker
from titans_kernels.bench.shapes import Shape
from titans_kernels.bench.timing import Clock, Interleaved, Op
from titans_kernels.bench.work import flops
from titans_platform.errors import TitansError, UsageError

PEER = "titans-pytorch"
PEER_REQUIREMENT = "titans-pytorch==0.5.5"
EXACT_LENGTH = 256
"""Up to this length the peer takes one step a token, as we do; longer ones take too much memory."""
LONGEST_PEER = 4096
"""Beyond it the peer needs 10 GB; there, we are compared with ourselves at the base length."""
BASE_LENGTH = 1024
SHAPE = Shape("layer", 2, 64, 256, 2, BASE_LENGTH, heads=4, bound=1.0)
QUICK = Shape("quick", 2, 16, 16, 1, BASE_LENGTH, chunk_size=16, heads=2, bound=1.0)
CPU = torch.device("cpu")

Progress = Callable[[str], None]


def layer(**sizes: Any) -> Op:
    """Our layer, `titans_core.NeuralMemory`, from x [B, T, heads * head_dim] to y."""
    from titans_core import MemoryConfig, NeuralMemory
    from titans_core.init import initialize

    s = Shape(**sizes)
    config = MemoryConfig(
        depth=s.depth, heads=s.heads, head_dim=s.head_dim, expansion=s.hidden // s.head_dim,
        chunk_size=s.chunk_size,
    )  # fmt: skip
    module = NeuralMemory(s.heads * s.head_dim, config)
    initialize(module, n_layers=1)
    x = torch.randn(s.batch, s.length, s.heads * s.head_dim, requires_grad=True)
    return Op(lambda: module(x)[0], [x, *module.parameters()])


def operator(**sizes: Any) -> Op:
    """Our operator alone, `titans_kernels.neural_memory`."""
    inputs = make(Shape(**sizes), torch.float32, CPU, seed=0)
    return Op(lambda: inputs.call("auto")[0], inputs.leaves)


def peer(chunk: int, **sizes: Any) -> Op:
    """The layer of titans-pytorch; ``chunk`` is its chunk_size, its batch_size is our chunk_size."""
    return titans_pytorch(Shape(**sizes), chunk, renewed=True)


def run(
    lengths: list[int], pairs: int, threads: int, *, shape: Shape = SHAPE, against: str | None = None,
    progress: Progress = lambda message: None,
) -> dict[str, Any]:  # fmt: skip
    """Check the operator, then time each length forward and backward in ``pairs`` interleaved rounds.

    Raises:
        UsageError: ``against`` is no known peer, or is not installed.
        TitansError: the operator is wrong, or one of our subjects failed.
    """
    version = _peer_version(against) if against else None
    progress("checking the operator against its reference")
    verdict = judge(shape.short(), "reference", torch.float32, CPU).verdict(lambda x: x.call("auto"))
    if not verdict.green:
        raise TitansError(f"the operator is not right, so it is not timed: {verdict}")
    progress("measuring the machine's matmul rate")
    torch.set_num_threads(threads)
    machine, rates = describe(CPU, None), ceilings(Clock(CPU), torch.float32, CPU)
    of_lengths = [_subjects(replace(shape, length=length), against) for length in lengths]
    rows = [_row(subjects, pairs, threads, rates["matmul"], progress) for subjects in of_lengths]
    return {
        "shape": {**_sizes(shape), "threads": threads, "pairs": pairs, "base_length": BASE_LENGTH},
        "machine": machine | {"ceilings": rates},
        "peer": {"name": against, "version": version} if against else None,
        "operator_error": verdict.errors[verdict.worst],
        "rows": rows,
    }


def _peer_version(name: str) -> str:
    if name != PEER:
        raise UsageError(f"--against: {name!r} is not known; there is {PEER}")
    if name not in (found := versions()):
        raise UsageError(f"--against: {PEER} is not installed; pip install {PEER_REQUIREMENT}")
    return found[name]


def _sizes(shape: Shape) -> dict[str, Any]:
    return {name: value for name, value in vars(shape).items() if name not in ("targets", "small", "beside")}


class Subject(NamedTuple):
    """One thing to time: the function above that builds it, at a shape."""

    kind: str
    shape: Shape
    more: Mapping[str, int] = MappingProxyType({})

    def start(self, threads: int) -> Worker:
        """A process that times it."""
        label = f"{PEER if self.kind == 'peer' else self.kind} at T = {self.shape.length}"
        return Worker(f"{__name__}:{self.kind}", _sizes(self.shape) | dict(self.more), threads, label)


def _subjects(shape: Shape, against: str | None) -> dict[str, Subject]:
    """What a row of the table compares."""
    subjects = {"ours": Subject("layer", shape), "operator": Subject("operator", shape)}
    if against and shape.length <= LONGEST_PEER:
        chunk = 1 if shape.length <= EXACT_LENGTH else shape.chunk_size
        subjects["peer"] = Subject("peer", shape, {"chunk": chunk})
    if shape.length > LONGEST_PEER:
        subjects["base"] = Subject("layer", replace(shape, length=BASE_LENGTH))
    return subjects


def _row(
    subjects: dict[str, Subject], pairs: int, threads: int, matmul: float, progress: Progress
) -> dict[str, Any]:
    shape = subjects["ours"].shape
    with ExitStack() as stack:

        def started(subject: Subject) -> Worker:
            return stack.enter_context(subject.start(threads))

        rounds = Interleaved({name: partial(started, subject) for name, subject in subjects.items()})
        rounds.run(pairs, lambda message: progress(f"T = {shape.length}, {message}"))
    if failed := [why for name, why in rounds.failed.items() if name != "peer"]:
        raise TitansError(failed[0])
    row: dict[str, Any] = {"length": shape.length, "peer_failed": rounds.failed.get("peer")}
    row |= {name: _summary(subjects[name], worker) for name, worker in rounds.runners.items()}
    work = flops(shape.pairs, shape.chunk_size)
    # what the backward computes again is not counted
    least = shape.heads * (work["forward"] + work["backward"] - work["again"])
    share = row["operator"]["tokens_per_second"] * least / matmul
    row["operator"] |= {"matmul_gflops": matmul / 1e9, "share_of_matmul": share}
    for other in row.keys() & {"peer", "base"}:
        row[f"times_{other}"] = _ratio(row["ours"], row[other])
    return row


def _summary(subject: Subject, worker: Worker) -> dict[str, Any]:
    speeds = [subject.shape.batch * subject.shape.length / seconds for seconds in worker.samples.steps]
    summary = {"tokens_per_second": median(speeds), "samples": speeds, "peak_mb": worker.peak_bytes / 2**20}
    return summary | ({"chunk_size": subject.more["chunk"]} if subject.kind == "peer" else {})


def _ratio(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Median, least and most of the ratios of samples of one round."""
    ratios = [a / b for a, b in zip(ours["samples"], other["samples"], strict=True)]
    return {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
