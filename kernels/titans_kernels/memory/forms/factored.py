"""The chunked form of rules whose update is the paper's: a few matmuls per chunk, backward by autograd.

The gradient of token i stays a product ``X_i^T d_i`` and is never formed. In a chunk that starts from W, S

    W_t = beta_t W + m_t S - sum_i C[t, i] X_i^T d_i,

so all tokens read by one product with the chunk's d; a rule that reads at the chunk's start needs the last
row of C alone. Any loss, target and `Rule.end_chunk`. With a `Rule.step` the same holds for the momentum,
and the weights of every token are formed.

Shapes: B rows or one packed document, H heads, T tokens, b tokens of a chunk, D/F input/output width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from titans_kernels.memory.activations import ACTIVATIONS, Activation
from titans_kernels.memory.forms.autograd import parts
from titans_kernels.memory.forms.reference import (
    apply_memory,
    each_document,
    each_matrix,
    end_chunk,
    surprise,
)
from titans_kernels.memory.options import (
    Inputs,
    Layers,
    Options,
    Result,
    distances,
    matrices_of_layers,
    theta_of_layers,
)
from titans_kernels.memory.parts.gates import Coefficients, LastCoefficients, decay_products
from titans_kernels.memory.residual import predict


class Chunk(NamedTuple):
    """The coefficients of a chunk: those of every token for its read, and of the last one."""

    C: Tensor  # [B, H, b, b]; for a rule that reads at the chunk's start the last row, [B, H, 1, b]
    n: Tensor  # [B, H, b]
    beta: Tensor  # [B, H, b], or [B, H, 1]
    m: Tensor
    h: Tensor


class Window(NamedTuple):
    """Keys and values [B, H, w, D] of the tokens before a chunk that `Rule.window` reaches."""

    k: Tensor
    v: Tensor

    @staticmethod
    def none(k: Tensor, v: Tensor) -> Window:
        """Without tokens, like k and v."""
        return Window(k[:, :, :0], v[:, :, :0])

    def followed(self, k: Tensor, v: Tensor) -> Window:
        """With the tokens that follow."""
        return Window(torch.cat([self.k, k], 2), torch.cat([self.v, v], 2))

    def last(self, n: int) -> Window:
        """At most n last tokens; copies, since a view would keep all tokens of the call alive."""
        return Window(*(x[:, :, max(x.shape[2] - n, 0) :].clone() for x in self))


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write every token and read it, as `reference.write_and_read` does."""
    return each_document(_rows, inputs.to_state_dtype(), weights, momentum, options)


