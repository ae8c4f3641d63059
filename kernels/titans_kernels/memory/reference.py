"""The recurrence token by token, as the paper writes it. Slow, readable, any depth: the judge of the others.

Shapes: B batch, T tokens, H heads, D width of a head, F width of a hidden layer, L layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titans_kernels.memory.activations import ACTIVATIONS, Activation

Layers = tuple[Tensor, ...]


def forget_and_learn(
    q_BTHD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    alpha_BTH: Tensor,
    eta_BTH: Tensor,
    theta_BTH: Tensor,
    weights: Layers,
    momentum: Layers,
    chunk_size: int,
    activation: str,
    surprise_bound: float | None,
) -> tuple[Tensor, Layers, Layers]:
    """Write every token, read every token (eqs. 13-16).

    ``weights`` and ``momentum`` are L tensors [B, H, D_in, D_out]. Returns y [B, T, H, D] and both after
    the last token. Gradients flow through everything, the inner gradient included.
    """
    f = ACTIVATIONS[activation]
    y = []
    for t in range(q_BTHD.shape[1]):
        if t % chunk_size == 0:
            chunk_start = weights  # M_{t'}: every gradient of the chunk is taken here (16)
        surprise = inner_gradient(chunk_start, k_BTHD[:, t], v_BTHD[:, t], f, surprise_bound)
        alpha, eta, theta = (gate[:, t, :, None, None] for gate in (alpha_BTH, eta_BTH, theta_BTH))
        momentum = tuple(eta * S - theta * g for S, g in zip(momentum, surprise, strict=True))  # (14)
        weights = tuple((1 - alpha) * W + S for W, S in zip(weights, momentum, strict=True))  # (13)
        y.append(apply_memory(weights, q_BTHD[:, t, :, None], f)[:, :, 0])  # (15)
    return torch.stack(y, 1), weights, momentum


def apply_memory(weights: Layers, x_BHTD: Tensor, f: Activation) -> Tensor:
    """M(x): the memory's MLP at given weights [B, H, D_in, D_out]; x and the result [B, H, T, D]."""
    for W in weights[:-1]:
        x_BHTD = f.value(x_BHTD @ W)
    return x_BHTD @ weights[-1]


def inner_gradient(
    weights: Layers, k_BHD: Tensor, v_BHD: Tensor, f: Activation, bound: float | None
) -> Layers:
    """grad_W ||M(k) - v||^2 (eq. 12) for one token, each [B, H, D_in, D_out]."""
    inputs, z = [k_BHD[:, :, None]], []
    for W in weights:
        z.append(inputs[-1] @ W)
        inputs.append(f.value(z[-1]))
    d = bounded(2 * (z[-1] - v_BHD[:, :, None]), bound)
    gradient = [inputs[-2].mT @ d]
    for l in range(len(weights) - 1, 0, -1):
        d = bounded((d @ weights[l].mT) * f.slope(z[l - 1]), bound)
        gradient.insert(0, inputs[l - 1].mT @ d)
    return tuple(gradient)


def bounded(d: Tensor, bound: float | None) -> Tensor:
    """d min(1, c / |d|): the optional bound on a token's surprise, norm over the last dimension."""
    if bound is None:
        return d
    squares = d.square().sum(-1, keepdim=True)
    # masked before the root: its slope at 0 would turn a zero surprise into NaN
    over = squares > bound**2
    return d * torch.where(over, bound / torch.where(over, squares, 1).sqrt(), 1)
