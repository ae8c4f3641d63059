"""The public operator: checks its input, fills in what was left out, chooses the backend."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory import chunked, reference
from titans_kernels.memory.activations import ACTIVATIONS
from titans_kernels.memory.options import Inputs, Layers, Options

BACKENDS = ("auto", "reference", "chunked", "triton")


class MemoryState(NamedTuple):
    """The memory after some tokens: per layer its weights and momentum, [B, H, D_in, D_out], float32."""

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]

    def detach(self) -> MemoryState:
        """The same state, cut from the graph."""
        return MemoryState(*(tuple(x.detach() for x in part) for part in self))


def neural_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    weights: tuple[Tensor, ...],
    momentum: tuple[Tensor, ...] | None = None,
    *,
    chunk_size: int = 64,
    activation: str = "silu",
    surprise_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, MemoryState]:
    """Write each token into the memory and read it back (eqs. 12-16).

    Each token takes one step of gradient descent on ``||M(k_t) - v_t||^2`` with momentum eta_t, step
    theta_t and weight decay alpha_t, its gradient at the weights that stood when its chunk began; the read
    ``y_t = M_t(q_t)`` uses the weights after token t.

    Args:
        q, k, v: [B, T, H, D]; the width of v is that of the last layer's output.
        alpha, eta, theta: [B, T, H]; alpha, eta in [0, 1], theta >= 0.
        weights: L tensors [H, D_in, D_out], shared by the batch, or [B, H, D_in, D_out].
        momentum: the same shapes, or None for zeros.
        chunk_size: the paper's b; 1 is the exact online rule. Changes the result.
        activation: silu, gelu or identity, between layers.
        surprise_bound: c; each token's error signal is scaled to norm at most c at every layer.
        cu_seqlens: [N + 1] int, borders of N documents packed into B = 1; each starts from the given
            weights and momentum (which may then have N in place of B), and so has the returned state.
        backend: "auto", "reference", "chunked" or "triton".

    Returns:
        y [B, T, H, D] in q's dtype and the state after the last token. States are float32 (float64 for
        float64 input). Passing a returned state continues exactly where the cut is on a chunk border.

    Raises:
        ValueError: a shape, name or size that does not fit, named.
    """
    documents = _check(q, k, v, (alpha, eta, theta), weights, momentum, chunk_size, cu_seqlens)
    _check_names(activation, backend, surprise_bound)
    dtype = _state_dtype(q)
    inputs = Inputs(*(x.to(dtype) for x in (q, k, v, alpha, eta, theta)))
    weights = _per_document(weights, documents, dtype)
    momentum = _per_document(momentum, documents, dtype) if momentum else _zeros_like(weights)
    form = reference if backend == "reference" else chunked
    options = Options(chunk_size, activation, surprise_bound, cu_seqlens)
    # the state is float32 whatever autocast would make of the products
    with torch.autocast(q.device.type, enabled=False):
        y, weights, momentum = form.forget_and_learn(inputs, weights, momentum, options)
    return y.to(q.dtype), MemoryState(weights, momentum)


def read_memory(q: Tensor, weights: tuple[Tensor, ...], *, activation: str = "silu") -> Tensor:
    """M(q) without a write: q [B, T, H, D], weights [B, H, D_in, D_out] or [H, D_in, D_out]."""
    layers = tuple(W.to(_state_dtype(q)) for W in weights)
    with torch.autocast(q.device.type, enabled=False):
        y = reference.apply_memory(layers, q.to(_state_dtype(q)).transpose(1, 2), ACTIVATIONS[activation])
    return y.transpose(1, 2).to(q.dtype)


def _state_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _per_document(layers: Layers, documents: int, dtype: torch.dtype) -> Layers:
    return tuple((x if x.ndim == 4 else x.expand(documents, *x.shape)).to(dtype) for x in layers)


def _zeros_like(layers: Layers) -> Layers:
    return tuple(torch.zeros_like(x) for x in layers)


def _check_names(activation: str, backend: str, bound: float | None) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    if backend == "triton":
        raise ValueError("backend: triton has no kernel yet; use auto, which takes chunked")
    if bound is not None and bound <= 0:
        raise ValueError(f"surprise_bound: {bound} must be above 0, or None for no bound")


def _check(q, k, v, gates, weights, momentum, chunk_size, cu_seqlens) -> int:
    """Returns the number of documents; raises ValueError on the first thing that does not fit."""
    B, T, H, _ = q.shape
    if T == 0:
        raise ValueError("q: no tokens (T = 0)")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: {chunk_size} must be at least 1")
    if not weights:
        raise ValueError("weights: a memory needs at least one layer")
    for name, x in (("k", k), ("v", v)):
        if x.shape[:3] != (B, T, H):
            raise ValueError(f"{name}: shape {tuple(x.shape)} does not start with [B, T, H] = {(B, T, H)}")
    for name, x in zip(("alpha", "eta", "theta"), gates, strict=True):
        if x.shape != (B, T, H):
            raise ValueError(f"{name}: shape {tuple(x.shape)} is not [B, T, H] = {(B, T, H)}")
    documents = B if cu_seqlens is None else _check_borders(B, T, cu_seqlens)
    widths = [q.shape[-1], *(W.shape[-1] for W in weights)]
    if k.shape[-1] != widths[0] or v.shape[-1] != widths[-1]:
        raise ValueError("k, v: widths must be those of the first layer's input and the last one's output")
    for kind, layers in (("weights", weights), ("momentum", momentum or weights)):
        if len(layers) != len(weights):
            raise ValueError(f"{kind}: {len(layers)} layers, but weights has {len(weights)}")
        for l, x in enumerate(layers):
            fits = ((H, widths[l], widths[l + 1]), (documents, H, widths[l], widths[l + 1]))
            if tuple(x.shape) not in fits:
                raise ValueError(f"{kind}[{l}]: shape {tuple(x.shape)} is not {fits[0]} or {fits[1]}")
    return documents


def _check_borders(B: int, T: int, cu_seqlens: Tensor) -> int:
    if B != 1:
        raise ValueError(f"cu_seqlens: packed documents need B = 1, not {B}")
    borders = cu_seqlens.tolist()
    rising = all(a < b for a, b in pairwise(borders))
    if len(borders) < 2 or borders[0] != 0 or borders[-1] != T or not rising:
        raise ValueError(f"cu_seqlens: must rise from 0 to T = {T} without empty documents")
    return len(borders) - 1
