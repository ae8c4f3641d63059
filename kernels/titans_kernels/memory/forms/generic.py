"""Any rule, chunk by chunk, by automatic differentiation. Slow but correct.

The gradients of a chunk's tokens are computed together, at the weights at the start of the chunk. A rule with
the paper's update needs only their factors (`state.write_factors`), a few products per chunk; for any other
update the gradients are formed and the rule updates the memory token by token. A rule may also replace all of
this (`Rule.chunk`). Gradients of the outer loss flow through everything, including the inner gradients.

Shapes: B rows or one packed document, H heads, b tokens of a chunk, D/F input/output width of a layer.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from titans_kernels.memory.forms.documents import each_document
from titans_kernels.memory.forms.reference import apply_memory, surprise
from titans_kernels.memory.forms.state import DecodeState, write_factors
from titans_kernels.memory.options import (
    Inputs,
    Layers,
    MemoryState,
    Options,
    Result,
    broadcast_gate,
    whole,
)
from titans_kernels.memory.rules import Rule


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write and read every token, as `reference.write_and_read` does."""
    return each_document(_rows, inputs.to_state_dtype(), weights, momentum, options)


def _rows(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    rule, state, outputs = options.rule, MemoryState(weights, momentum), []
    write = rule.chunk if rule.has_own_chunk else partial(write_chunk, rule)
    for chunk in zip(*(x.transpose(1, 2).split(options.chunk_size, 2) for x in inputs), strict=True):
        y, state = write(Inputs(*chunk), state, options)
        outputs.append(y)
    return torch.cat(outputs, 2).transpose(1, 2), state.weights, state.momentum


def write_chunk(
    rule: Rule, tokens: Inputs, state: MemoryState, options: Options
) -> tuple[Tensor, MemoryState]:
    """Write and read the tokens of a chunk by the hooks of a rule; see `Rule.chunk`."""
    if rule.has_paper_update and not tokens.by_column:
        y, after = write_factors(tokens, DecodeState.of(state), options)
        return y, after.memory()
    wide = lambda gate, W: broadcast_gate(gate, W.shape[-1], gate.ndim == tokens.q.ndim)  # noqa: E731
    gradients = token_gradients(rule, tokens, state.weights, options)
    own, (W, S), y = tokens.extra[..., None, None].unbind(3), state, []
    for t in range(tokens.q.shape[2]):
        moved = []
        for V, M, g in zip(W, S, gradients, strict=True):
            gates = (wide(gate, V)[:, :, t] for gate in (tokens.alpha, tokens.eta, tokens.theta))
            moved.append(rule.update(V, M, g[:, :, t], *gates, *(gate[:, :, t] for gate in own)))
        W, S = (tuple(part) for part in zip(*moved, strict=True))
        read = whole(W if rule.reads == "token" else state.weights, options.base)
        y.append(apply_memory(read, tokens.q[:, :, t : t + 1], options))
    return torch.cat(y, 2), MemoryState(W, S)


def token_gradients(rule: Rule, tokens: Inputs, start: Layers, options: Options) -> list[Tensor]:
    """Gradient of each token's inner loss, per layer [B, H, b, D, F].

    ``start`` is the weights at the start of the chunk; with a base, the offset from it.
    """
    own, base = tokens.extra[..., None, :].unbind(-1), options.base
    error = lambda prediction, v: rule.error(prediction, v, *own)  # noqa: E731
    k, v = tokens.k[..., None, :], tokens.v[..., None, :]
    if type(rule).gradient_point is Rule.gradient_point:  # one point for all tokens
        error = lambda prediction, v: rule.error(prediction, v, *tokens.extra.unbind(-1))  # noqa: E731
        X, d = surprise(whole(start, base), tokens.k, tokens.v, options, error)
        return [x[..., None] * e[..., None, :] for x, e in zip(X, d, strict=True)]
    decay = (1 - tokens.alpha).cumprod(2)
    points = tuple(
        rule.gradient_point(W[:, :, None], broadcast_gate(decay, W.shape[-1], decay.ndim == tokens.q.ndim))
        for W in start
    )
    points = tuple(P + B[:, None] for P, B in zip(points, base, strict=True)) if base else points
    X, d = surprise(points, k, v, options, error)
    return [x.mT @ e for x, e in zip(X, d, strict=True)]
