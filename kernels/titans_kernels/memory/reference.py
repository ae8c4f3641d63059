"""The recurrence token by token, as the paper writes it. Slow, readable, any depth: the judge of the others.

Shapes: B batch, T tokens, H heads, D width of a head, F width of a hidden layer, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from titans_kernels.memory.activations import ACTIVATIONS, Activation
from titans_kernels.memory.layout import borders
from titans_kernels.memory.options import Inputs, Layers, Options, Result


def forget_and_learn(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write every token, read every token (eqs. 13-16).

    Gradients flow through everything, the inner gradient included.
    """
    inputs = inputs.wide()
    if options.cu_seqlens is None:
        return _rows(inputs, weights, momentum, options)
    results = []
    for i, (start, end) in enumerate(pairwise(borders(options.cu_seqlens, inputs.q.shape[1]))):
        document = Inputs(*(x[:, start:end] for x in inputs))
        W, S = (tuple(x[i : i + 1] for x in part) for part in (weights, momentum))
        results.append(_rows(document, W, S, options))
    y = torch.cat([result[0] for result in results], 1)
    return y, _joined([result[1] for result in results]), _joined([result[2] for result in results])


def _rows(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    f = ACTIVATIONS[options.activation]
    chunk_start, y = weights, []
    for t in range(inputs.q.shape[1]):
        if t % options.chunk_size == 0:
            chunk_start = weights  # M_{t'}: every gradient of the chunk is taken here (16)
        now = Inputs(*(x[:, t] for x in inputs))
        surprise = inner_gradient(chunk_start, now.k, now.v, f, options.surprise_bound)
        alpha, eta, theta = (gate[:, :, None, None] for gate in (now.alpha, now.eta, now.theta))
        momentum = tuple(eta * S - theta * g for S, g in zip(momentum, surprise, strict=True))  # (14)
        weights = tuple((1 - alpha) * W + S for W, S in zip(weights, momentum, strict=True))  # (13)
        y.append(apply_memory(weights, now.q[:, :, None], f)[:, :, 0])  # (15)
    return torch.stack(y, 1), weights, momentum


def _joined(documents: Sequence[Layers]) -> Layers:
    return tuple(torch.cat(layer) for layer in zip(*documents, strict=True))


def apply_memory(weights: Layers, x_BHTD: Tensor, f: Activation) -> Tensor:
    """M(x): the memory's MLP at given weights [B, H, D_in, D_out]; x and the result [B, H, T, D]."""
    for W in weights[:-1]:
        x_BHTD = f.value(x_BHTD @ W)
    return x_BHTD @ weights[-1]


def inner_gradient(
    weights: Layers, k_BHD: Tensor, v_BHD: Tensor, f: Activation, bound: float | None
) -> Layers:
    """grad_W ||M(k) - v||^2 (eq. 12) for one token, each [B, H, D_in, D_out]."""
    inputs, errors = surprise(weights, k_BHD[:, :, None], v_BHD[:, :, None], f, bound)
    return tuple(x.mT @ d for x, d in zip(inputs, errors, strict=True))


def surprise(
    weights: Layers, k_BHTD: Tensor, v_BHTD: Tensor, f: Activation, bound: float | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Of each layer its input X and error d [B, H, T, D]: the gradient a token brings is ``X_t^T d_t``."""
    inputs, z = [k_BHTD], []
    for W in weights[:-1]:
        z.append(inputs[-1] @ W)
        inputs.append(f.value(z[-1]))
    errors = [bounded(2 * (inputs[-1] @ weights[-1] - v_BHTD), bound)]
    for W, out in zip(reversed(weights), reversed(z), strict=False):
        errors.insert(0, bounded(f.through(errors[0] @ W.mT, out), bound))
    return inputs, errors


def bounded(d: Tensor, bound: float | None) -> Tensor:
    """d min(1, c / |d|): the optional bound on a token's surprise, norm over the last dimension."""
    if bound is None:
        return d
    squares = d.square().sum(-1, keepdim=True)
    # masked before the root: its slope at 0 would turn a zero surprise into NaN
    over = squares > bound**2
    return d * torch.where(over, bound / torch.where(over, squares, 1).sqrt(), 1)
