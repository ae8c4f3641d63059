"""Batches made ahead of the steps that take them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

AHEAD = 2
"""Batches that wait, or are being made, while a step runs."""


class Stream(Protocol):
    """Batches, each a NamedTuple of tensors [B, ...], as a function of the step alone."""

    def batch(self, step: int) -> Any: ...


class _Steps(Dataset[Any]):
    def __init__(self, stream: Stream):
        self.stream = stream

    def __getitem__(self, step: int) -> Any:
        return self.stream.batch(step)


def batches_ahead(stream: Stream, steps: range, device: torch.device) -> Generator[Any, None, None]:
    """The batches of ``steps`` in order, made in a thread; in pinned memory for a GPU.

    A thread and not DataLoader's processes: a batch is a few reads of mapped files, and forking a process
    that runs Ray's threads is unsafe. What the stream raises is raised here, at its step. Close the
    iterator to end the thread.
    """
    pinned = device.type == "cuda"
    # a generator of its own: DataLoader would draw its seed from the run's
    own = torch.Generator()
    loader = DataLoader(_Steps(stream), batch_size=None, sampler=steps, pin_memory=pinned, generator=own)
    made = iter(loader)
    thread = ThreadPoolExecutor(1, "loader", _on_device, (device,))
    waiting = deque(thread.submit(next, made) for _ in steps[:AHEAD])
    try:
        for left in range(len(steps), 0, -1):
            batch = waiting.popleft().result()
            if left > AHEAD:
                waiting.append(thread.submit(next, made))
            yield batch
    finally:
        thread.shutdown(cancel_futures=True)


def _on_device(device: torch.device) -> None:
    """Pinning is done for the current device, which a new thread takes to be the first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
