"""What is timed: a memory layer, ours or another's, from its input to its output and back.

Runs in a process of its own, see `worker`, so that each has its own peak memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from titans_kernels.bench.work import flops

PEER = "titans-pytorch"


@dataclass(frozen=True)
class Shape:
    """The memory measured: ``heads`` MLPs of ``depth`` layers, hidden layers ``expansion`` times as wide."""

    batch: int = 2
    heads: int = 4
    head_dim: int = 64
    expansion: int = 4
    depth: int = 2
    chunk_size: int = 64

    @property
    def widths(self) -> list[int]:
        """Widths of a head's MLP, input first."""
        return [self.head_dim, *[self.expansion * self.head_dim] * (self.depth - 1), self.head_dim]

    def operator_flops(self) -> int:
        """Products of the parallel form a token, forward and backward; what is found again is not counted."""
        work = flops(list(pairwise(self.widths)), self.chunk_size)
        return self.heads * (work["forward"] + work["backward"] - work["again"])


@dataclass(frozen=True)
class Subject:
    """One thing to time, and all a process needs to build it."""

    kind: str
    """layer, operator, or the name of a peer."""
    length: int
    shape: Shape
    threads: int
    peer_chunk: int = 64
    """The peer's chunk_size: how many tokens share one step; its batch_size is our chunk_size."""


Step = Callable[[], Tensor]


def build(subject: Subject) -> Step:
    """A forward and backward pass; what it returns must be finite."""
    torch.manual_seed(0)
    makers = {"layer": _layer, "operator": _operator, PEER: _titans_pytorch}
    return makers[subject.kind](subject)


def matmul_rate(shape: Shape, seconds: float = 0.1) -> float:
    """FLOP/s of batched matmul on the operator's own sizes: the best of what fits in ``seconds``."""
    rows, (D, F) = shape.batch * shape.heads, shape.widths[:2]
    x, W = torch.randn(rows, shape.chunk_size, D), torch.randn(rows, D, F)
    out, best, end = x @ W, float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(10):
            torch.bmm(x, W, out=out)
        best = min(best, (time.perf_counter() - start) / 10)
    return 2 * rows * shape.chunk_size * D * F / best


def _layer(subject: Subject) -> Step:
    from titans_core import MemoryConfig, NeuralMemory
    from titans_core.init import initialize

    s = subject.shape
    config = MemoryConfig(
        depth=s.depth, heads=s.heads, head_dim=s.head_dim, expansion=s.expansion, chunk_size=s.chunk_size
    )
    layer = NeuralMemory(s.heads * s.head_dim, config)
    initialize(layer, n_layers=1)
    return partial(_step_layer, layer, _input(subject))


def _titans_pytorch(subject: Subject) -> Step:
    from titans_pytorch import NeuralMemory  # pyright: ignore[reportMissingImports]

    s = subject.shape
    layer = NeuralMemory(
        dim=s.heads * s.head_dim,
        heads=s.heads,
        dim_head=s.head_dim,
        chunk_size=subject.peer_chunk,
        batch_size=s.chunk_size,
        # at its own default of 1 it is NaN from the start
        default_step_transform_max_lr=0.01,
        default_model_kwargs={"depth": s.depth, "expansion_factor": float(s.expansion)},
    )
    return partial(_step_layer, layer, _input(subject))


def _input(subject: Subject) -> Tensor:
    shape = subject.shape
    return torch.randn(shape.batch, subject.length, shape.heads * shape.head_dim, requires_grad=True)


def _step_layer(layer: nn.Module, x: Tensor) -> Tensor:
    loss = layer(x)[0].square().sum()
    loss.backward()
    return loss.detach()


def _operator(subject: Subject) -> Step:
    from titans_kernels import neural_memory

    s = subject.shape
    tokens = (s.batch, subject.length, s.heads)
    unit = lambda: nn.functional.normalize(torch.randn(*tokens, s.head_dim), dim=-1)  # noqa: E731
    gates = [scale * torch.rand(tokens) for scale in (0.05, 0.9, 0.1)]
    q, k, v, alpha, eta, theta = (x.requires_grad_() for x in (unit(), unit(), unit(), *gates))
    pairs = zip(s.widths, s.widths[1:], strict=False)
    weights = tuple((torch.randn(s.heads, *pair) / pair[0] ** 0.5).requires_grad_() for pair in pairs)

    def step() -> Tensor:
        y, _ = neural_memory(q, k, v, alpha, eta, theta, weights, chunk_size=s.chunk_size, surprise_bound=1.0)
        loss = y.square().sum()
        loss.backward()
        return loss.detach()

    return step
