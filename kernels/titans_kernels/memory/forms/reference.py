"""The token-by-token recurrence as in the paper, for any depth and any rule made of hooks.

Slow but readable: every other form is tested against it.

Shapes: B batch, T tokens, H heads, D input and F output width of a layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titans_kernels.memory.activations import ACTIVATIONS
from titans_kernels.memory.forms.documents import each_document
from titans_kernels.memory.options import Inputs, Layers, Options, Result, broadcast_gate, whole
from titans_kernels.memory.parts.passes import edge
from titans_kernels.memory.residual import predict, pull


def refusal(inputs: Inputs, weights: Layers, options: Options) -> str | None:
    """Return the reason for which the recurrence does not support a call, or None if it does."""
    return f"the rule {options.rule} computes chunks as a whole" if options.rule.has_own_chunk else None


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write and read every token (eqs. 12-16).

    Gradients flow through everything, including the inner gradient.
    """
    return each_document(_rows, inputs.to_state_dtype(), weights, momentum, options)


def _rows(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    rule, base, y = options.rule, options.base, []
    W, S = weights, momentum  # with a base, W is the offset from it, which is what decays
    start, decay = W, torch.ones_like(inputs.alpha[:, 0])
    for t in range(inputs.q.shape[1]):
        q, k, v, *gates, extra = (x[:, t] for x in inputs)
        if t % options.chunk_size == 0:
            start, decay = W, torch.ones_like(decay)  # M_{t'} of eq. 16
        decay = (1 - gates[0]) * decay
        point = tuple(rule.gradient_point(V, _wide(decay, V)) for V in start)
        gradient = inner_gradient(whole(point, base), k, v, options, extra)  # of (12)
        own = extra[..., None, None].unbind(2)
        moved = [
            rule.update(V, M, g, *(_wide(gate, V) for gate in gates), *own)  # (13, 14)
            for V, M, g in zip(W, S, gradient, strict=True)
        ]
        W, S = (tuple(part) for part in zip(*moved, strict=True))
        read = W if rule.reads == "token" else start
        y.append(apply_memory(whole(read, base), q[:, :, None], options)[:, :, 0])  # (15)
    return torch.stack(y, 1), W, S


def _wide(gate: Tensor, W: Tensor) -> Tensor:
    """Shape a gate [B, H], or [B, H, A] per group of columns, to broadcast over weights [B, H, D, F]."""
    return broadcast_gate(gate, W.shape[-1], gate.ndim == W.ndim - 1)


def apply_memory(weights: Layers, x: Tensor, options: Options) -> Tensor:
    """M(x): the memory's MLP at full weights [B, H, D, F], with its residual; x and the result [B, H, T, D].

    Or, with weights of each token [B, H, T, D, F], of x [B, H, T, 1, D].
    """
    f, hidden = ACTIVATIONS[options.activation], x
    for W in weights[:-1]:
        hidden = f.value(hidden @ W)
    return predict(options.residual, x, hidden @ weights[-1])


def inner_gradient(weights: Layers, k: Tensor, v: Tensor, options: Options, extra: Tensor) -> Layers:
    """Gradient of the rule's inner loss for one token k, v [B, H, D], each [B, H, D, F]."""
    own = extra[:, :, None].unbind(-1)
    error = lambda prediction, v: options.rule.error(prediction, v, *own)  # noqa: E731
    inputs, errors = surprise(weights, k[:, :, None], v[:, :, None], options, error)
    return tuple(x.mT @ d for x, d in zip(inputs, errors, strict=True))


def surprise(
    weights: Layers, k: Tensor, v: Tensor, options: Options, error: Callable[[Tensor, Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Input X and error d [B, H, T, D] of each layer; the gradient of token t is ``X_t^T d_t``.

    ``error`` is the gradient of the inner loss with respect to the prediction. The norm of each token's error
    is bounded at every layer (`Options.surprise_bound`).
    """
    f, bound, residual = ACTIVATIONS[options.activation], options.surprise_bound, options.residual
    inputs, z = [k], []
    for W in weights[:-1]:
        z.append(inputs[-1] @ W)
        inputs.append(f.value(z[-1]))
    last = inputs[-1] @ weights[-1]
    errors = [clip_norm(pull(residual, error(predict(residual, k, last), v), last), bound)]
    for W, out in zip(reversed(weights), reversed(z), strict=False):
        errors.insert(0, clip_norm(f.through(errors[0] @ W.mT, out), bound))
    return inputs, errors


def clip_norm(d: Tensor, bound: float | None) -> Tensor:
    """d min(1, c / |d|), with the norm over the last dimension; unchanged without a bound, and at |d| = c."""
    if bound is None:
        return d
    squares = d.square().sum(-1, keepdim=True)
    # masked before the square root, whose infinite slope at 0 would give NaN gradients
    over = squares > (bound + bound * edge(d)) ** 2
    return d * torch.where(over, bound / torch.where(over, squares, 1).sqrt(), 1)
