"""Tokens of an open chunk by the factors of their gradients: the step of `decode` for linear rules.

Shapes: B batch, T new tokens, H heads, D/F input/output width of a layer, p tokens in the open chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.activations import ACTIVATIONS, Activation
from titans_kernels.memory.forms.reference import apply_memory, surprise
from titans_kernels.memory.options import Inputs, Layers, Options, whole
from titans_kernels.memory.parts.gates import decay_products
from titans_kernels.memory.residual import predict
from titans_kernels.memory.state import DecodeState


class Rows(NamedTuple):
    """Gate coefficients of the new tokens, one row each, over the open chunk's tokens and the new ones."""

    C: Tensor  # [B, H, T, p + T]
    n: Tensor  # [B, H, p + T], for the last token
    beta: Tensor  # [B, H, T]
    m: Tensor
    h: Tensor

    @staticmethod
    def of(alpha: Tensor, eta: Tensor, theta: Tensor, state: DecodeState) -> Rows:
        """From the gates [B, H, T] of the new tokens.

        The new tokens see the earlier coefficients as one more weight and one more momentum, which evolve as
        W and S do: by the products ``kept`` and ``moved`` from the first new token on.
        """
        keep = 1 - alpha
        kept, h = keep.cumprod(-1), eta.cumprod(-1)
        A, E = _products(keep), _products(eta)
        N = E * theta[..., None, :]
        moved = (A @ h[..., None])[..., 0]
        old = kept[..., None] * state.c[..., None, :] + moved[..., None] * state.n[..., None, :]
        return Rows(
            torch.cat([old, A @ N], -1),
            torch.cat([h[..., -1:] * state.n, N[..., -1, :]], -1),
            kept * state.beta[..., None],
            kept * state.m[..., None] + moved * state.h[..., None],
            h * state.h[..., None],
        )


def by_factors(inputs: Inputs, state: DecodeState, options: Options) -> tuple[Tensor, DecodeState]:
    """y [B, T, H, D_v] of the next tokens of the open chunk, and the state after them."""
    now, f = Inputs(*(x.transpose(1, 2) for x in inputs)), ACTIVATIONS[options.activation]
    rule = options.rule
    rows = Rows.of(*rule.gates(now.alpha, now.eta, now.theta), state)
    bound, residual, weights = options.surprise_bound, options.residual, whole(state.weights, options.base)
    error = lambda prediction, v: rule.error(prediction, v, *now.extra.unbind(-1))  # noqa: E731
    new = surprise(weights, now.k, now.v, f, bound, error, residual)
    state = _written(state, rows, new)
    if rule.ends_chunks:
        state = state._replace(etas=torch.cat([state.etas, now.eta], 2))
    if rule.reads == "chunk":
        return apply_memory(weights, now.q, f, residual).transpose(1, 2), state
    y = _read(now.q, rows, state, f, options.base)
    return predict(residual, now.q, y).transpose(1, 2), state


def _products(r: Tensor) -> Tensor:
    """`decay_products`; for a single token a matrix of one."""
    return torch.ones_like(r)[..., None] if r.shape[-1] == 1 else decay_products(r)


def _written(state: DecodeState, rows: Rows, new: tuple[list[Tensor], list[Tensor]]) -> DecodeState:
    """The open chunk with the new tokens. Copies, since a view would keep all tokens of the call alive."""
    inputs, errors = (
        tuple(torch.cat(pair, 2) for pair in zip(old, add, strict=True))
        for old, add in zip((state.inputs, state.errors), new, strict=True)
    )
    c, beta, m, h = rows.C[..., -1, :], *(x[..., -1] for x in (rows.beta, rows.m, rows.h))
    if rows.C.shape[-2] > 1:
        c, beta, m, h = (x.clone() for x in (c, beta, m, h))
    return state._replace(inputs=inputs, errors=errors, c=c, n=rows.n, beta=beta, m=m, h=h)


def _read(x: Tensor, rows: Rows, state: DecodeState, f: Activation, base: Layers) -> Tensor:
    """Read queries x [B, H, T, D], each with the weights after its token."""
    beta, m = rows.beta[..., None], rows.m[..., None]
    layers = zip(state.weights, state.momentum, state.inputs, state.errors, strict=True)
    for l, (W, S, X, d) in enumerate(layers):
        x = x if l == 0 else f.value(x)
        z = (beta * x) @ W + (m * x) @ S - ((x @ X.mT) * rows.C) @ d
        x = z + x @ base[l] if base else z
    return x
