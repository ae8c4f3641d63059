"""Times of a forward and a backward pass, several subjects interleaved, so that drift of the machine
affects all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

WARM_UP = 3
FLUSH_BYTES = 2**28
"""Bytes written between two passes: larger than any cache, so that each reads its inputs from memory."""
FEWEST = 3
BUDGET_SECONDS = 10.0
"""An op that has taken so long, and ``FEWEST`` rounds, is not timed again."""

Within = Callable[[], AbstractContextManager[object]]


class Op(NamedTuple):
    """An operation to time."""

    forward: Callable[[], Tensor]
    """Computes the output to differentiate."""
    leaves: list[Tensor]
    """The tensors the gradient is taken with respect to."""
    within: Within = nullcontext
    """Makes the context that both passes run in."""

    def backward(self, y: Tensor, dy: Tensor) -> object:
        """Gradients of all leaves."""
        return torch.autograd.grad(y, self.leaves, dy, allow_unused=True)


class Clock:
    """Seconds of a call: by CUDA events on a GPU, by the wall clock elsewhere.

    ``flush`` empties the caches before each call, at the price of a buffer as large as they are.
    """

    def __init__(self, device: torch.device, flush: bool = True):
        self.on_gpu = device.type == "cuda"
        size = FLUSH_BYTES if self.on_gpu else FLUSH_BYTES // 8
        self._flush = torch.empty(size * flush, dtype=torch.uint8, device=device)

    def time(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Call ``call`` and return its result and its duration in seconds."""
        self._flush.zero_()
        return (self._by_events if self.on_gpu else self._by_wall)(call)

    def _by_wall(self, call: Callable[[], Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        result = call()
        return result, time.perf_counter() - start

    def _by_events(self, call: Callable[[], Any]) -> tuple[Any, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return result, start.elapsed_time(end) / 1e3

    def median(self, call: Callable[[], Any], repeats: int = 10) -> float:
        """Return the median time of several calls after a warm-up."""
        for _ in range(WARM_UP):
            call()
        return median(self.time(call)[1] for _ in range(repeats))


@dataclass
class Samples:
    """Seconds of each round."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    @property
    def steps(self) -> list[float]:
        """Both passes of each round."""
        return [a + b for a, b in zip(self.forward, self.backward, strict=True)]


class Runner:
    """An op in this process, the gradient of its output, and its samples."""

    def __init__(self, op: Op, clock: Clock, warm_up: int = WARM_UP):
        self.op, self.clock, self.samples = op, clock, Samples()
        with op.within():
            y = op.forward()
        if not y.isfinite().all():
            raise ValueError("its output is not finite")
        self.dy = torch.randn_like(y)
        for _ in range(warm_up):
            self.passes()

    def passes(self) -> tuple[float, float]:
        """Seconds of one forward and one backward pass."""
        with self.op.within():
            y, forward = self.clock.time(self.op.forward)
            _, backward = self.clock.time(lambda: self.op.backward(y, self.dy))
        return forward, backward

    @property
    def done(self) -> bool:
        """True if its time is used up."""
        steps = self.samples.steps
        return len(steps) >= FEWEST and sum(steps) > BUDGET_SECONDS

    def turn(self) -> None:
        """Time one more round."""
        forward, backward = self.passes()
        self.samples.forward.append(forward)
        self.samples.backward.append(backward)

    def in_graph(self, repeats: int) -> list[float]:
        """Seconds of both passes replayed from one CUDA graph, that is without launch overhead."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = self._step()
        for _ in range(WARM_UP):
            graph.replay()
        times = [self.clock.time(graph.replay)[1] for _ in range(repeats)]
        del kept
        return times

    def _step(self) -> tuple[Tensor, object]:
        with self.op.within():
            y = self.op.forward()
            return y, self.op.backward(y, self.dy)


class Timed(Protocol):
    """An op that can be timed in turn with others: here (`Runner`), or in a process (`TimingProcess`)."""

    samples: Samples

    @property
    def done(self) -> bool:
        """True if its time is used up."""
        ...

    def turn(self) -> None:
        """Time one more round."""
        ...


T = TypeVar("T", bound=Timed)


class Interleaved(Generic[T]):
    """Several subjects timed in turns; one that fails is dropped, and ``failed`` has the reason."""

    def __init__(self, makers: dict[str, Callable[[], T]]):
        self.runners: dict[str, T] = {}
        self.failed: dict[str, str] = {}
        for name, make in makers.items():
            with self._dropping(name):
                self.runners[name] = make()

    def run(self, repeats: int, progress: Callable[[str], None] = lambda message: None) -> None:
        """Time each ``repeats`` times."""
        for i in range(repeats):
            progress(f"round {i + 1} of {repeats}")
            names = list(self.runners)
            # another one begins each round
            for name in names[i % max(1, len(names)) :] + names[: i % max(1, len(names))]:
                if not self.runners[name].done:
                    with self._dropping(name):
                        self.runners[name].turn()

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # a subject that cannot run is a result
            self.failed[name] = reason(error)
            self.runners.pop(name, None)
            torch.cuda.empty_cache()


class Failed(RuntimeError):
    """A subject could not be timed; the message alone says why."""


def reason(error: Exception) -> str:
    """Describe an exception in one short line."""
    if isinstance(error, Failed):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:200]
