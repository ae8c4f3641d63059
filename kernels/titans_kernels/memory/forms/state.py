"""The state of a sequence between two calls of `decode`, on a chunk boundary or inside a chunk.

Shapes: B batch, T new tokens, H heads, D/F input/output width of a layer, p tokens in the open chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.activations import ACTIVATIONS
from titans_kernels.memory.forms.reference import apply_memory, surprise
from titans_kernels.memory.options import Inputs, Layers, MemoryState, Options, whole, without_autocast
from titans_kernels.memory.parts.gates import decay_products
from titans_kernels.memory.residual import predict
from titans_kernels.memory.rules import Rule


class DecodeState(NamedTuple):
    """The state of a sequence, float32 (float64 for float64 input).

    On a chunk boundary it serves every rule; inside a chunk, a linear one (`Rule.linear`), gates per head.

    Let W, S be the state at the start of the open chunk and g_i = X_i^T d_i the gradients of its tokens. Then
    the current weights are ``beta W + m S - sum_i c_i g_i`` and the current momentum is
    ``h S - sum_i n_i g_i``. With a base, W and the current weights are offsets from it.
    """

    weights: Layers  # at the start of the open chunk [B, H, D, F]
    momentum: Layers
    inputs: Layers  # X of each layer [B, H, p, D]
    errors: Layers  # d of each layer [B, H, p, F]
    c: Tensor  # [B, H, p]
    n: Tensor
    beta: Tensor  # [B, H]
    m: Tensor
    h: Tensor

    @staticmethod
    def of(state: MemoryState) -> DecodeState:
        """Return a `DecodeState` on a chunk boundary; the tensors of ``state`` are [B, H, D, F]."""
        first = state.weights[0]
        B, H = first.shape[:2]
        no_rows = first.new_zeros(B, H, 0)
        return DecodeState(
            tuple(state.weights),
            tuple(state.momentum),
            tuple(W.new_zeros(B, H, 0, W.shape[-2]) for W in state.weights),
            tuple(W.new_zeros(B, H, 0, W.shape[-1]) for W in state.weights),
            no_rows, no_rows, first.new_ones(B, H), first.new_zeros(B, H), first.new_ones(B, H),
        )  # fmt: skip

    @property
    def position(self) -> int:
        """Number of tokens in the open chunk; 0 on a chunk boundary."""
        return self.n.shape[-1]

    @property
    def keys(self) -> Tensor:
        """Keys of the open chunk's tokens [B, H, p, D]."""
        return self.inputs[0]

    @property
    def opened(self) -> tuple[Tensor, ...]:
        """Everything but the starting weights and momentum that determines the current weights, flattened."""
        return (*self.inputs, *self.errors, self.c, self.n, self.beta, self.m, self.h)

    def memory(self) -> MemoryState:
        """Weights and momentum after the last token."""
        if not self.position:
            return MemoryState(self.weights, self.momentum)
        beta, m, h = (x[..., None, None] for x in (self.beta, self.m, self.h))
        W, S = [], []
        with without_autocast(self.n):
            for W0, S0, X, d in zip(self.weights, self.momentum, self.inputs, self.errors, strict=True):
                W.append(beta * W0 + m * S0 - (X * self.c[..., None]).mT @ d)
                S.append(h * S0 - (X * self.n[..., None]).mT @ d)
        return MemoryState(tuple(W), tuple(S))


class OpenChunk(NamedTuple):
    """The state inside a chunk that is no `DecodeState`: the chunk's tokens, which are computed again."""

    weights: Layers  # at the start of the open chunk [B, H, D, F]; with a base, the offset from it
    momentum: Layers
    now: MemoryState  # after the last token
    tokens: Inputs  # of the open chunk [B, p, H, ...], its queries [B, p, H, 0]

    @property
    def position(self) -> int:
        """Number of tokens in the open chunk."""
        return self.tokens.k.shape[1]

    @property
    def keys(self) -> Tensor:
        """Keys of the open chunk's tokens [B, H, p, D]."""
        return self.tokens.k.transpose(1, 2)

    def memory(self) -> MemoryState:
        """Weights and momentum after the last token."""
        return self.now


AnyState = DecodeState | OpenChunk
"""The state of a sequence, on a chunk boundary or inside a chunk."""


def has_factors(rule: Rule, by_column: bool) -> bool:
    """Return True if the state inside a chunk is a `DecodeState`; ``by_column`` as in `Inputs`."""
    return rule.linear and not by_column


