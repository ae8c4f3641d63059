"""Compilation of blocks that go over a row in segments: MAC."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from titans_core.blocks.base import Block, Positions
from titans_core.documents import Documents


class Graphs(NamedTuple):
    """Stands for the call of a compiled block, whose loop over segments runs as it is."""

    call: Callable[..., Any]
    open: Callable[..., Any]
    segment: Callable[..., Any]

    def __call__(self, *inputs: Any) -> Any:
        """Call the block, hooks included."""
        return self.call(*inputs)


class Segmented(Block):
    """A block whose `mix` loops over segments, compiled to one graph that serves all of them.

    A graph of the whole row would grow with it, and take minutes to compile. For one to serve all, the states
    that segments are given are alike: contiguous, in need of gradients, with a row for each document.
    """

    @abstractmethod
    def open(self, like: Tensor, state: Any) -> tuple[Any, Any]:
        """Return what all segments attend to, and ``state``; for None a new one with the rows of ``like``."""

    @abstractmethod
    def segment(
        self, x_BTD: Tensor, state: Any, prefix: Any, documents: Documents | None
    ) -> tuple[Tensor, Any]:
        """Process a segment, or the segments of packed documents, and return the state after it."""

    def compile(self, *args: Any, **options: Any) -> None:
        graphs = (torch.compile(call, *args, **options) for call in (self._open, self._segment))
        self._compiled_call_impl = Graphs(self._call_impl, *graphs)

    @property
    def graphs(self) -> Graphs | None:
        """The graphs that `compile` made."""
        return cast("Graphs | None", self._compiled_call_impl)

    def forward(self, x_BTD: Tensor, state: Any, positions: Positions) -> tuple[Tensor, Any]:
        # what is selected is recomputed in the graph of a segment
        selective = self.graphs is not None and self.recompute == "selective"
        return (self._forward if selective else super().forward)(x_BTD, state, positions)

    def feed(self, x_BTD: Tensor) -> Tensor:
        if self.graphs is not None:  # a segment's graph has it
            return x_BTD
        return super().feed(x_BTD)

    def opened(self, x_BTD: Tensor, state: Any, documents: Documents | None) -> tuple[Any, Any]:
        """Call `open`, compiled if the block is; all packed documents start from one row."""
        if self.graphs is None:
            return self.open(x_BTD if documents is None else x_BTD[:1], state)
        like = x_BTD
        if documents is not None and documents.segments is not None:
            # in a graph a row each, as later ones have
            like = documents.segments.steps[0].cu_seqlens[1:]
            torch._dynamo.maybe_mark_dynamic(like, 0)
        prefix, start = self.graphs.open(like)
        return prefix, state or start

    def step(
        self, x_BTD: Tensor, state: Any, prefix: Any, documents: Documents | None = None,
        following: Tensor | None = None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Call `segment`, compiled if the block is: then the feed-forward layer is in its graph.

        ``following`` are the borders of the packed documents' next segments.
        """
        if self.graphs is None:
            return self.segment(x_BTD, state, prefix, documents)
        grads, dynamic = torch.is_grad_enabled(), torch._dynamo.maybe_mark_dynamic
        state = each_tensor(state, lambda x: x if x.requires_grad else x.detach().requires_grad_(grads))
        if documents is not None:
            dynamic(x_BTD, 1)
            each_tensor(state, lambda x: dynamic(x, 0))
            each_tensor((documents, following), lambda x: dynamic(x, x.ndim - 1))
        return self.graphs.segment(x_BTD, state, prefix, documents, following)

    def _open(self, like: Tensor) -> tuple[Any, Any]:
        prefix, state = self.open(like, None)
        return prefix, each_tensor(state, _contiguous)

    def _segment(self, *inputs: Any) -> tuple[Tensor, Any]:
        return self.recomputed(self._part, *inputs) if self.recompute == "selective" else self._part(*inputs)

    def _part(
        self, x_BTD: Tensor, state: Any, prefix: Any, documents: Documents | None, following: Tensor | None
    ) -> tuple[Tensor, Any]:
        y_BTD, state = self.segment(x_BTD, state, prefix, documents)
        if following is not None:
            state = first_rows(state, following)
        return super().feed(y_BTD), each_tensor(state, _contiguous)


def first_rows(state: Any, borders: Tensor) -> Any:
    """Return the state of the documents that continue, in a segment with these borders."""
    return each_tensor(state, lambda x: x[: len(borders) - 1])


def each_tensor(state: Any, change: Callable[[Tensor], Any]) -> Any:
    """Change the tensors of a state."""
    return tree_map(lambda x: change(x) if isinstance(x, Tensor) else x, state)


def _contiguous(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
