"""The online rule of a linear memory (b = 1), exact and in matrix products.

With chunks of one token (the paper's b = 1) each gradient is taken at the weights after the previous token,
which is sequential. For a linear memory without a bound the recurrence is linear in the writes, so a block of
tokens is one triangular system, as in DeltaNet (Yang et al. 2024, arXiv 2406.06484), here with momentum and
decay:

    S_t = eta_t S_{t-1} + k_t^T u_t,    W_t = (1 - alpha_t) W_{t-1} + S_t,    u_t = 2 theta_t (v_t - k_t P_t)

with P_t = W_{t-1} for the paper's rule and (1 - alpha_t) W_{t-1} for `GatedDelta`. In a block that starts
from W, S the coefficients of `gates` give ``P_t = c_t W + n_t S + sum_{s<t} D[t, s] k_s^T u_s``, and so

    (I + L) U = diag(2 theta) (V - diag(c) K W - diag(n) K S),    L[t, s] = 2 theta_t D[t, s] k_t k_s^T.

Shapes: B rows, T tokens, H heads, D and F the widths of key and value; n blocks of b tokens, R = B H rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titans_kernels.memory.forms.reference import each_document
from titans_kernels.memory.options import Inputs, Layers, Options, Result
from titans_kernels.memory.parts.gates import coefficients
from titans_kernels.memory.rules import GatedDelta

BLOCK = 32
"""Tokens per triangular system. Affects only rounding."""


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write every token and read it, as `reference.write_and_read` does."""
    return each_document(_rows, inputs.to_state_dtype(), weights, momentum, options)


def _rows(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    B, T, H, _ = inputs.q.shape
    W, S = (x[0].flatten(0, 1) for x in (weights, momentum))
    whole, outputs = T // BLOCK * BLOCK, []
    for start, end, b in ((0, whole, BLOCK), (whole, T, T - whole)):
        if start < end:
            part = Inputs(*(x[:, start:end].transpose(1, 2).flatten(0, 1) for x in inputs))
            y, W, S = _blocks(part, W, S, b, isinstance(options.rule, GatedDelta))
            outputs.append(y)
    y = torch.cat(outputs, 1).unflatten(0, (B, H)).transpose(1, 2)
    return y, (W.unflatten(0, (B, H)),), (S.unflatten(0, (B, H)),)


def _blocks(inputs: Inputs, W: Tensor, S: Tensor, b: int, decayed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y [R, T, F], weights and momentum [R, D, F] after T tokens, a multiple of b; inputs are [R, T, ...]."""
    q, k, v, alpha, eta, theta = (x.unflatten(1, (-1, b)) for x in inputs)
    rows = alpha.shape[:2]
    flat = [x.flatten(0, 1) for x in (alpha, eta, torch.ones_like(theta))]
    gates = coefficients(*flat)
    C, N, m, beta, h = (x.unflatten(0, rows) for x in (gates.C, gates.N, gates.m, gates.beta, gates.h))
    # coefficients of the weights at which each token's gradient is taken
    D, c, n = _before(C, 0.0), _before(beta, 1.0), _before(m, 0.0)
    if decayed:
        D, c, n = D * (1 - alpha)[..., None], c * (1 - alpha), n * (1 - alpha)
    step = 2 * theta[..., None]
    L = (step * D * (k @ k.mT)).tril(-1)
    known = step * torch.cat([v, c[..., None] * k, n[..., None] * k], -1)
    solved = torch.linalg.solve_triangular(L, known, upper=False, unitriangular=True)
    X, Y, Z = solved.split([v.shape[-1], k.shape[-1], k.shape[-1]], -1)
    among = C * (q @ k.mT)
    reads = torch.cat([beta[..., None] * q, m[..., None] * q], -1)
    into_W, into_S = ((part[:, :, -1, :, None] * k).mT for part in (C, N))
    outputs = []
    for i in range(rows[1]):
        state = torch.cat([W, S], 1)
        U = X[:, i] - torch.cat([Y[:, i], Z[:, i]], -1) @ state
        outputs.append(reads[:, i] @ state + among[:, i] @ U)
        last_W, last_S, kept = (x[:, i, -1, None, None] for x in (beta, m, h))
        W = last_W * W + last_S * S + into_W[:, i] @ U
        S = kept * S + into_S[:, i] @ U
    return torch.cat(outputs, 1), W, S


def _before(x: Tensor, first: float) -> Tensor:
    """Shift along the tokens [R, n, b, ...]: each token's predecessor."""
    return torch.cat([torch.full_like(x[:, :, :1], first), x[:, :, :-1]], 2)