def state_numel(shapes: Sequence[Sequence[int]], position: int, rule: Rule, gates: int | None = None) -> int:
    """Count the elements in the state of one head, ``position`` tokens into a chunk.

    Args:
        shapes: [D, F] of each layer.
        position: number of tokens in the open chunk.
        rule: the update rule.
        gates: number of values of alpha, eta and theta together if any is per column; None for one each.
    """
    weights = sum(D * F for D, F in shapes)
    if position and not has_factors(rule, by_column=gates is not None):
        gates = (gates or 3) + rule.extra_gates
        return 4 * weights + position * (shapes[0][0] + shapes[-1][-1] + gates)
    return 2 * weights + position * sum(D + F for D, F in shapes) + 2 * position + 3


class _Rows(NamedTuple):
    """Gate coefficients of the new tokens, one row each, over the open chunk's tokens and the new ones."""

    C: Tensor  # [B, H, T, p + T]
    n: Tensor  # [B, H, p + T], for the last token
    beta: Tensor  # [B, H, T]
    m: Tensor
    h: Tensor

    @staticmethod
    def of(alpha: Tensor, eta: Tensor, theta: Tensor, state: DecodeState) -> _Rows:
        """Compute the rows from the gates [B, H, T] of the new tokens.

        The new tokens see the earlier coefficients as one more weight and one more momentum, which evolve as
        W and S do: by the products ``kept`` and ``moved`` from the first new token on.
        """
        keep = 1 - alpha
        kept, h = keep.cumprod(-1), eta.cumprod(-1)
        A, E = _products(keep), _products(eta)
        N = E * theta[..., None, :]
        moved = (A @ h[..., None])[..., 0]
        old = kept[..., None] * state.c[..., None, :] + moved[..., None] * state.n[..., None, :]
        return _Rows(
            torch.cat([old, A @ N], -1),
            torch.cat([h[..., -1:] * state.n, N[..., -1, :]], -1),
            kept * state.beta[..., None],
            kept * state.m[..., None] + moved * state.h[..., None],
            h * state.h[..., None],
        )


def write_factors(tokens: Inputs, state: DecodeState, options: Options) -> tuple[Tensor, DecodeState]:
    """y [B, H, T, D_v] of the next tokens [B, H, T, ...] of the open chunk, and the state after them.

    For a linear rule and gates per head. Gradients are kept as factors, never formed.
    """
    rows = _Rows.of(tokens.alpha, tokens.eta, tokens.theta, state)
    rule, weights = options.rule, whole(state.weights, options.base)
    error = lambda prediction, v: rule.error(prediction, v, *tokens.extra.unbind(-1))  # noqa: E731
    new = surprise(weights, tokens.k, tokens.v, options, error)
    state = _written(state, rows, new)
    if rule.reads == "chunk":
        return apply_memory(weights, tokens.q, options), state
    return predict(options.residual, tokens.q, _read(tokens.q, rows, state, options)), state


def _products(r: Tensor) -> Tensor:
    """`decay_products`; for a single token a matrix of one."""
    return torch.ones_like(r)[..., None] if r.shape[-1] == 1 else decay_products(r)


def _written(state: DecodeState, rows: _Rows, new: tuple[list[Tensor], list[Tensor]]) -> DecodeState:
    """Append new tokens to the open chunk. Copies, since a view would keep all tokens of the call alive."""
    inputs, errors = (
        tuple(torch.cat(pair, 2) for pair in zip(old, add, strict=True))
        for old, add in zip((state.inputs, state.errors), new, strict=True)
    )
    c, beta, m, h = rows.C[..., -1, :], *(x[..., -1] for x in (rows.beta, rows.m, rows.h))
    if rows.C.shape[-2] > 1:
        c, beta, m, h = (x.clone() for x in (c, beta, m, h))
    return state._replace(inputs=inputs, errors=errors, c=c, n=rows.n, beta=beta, m=m, h=h)


def _read(x: Tensor, rows: _Rows, state: DecodeState, options: Options) -> Tensor:
    """Read queries x [B, H, T, D], each with the weights after its token."""
    beta, m, f = rows.beta[..., None], rows.m[..., None], ACTIVATIONS[options.activation]
    layers = zip(state.weights, state.momentum, state.inputs, state.errors, strict=True)
    for l, (W, S, X, d) in enumerate(layers):
        x = x if l == 0 else f.value(x)
        z = (beta * x) @ W + (m * x) @ S - ((x @ X.mT) * rows.C) @ d
        x = z + x @ options.base[l] if options.base else z
    return x
