"""Point-to-point transfer of the blocks' states, and of their gradients, between the workers of a row."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from titans_core.state import ModelState


class Relay:
    """Passes the state of each block from worker to worker. A model has one as ``relay`` during a call."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._before, self._after = (
            dist.get_global_rank(group, at) if 0 <= at < self.size else None
            for at in (self.rank - 1, self.rank + 1)
        )
        self._anchors: list[Tensor] = []

    def receive(self, state: Any, like: Tensor) -> Any:
        """Receive the next block's state from the previous worker; return ``state`` in the first."""
        if self._before is None:
            return state
        message: list[Any] = [None, None]
        dist.recv_object_list(message, self._before, self.group, device=like.device)
        leaves, spec = tree_flatten(message[0])
        differentiable: bool = message[1]
        sent = [x.empty(like.device) if isinstance(x, _Shape) else x for x in leaves]
        for x, described in zip(sent, leaves, strict=True):
            if isinstance(described, _Shape):
                dist.recv(x, self._before, self.group)
        if differentiable:
            places = _floating(sent)
            start = like.new_zeros((), requires_grad=True)
            *tied, zero = _Receive.apply(start, self._before, self.group, *(sent[i] for i in places))
            for i, x in zip(places, tied, strict=True):
                sent[i] = x
            # also a state that the block does not read has a gradient to send back
            self._anchors.append(zero)
        return tree_unflatten(sent, spec)

    def send(self, state: Any) -> None:
        """Pass the state of a block on; the last worker keeps it."""
        if self._after is None:
            return
        leaves = tree_leaves(state)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        differentiable = any(x.requires_grad for x in tensors)
        device = tensors[0].device if tensors else torch.device("cpu")
        described = [tree_map(_described, state), differentiable]
        dist.send_object_list(described, self._after, self.group, device=device)
        for x in tensors:
            dist.send(x.detach().contiguous(), self._after, self.group)
        if differentiable:
            floating = (leaves[i] for i in _floating(leaves))
            self._anchors.append(_Send.apply(self._after, self.group, *floating))

    def anchor(self, like: Tensor) -> Tensor:
        """Zero, with the gradient of all that was sent since the last call."""
        anchors, self._anchors = self._anchors, []
        return torch.stack(anchors).sum().to(like.dtype) if anchors else like.new_zeros(())

    def share(self, state: ModelState, device: torch.device) -> ModelState:
        """Broadcast the last worker's state to every worker."""
        last = dist.get_global_rank(self.group, self.size - 1)
        described = [tree_map(_described, state)]
        dist.broadcast_object_list(described, last, self.group, device=device)
        leaves, spec = tree_flatten(described[0])
        own = tree_leaves(state) if self.rank == self.size - 1 else leaves
        for i, (shape, x) in enumerate(zip(leaves, own, strict=True)):
            if isinstance(shape, _Shape):
                leaves[i] = shape.empty(device) if x is shape else x.contiguous()
                dist.broadcast(leaves[i], last, self.group)
        return tree_unflatten(leaves, spec)


class _Shape(tuple[torch.Size, torch.dtype]):
    """Shape and dtype of a tensor that follows."""

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self[0], dtype=self[1], device=device)


def _described(x: Any) -> Any:
    return _Shape((x.shape, x.dtype)) if isinstance(x, Tensor) else x


def _floating(leaves: list[Any]) -> list[int]:
    """Return the indices of the leaves that have a gradient if any has."""
    return [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]


class _Send(Function):
    """Zero; its gradient is the gradient of the tensors in the worker that received them."""

    @staticmethod
    def forward(ctx: Any, to: int, group: dist.ProcessGroup, *tensors: Tensor) -> Tensor:
        ctx.to, ctx.group, ctx.like = to, group, [(x.shape, x.dtype, x.device) for x in tensors]
        return tensors[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        gradients = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        for gradient in gradients:
            dist.recv(gradient, ctx.to, ctx.group)
        return None, None, *gradients


class _Receive(Function):
    """Tensors that were received, and zero; their gradient goes back to the worker they came from."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, source: int, group: dist.ProcessGroup, *tensors: Tensor) -> Any:
        ctx.source, ctx.group = source, group
        return *(x.view_as(x) for x in tensors), torch.zeros((), device=start.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        for gradient in gradients[:-1]:
            dist.send(gradient.contiguous(), ctx.source, ctx.group)
        return None, None, None, *(None for _ in gradients)