def _rows(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    now = Inputs(*(x.transpose(1, 2) for x in inputs))
    y, W, S, _ = write_rows(now, weights, momentum, options, Window.none(now.k, now.v))
    return y.transpose(1, 2), W, S


def write_rows(
    now: Inputs, W: Layers, S: Layers, options: Options, before: Window
) -> tuple[Tensor, Layers, Layers, Window]:
    """y [B, H, T, F] of tokens [B, H, T, ...] from a chunk's start, the state and the window after them."""
    size, T, outputs = options.chunk_size, now.q.shape[2], []
    full = T - T % size
    chunks = [
        chunk
        for start, end, b in ((0, full, size), (full, T, T - full))
        if b and not options.rule.stepped
        for chunk in _of_parts(Inputs(*(x[:, :, start:end] for x in now)), b, options)
    ]
    for i, (inputs, length) in enumerate(parts(now, options, 2)):
        if options.rule.stepped:
            y, W, S = _steps(inputs, W, S, options, before)
        else:
            y, W, S = _chunk(inputs, chunks[i], W, S, options._replace(chunk_size=length), before)
        outputs.append(y)
        if options.rule.window:
            before = before.followed(inputs.k, inputs.v).last(options.rule.window)
    return torch.cat(outputs, 2), W, S, before


def _of_parts(now: Inputs, b: int, options: Options) -> list[Chunk]:
    """`_coefficients` of the parts of consecutive chunks of b tokens (`Rule.parts`)."""
    lengths = options.rule.parts(b)
    if len(lengths) == 1:
        return _coefficients(now, b, options)
    split = zip(*(x.unflatten(2, (-1, b)).split(lengths, 3) for x in now), strict=True)
    found = [
        _coefficients(Inputs(*(x.flatten(2, 3) for x in part)), length, options)
        for part, length in zip(split, lengths, strict=True)
    ]
    return [part for chunk in zip(*found, strict=True) for part in chunk]


def _coefficients(now: Inputs, b: int, options: Options) -> list[Chunk]:
    """Of consecutive chunks of b tokens."""
    gates = options.rule.gates(
        now.alpha, now.eta, torch.ones_like(now.eta) if now.steps_by_matrix else now.theta
    )
    B, H, n = now.q.shape[0], now.q.shape[1], now.q.shape[2] // b
    rows = [gate.unflatten(2, (n, b)).flatten(0, 2) for gate in gates]
    if options.rule.window:
        alpha, eta, theta = rows
        found = _windowed(alpha, eta, theta, now.extra.unflatten(2, (n, b)).flatten(0, 2))
    elif options.rule.reads == "chunk":
        c, *rest = LastCoefficients.apply(*rows)  # pyright: ignore[reportGeneralTypeIssues]
        found = c[:, None], rest[0], *(x[:, None] for x in rest[1:])
    else:
        found = Coefficients.apply(*rows)
    return [Chunk(*x) for x in zip(*(x.unflatten(0, (B, H, n)).unbind(2) for x in found), strict=True)]


def _windowed(alpha: Tensor, eta: Tensor, theta: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    """As `Coefficients`, over c - 1 tokens before the chunk and its own: ``C = A E Gamma diag(theta)``.

    ``gamma`` [R, b, c - 1] is that of the previous token, of the one before it, and so on.
    """
    A, N, h = decay_products(1 - alpha), _momenta(eta, theta, gamma), eta.cumprod(-1)
    return A @ N, N[:, -1], (1 - alpha).cumprod(-1), (A @ h[..., None])[..., 0], h


def _momenta(eta: Tensor, theta: Tensor, gamma: Tensor) -> Tensor:
    """``N = E Gamma diag(theta)`` [..., b, c + b - 1]: each token's momentum of the gradients."""
    b, c = theta.shape[-1], gamma.shape[-1] + 1
    row = torch.cat([gamma.flip(-1), torch.ones_like(theta)[..., None]], -1) * theta[..., None]
    # [..., b, c + b] read as rows of c + b - 1 moves row t by t columns: Gamma is a band
    band = F.pad(row, (0, b)).flatten(-2)[..., : b * (c + b - 1)].unflatten(-1, (b, c + b - 1))
    return decay_products(eta) @ band


def _chunk(now: Inputs, at: Chunk, W: Layers, S: Layers, options: Options, before: Window) -> Result:
    """y [B, H, b, F] of a chunk, and the weights and momentum after it."""
    rule, f, residual, base = options.rule, ACTIVATIONS[options.activation], options.residual, options.base
    extra, keys = now.extra.unbind(-1), Window(now.k, now.v)
    if rule.window:  # the gates are those of the coefficients
        extra, keys = (), before.followed(*keys)
        at = at._replace(C=at.C[..., -keys.k.shape[2] :], n=at.n[..., -keys.k.shape[2] :])
    error = lambda prediction, v: rule.error(prediction, v, *extra)  # noqa: E731
    X, d = surprise(W, *keys, f, options.surprise_bound, error, residual)
    if now.steps_by_matrix:
        d = with_steps(d, now.theta, options.activation)
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
    starts, (W, S) = (W, S), (tuple(part) for part in zip(*after, strict=True))
    ends = rule.ends_chunks and now.q.shape[2] == options.chunk_size
    if ends:
        W, S = end_chunk(rule, f, (W, S), starts, (kept, kept_S), [beta] * len(W), now.eta)
    if rule.reads == "chunk":
        return apply_memory(starts[0], now.q, f, residual), W, S
    y = _read(now.q, at, X, d, *starts, f, base)
    y = predict(residual, now.q, y)
    if ends:  # the last token reads what its chunk ends with
        y = torch.cat([y[:, :, :-1], apply_memory(W, now.q[:, :, -1:], f, residual)], 2)
    return y, W, S


def _steps(now: Inputs, W: Layers, S: Layers, options: Options, before: Window) -> Result:
    """`_chunk` with a `Rule.step`: the momenta, the steps and the weights of all tokens, [B, H, b, D, F]."""
    rule, f, residual, base = options.rule, ACTIVATIONS[options.activation], options.residual, options.base
    alpha, eta, theta = rule.gates(now.alpha, now.eta, now.theta)
    gamma, *extra = now.extra.split([rule.window, *[1] * (rule.extra_gates - rule.window)], -1)
    keys = before.followed(now.k, now.v)
    error = lambda prediction, v: rule.error(prediction, v, *(x[..., 0] for x in extra))  # noqa: E731
    X, d = surprise(W, *keys, f, options.surprise_bound, error, residual)
    N, h = _momenta(eta, torch.ones_like(eta), gamma)[..., -keys.k.shape[2] :], eta.cumprod(-1)
    A, beta, momenta, weights = decay_products(1 - alpha), (1 - alpha).cumprod(-1), [], []
    for x, e, s in zip(X, d, S, strict=True):
        gradients = x[..., None] * e[..., None, :]
        sums = (N @ gradients.flatten(-2)).unflatten(-1, s.shape[-2:])
        momenta.append(h[..., None, None] * s[:, :, None] - sums)
    thetas = theta_of_layers(theta, len(W), options.activation, now.steps_by_matrix)
    (steps,) = each_matrix(f, lambda *layer: (rule.step(*layer),), momenta, thetas)
    for l, (w, x) in enumerate(zip(distances(W, base), steps, strict=True)):
        moved = beta[..., None, None] * w[:, :, None] + (A @ x.flatten(-2)).unflatten(-1, w.shape[-2:])
        weights.append(moved + base[l][:, None] if base else moved)
    after = tuple(x[:, :, -1] for x in weights), tuple(x[:, :, -1] for x in momenta)
    if rule.reads == "chunk":
        return apply_memory(W, now.q, f, residual), *after
    return apply_memory(tuple(weights), now.q[..., None, :], f, residual)[..., 0, :], *after


def with_steps(d: list[Tensor], theta: Tensor, activation: str) -> list[Tensor]:
    """Errors d [B, H, T, F] times theta [B, H, T, M] of their matrices, for coefficients where theta is 1."""
    parts = theta.split(matrices_of_layers(len(d), activation), -1)
    return [e * r.repeat_interleave(e.shape[-1] // r.shape[-1], -1) for e, r in zip(d, parts, strict=True)]


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
