"""The chunked form of rules whose update is the paper's: a few matmuls per chunk, backward by autograd.

The gradient of token i stays a product ``X_i^T d_i`` and is never formed. In a chunk that starts from W, S

    W_t = beta_t W + m_t S - sum_i C[t, i] X_i^T d_i,

so all tokens read by one product with the chunk's d; a rule that reads at the chunk's start needs the last
row of C alone. Any loss, target and `Rule.end_chunk`.

Shapes: B rows or one packed document, H heads, T tokens, b tokens of a chunk, D/F input/output width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.activations import ACTIVATIONS, Activation
from titans_kernels.memory.forms.autograd import end_chunk
from titans_kernels.memory.forms.reference import apply_memory, each_document, surprise
from titans_kernels.memory.options import Inputs, Layers, Options, Result
from titans_kernels.memory.parts.gates import Coefficients, LastCoefficients
from titans_kernels.memory.residual import predict


class Chunk(NamedTuple):
    """The coefficients of a chunk: those of every token for its read, and of the last one."""

    C: Tensor  # [B, H, b, b]; for a rule that reads at the chunk's start the last row, [B, H, 1, b]
    n: Tensor  # [B, H, b]
    beta: Tensor  # [B, H, b], or [B, H, 1]
    m: Tensor
    h: Tensor


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write every token and read it, as `reference.write_and_read` does."""
    return each_document(_rows, inputs.to_state_dtype(), weights, momentum, options)


def _rows(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    size, T, outputs = options.chunk_size, inputs.q.shape[1], []
    now = Inputs(*(x.transpose(1, 2) for x in inputs))
    full = T - T % size
    chunks = [
        chunk
        for start, end, b in ((0, full, size), (full, T, T - full))
        if b
        for chunk in _coefficients(Inputs(*(x[:, :, start:end] for x in now)), b, options)
    ]
    W, S = weights, momentum
    for tokens, chunk in zip(zip(*(x.split(size, 2) for x in now), strict=True), chunks, strict=True):
        y, W, S = _chunk(Inputs(*tokens), chunk, W, S, options)
        outputs.append(y)
    return torch.cat(outputs, 2).transpose(1, 2), W, S


def _coefficients(now: Inputs, b: int, options: Options) -> list[Chunk]:
    """Of consecutive chunks of b tokens."""
    gates = options.rule.gates(now.alpha, now.eta, now.theta)
    B, H, n = now.q.shape[0], now.q.shape[1], now.q.shape[2] // b
    rows = [gate.unflatten(2, (n, b)).flatten(0, 2) for gate in gates]
    if options.rule.reads == "chunk":
        c, *rest = LastCoefficients.apply(*rows)  # pyright: ignore[reportGeneralTypeIssues]
        found = c[:, None], rest[0], *(x[:, None] for x in rest[1:])
    else:
        found = Coefficients.apply(*rows)
    return [Chunk(*x) for x in zip(*(x.unflatten(0, (B, H, n)).unbind(2) for x in found), strict=True)]


def _chunk(now: Inputs, at: Chunk, W: Layers, S: Layers, options: Options) -> Result:
    """y [B, H, b, F] of a chunk, and the weights and momentum after it."""
    rule, f, residual, base = options.rule, ACTIVATIONS[options.activation], options.residual, options.base
    error = lambda prediction, v: rule.error(prediction, v, *now.extra.unbind(-1))  # noqa: E731
    X, d = surprise(W, now.k, now.v, f, options.surprise_bound, error, residual)
    beta, m, h = (x[..., -1, None, None] for x in (at.beta, at.m, at.h))
    kept = tuple(beta * w + m * s for w, s in zip(W, S, strict=True))
    if base:
        kept = tuple(w + (1 - beta) * B for w, B in zip(kept, base, strict=True))
    after, kept_S = [], tuple(h * s for s in S)
    last = torch.stack([at.C[..., -1, :], at.n], -1)
    for x, e, w, s in zip(X, d, kept, kept_S, strict=True):
        moved = (x[..., None, :] * last[..., None]).flatten(-2).mT @ e
        dW, dS = moved.chunk(2, -2)
        after.append((w - dW, s - dS))
    before, (W, S) = (W, S), (tuple(part) for part in zip(*after, strict=True))
    ends = rule.ends_chunks and now.q.shape[2] == options.chunk_size
    if ends:
        W, S = end_chunk(rule, (W, S), before, (kept, kept_S), [beta] * len(W), now.eta)
    if rule.reads == "chunk":
        return apply_memory(before[0], now.q, f, residual), W, S
    y = _read(now.q, at, X, d, *before, f, base)
    y = predict(residual, now.q, y)
    if ends:  # the last token reads what its chunk ends with
        y = torch.cat([y[:, :, :-1], apply_memory(W, now.q[:, :, -1:], f, residual)], 2)
    return y, W, S


def _read(
    x: Tensor, at: Chunk, X: list[Tensor], d: list[Tensor], W: Layers, S: Layers, f: Activation, base: Layers
) -> Tensor:
    """f_t(x_t) for queries x [B, H, b, D], each with the weights after its token."""
    beta, m = at.beta[..., None], at.m[..., None]
    for l, (w, s, inputs, errors) in enumerate(zip(W, S, X, d, strict=True)):
        x = x if l == 0 else f.value(x)
        z = (beta * x) @ w + (m * x) @ s - ((x @ inputs.mT) * at.C) @ errors
        x = z + ((1 - beta) * x) @ base[l] if base else z
    return x
