"""Validation of the operator's arguments; errors are one line that starts with the argument's name."""

from __future__ import annotations

import torch
from torch import Tensor

from titans_kernels.memory.activations import ACTIVATIONS
from titans_kernels.memory.options import Layers, state_dtype
from titans_kernels.memory.parts.layout import document_borders
from titans_kernels.memory.residual import Residual
from titans_kernels.memory.rules import Rule


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, gates: Layers, weights: Layers, momentum: Layers | None,
    cu_seqlens: Tensor | None = None,
) -> int:  # fmt: skip
    """Return the number of documents. Raises ValueError on the first invalid shape."""
    B, T, H, _ = q.shape
    if 0 in (B, T, H):
        raise ValueError(f"q: no rows, tokens or heads ([B, T, H] = {(B, T, H)})")
    if not weights:
        raise ValueError("weights: a memory needs at least one layer")
    for name, x in (("k", k), ("v", v)):
        if x.shape[:3] != (B, T, H):
            raise ValueError(f"{name}: shape {tuple(x.shape)} does not start with [B, T, H] = {(B, T, H)}")
    for name, x in zip(("alpha", "eta", "theta"), gates, strict=True):
        if (x.shape[:3] if x.ndim == 4 else x.shape) != (B, T, H):
            raise ValueError(f"{name}: shape {tuple(x.shape)} is not [B, T, H] = {(B, T, H)}")
        if x.ndim == 4:
            _check_groups(name, x.shape[-1], gates, weights)
    documents = B if cu_seqlens is None else _check_cu_seqlens(B, T, cu_seqlens)
    widths = [q.shape[-1], *(W.shape[-1] for W in weights)]
    if k.shape[-1] != widths[0] or v.shape[-1] != widths[-1]:
        raise ValueError("k, v: widths must be the first layer's input width and the last one's output width")
    for kind, layers in (("weights", weights), ("momentum", momentum or weights)):
        if len(layers) != len(weights):
            raise ValueError(f"{kind}: {len(layers)} layers, but weights has {len(weights)}")
        for l, x in enumerate(layers):
            fits = ((H, *widths[l : l + 2]), (documents, H, *widths[l : l + 2]))
            if not any(x.shape == fit for fit in fits):
                raise ValueError(f"{kind}[{l}]: shape {tuple(x.shape)} is not {fits[0]} or {fits[1]}")
    return documents


def _check_groups(name: str, groups: int, gates: Layers, weights: Layers) -> None:
    """Raise ValueError unless each gate has ``groups`` groups of columns or one, and all layers fit."""
    if wrong := [W.shape[-1] for W in weights if W.shape[-1] % max(groups, 1)]:
        raise ValueError(f"{name}: {groups} groups of columns, which {wrong[0]} columns do not divide into")
    if wrong := [x.shape[-1] for x in gates if x.ndim == 4 and x.shape[-1] not in (1, groups) and groups > 1]:
        raise ValueError(f"{name}: {groups} groups of columns, another gate has {wrong[0]}")


def check_gates(rule: Rule, gates: Tensor | None, eta: Tensor) -> None:
    """Raise ValueError unless ``gates`` are the rule's own."""
    shape, expected = None if gates is None else tuple(gates.shape), (*eta.shape[:3], rule.extra_gates)
    if shape != expected and (shape or rule.extra_gates):
        raise ValueError(
            f"extension.gates: shape {shape} is not [B, T, H, E] = {expected} for the rule {rule}"
        )


def _check_cu_seqlens(B: int, T: int, cu_seqlens: Tensor) -> int:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: {kind} is not a tensor of int32 or int64")
    if cu_seqlens.ndim != 1:
        raise ValueError(f"cu_seqlens: shape {tuple(cu_seqlens.shape)} is not [N + 1]")
    if B != 1:
        raise ValueError(f"cu_seqlens: packed documents need B = 1, not {B}")
    if not (torch.compiler.is_compiling() or cu_seqlens.is_meta):  # the values are checked when the form runs
        document_borders(cu_seqlens, T)
    return cu_seqlens.shape[0] - 1


def check_residual(residual: Residual | None, q: Tensor, v: Tensor) -> Residual | None:
    """Return the residual in the dtype of the state. Raises ValueError if it does not match q and v."""
    if residual is None:
        return None
    if (residual.weight is None) != (residual.bias is None):
        raise ValueError("residual: LN needs a weight and a bias, or neither")
    if q.shape[-1] != v.shape[-1]:
        raise ValueError(f"residual: x + f(x) of widths {q.shape[-1]} and {v.shape[-1]}")
    for name, x in zip(("weight", "bias"), residual.norm, strict=False):
        if x.shape != q.shape[2:]:
            raise ValueError(
                f"residual: {name} of shape {tuple(x.shape)} is not [H, D] = {tuple(q.shape[2:])}"
            )
    return residual.to(state_dtype(q))


def check_base(base: Layers | None, weights: Layers) -> Layers:
    """Return the base in the weights' dtype, () for None. Raises ValueError if it does not match them."""
    if base is None:
        return ()
    if len(base) != len(weights):
        raise ValueError(f"base: {len(base)} layers, but weights has {len(weights)}")
    for l, (B, W) in enumerate(zip(base, weights, strict=True)):
        if B.shape != W.shape[-3:]:
            raise ValueError(
                f"base[{l}]: shape {tuple(B.shape)} is not [H, D_in, D_out] = {tuple(W.shape[-3:])}"
            )
    return tuple(B.to(W.dtype) for B, W in zip(base, weights, strict=True))


def check_options(chunk_size: int, activation: str, bound: float | None) -> None:
    """Raise TypeError or ValueError on an invalid option."""
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
        raise TypeError(f"chunk_size: {chunk_size!r} is not a whole number")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: {chunk_size} must be at least 1")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if bound is None:
        return
    if not isinstance(bound, (int, float)) or isinstance(bound, bool):
        raise TypeError(f"surprise_bound: {bound!r} is not a number")
    if not bound > 0:  # nan is not above 0 either
        raise ValueError(f"surprise_bound: {bound} must be above 0, or None for no bound")
