"""The token-by-token recurrence as in the paper, for any rule and depth.

Slow but readable: every other form is tested against it.

Shapes: B batch, T tokens, H heads, D width of a head, F width of a hidden layer, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from titans_kernels.memory.activations import ACTIVATIONS, Activation
from titans_kernels.memory.options import (
    Inputs,
    Layers,
    Options,
    Result,
    broadcast_gate,
    distances,
    state_dtype,
    theta_of_layers,
    whole,
)
from titans_kernels.memory.parts.layout import document_borders
from titans_kernels.memory.parts.norms import clip_norm
from titans_kernels.memory.residual import Output, predict, pull
from titans_kernels.memory.rules import ChunkEnd, Rule
from titans_kernels.memory.rules.delta_ttt import DeltaTTT


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write and read every token (eqs. 13-16).

    Gradients flow through everything, including the inner gradient.
    """
    rows = _layer_by_layer if options.rule.layerwise else _rows
    return each_document(rows, inputs.to_state_dtype(), weights, momentum, options)


def each_document(
    form: Callable[..., Result], inputs: Inputs, weights: Layers, momentum: Layers, options: Options
) -> Result:
    """Apply ``form`` to each packed document separately, or to all rows if nothing is packed."""
    if options.cu_seqlens is None:
        return form(inputs, weights, momentum, options)
    results = []
    for i, (start, end) in enumerate(pairwise(document_borders(options.cu_seqlens, inputs.q.shape[1]))):
        document = Inputs(*(x[:, start:end] for x in inputs))
        W, S = (tuple(x[i : i + 1] for x in part) for part in (weights, momentum))
        results.append(form(document, W, S, options) if start < end else (document.v, W, S))
    y = torch.cat([result[0] for result in results], 1)
    return y, _joined([result[1] for result in results]), _joined([result[2] for result in results])


def _rows(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    rule, f, by_column = options.rule, ACTIVATIONS[options.activation], inputs.forgets_by_column
    before, kept, etas = (weights, momentum), (weights, momentum), inputs.eta[:, :0]
    decay, y = torch.ones_like(inputs.alpha[:, 0]), []
    base = options.base  # the rule applies to the offset of the weights from the base
    parts, last = rule.parts(options.chunk_size), 0
    lengths = dict(zip(accumulate(parts, initial=0), parts, strict=False))
    for t in range(inputs.q.shape[1]):
        if length := lengths.get(t % options.chunk_size):
            # M_{t'}: gradients of the chunk are taken here (16) unless the rule says otherwise
            before, last = (weights, momentum), t + length - 1
            kept, decay = before, torch.ones_like(decay)
            etas = inputs.eta[:, t : last + 1].transpose(1, 2)
        chunk_start = before[0]
        now = Inputs(*(x[:, t] for x in inputs))
        alpha, eta, theta = rule.gates(now.alpha, now.eta, now.theta)
        decay = (1 - alpha) * decay
        thetas = theta_of_layers(theta, len(weights), options.activation, inputs.steps_by_matrix)
        point = tuple(
            rule.gradient_point(V, broadcast_gate(decay, V.shape[-1], by_column))
            for V in distances(chunk_start, base)
        )
        point = whole(point, base)
        gradient = inner_gradient(
            point, now.k, now.v, f, options.surprise_bound, rule, options.residual, now.extra
        )
        for j in range(1, min(rule.window, t) + 1):  # also the gradients of tokens before this one
            k, v = inputs.k[:, t - j], inputs.v[:, t - j]
            earlier = inner_gradient(point, k, v, f, options.surprise_bound, rule, options.residual)
            gamma = now.extra[..., j - 1, None, None]
            gradient = tuple(g + gamma * x for g, x in zip(gradient, earlier, strict=True))
        eta, *own = eta[:, :, None, None], *now.extra[..., None, None].unbind(2)
        step = partial(_updated, rule, f, (alpha, eta, *own), thetas, base=base, by_column=by_column)
        weights, momentum = step(weights, momentum, gradient)  # (13, 14)
        if rule.ends_chunks:
            kept = step(*kept, tuple(map(torch.zeros_like, gradient)))
            if t == last:
                lost = [broadcast_gate(decay, W.shape[-1], by_column) for W in weights]
                weights, momentum = end_chunk(rule, f, (weights, momentum), before, kept, lost, etas)
        read = weights if rule.reads == "token" else chunk_start
        y.append(apply_memory(read, now.q[:, :, None], f, options.residual)[:, :, 0])  # (15)
    return torch.stack(y, 1), weights, momentum


def _layer_by_layer(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """`DeltaTTT`: each layer predicts the value from its own input, and that error alone writes it."""
    rule, f, base, y = options.rule, ACTIVATIONS[options.activation], options.base, []
    assert isinstance(rule, DeltaTTT)
    for t in range(inputs.q.shape[1]):
        now = Inputs(*(x[:, t] for x in inputs))
        x, v, after = now.k[:, :, None], now.v[:, :, None], []
        for l, (W, S) in enumerate(zip(weights, momentum, strict=True)):
            gradient = x.mT @ clip_norm(2 * (x @ W - v), options.surprise_bound)
            theta = rule.later_theta(now.extra) if l else now.theta
            alpha = broadcast_gate(now.alpha, W.shape[-1], inputs.forgets_by_column)
            eta, theta = (gate[:, :, None, None] for gate in (now.eta, theta))
            V, S = rule.update(W - base[l] if base else W, S, gradient, alpha, eta, theta)
            after.append((V + base[l] if base else V, S))
            x = f.value(x @ (after[-1][0] if rule.post else W))
        weights, momentum = (tuple(part) for part in zip(*after, strict=True))
        y.append(apply_memory(weights, now.q[:, :, None], f)[:, :, 0])
    return torch.stack(y, 1), weights, momentum


def _updated(
    rule: Rule, f: Activation, gates: tuple[Tensor, ...], thetas: list[Tensor], weights: Layers,
    momentum: Layers, gradient: Layers, *, base: Layers, by_column: bool,
) -> tuple[Layers, Layers]:  # fmt: skip
    """Weights and momentum after a token; ``gates`` are alpha, eta and the rule's own."""
    alpha, eta, *own = gates
    alphas = [broadcast_gate(alpha, W.shape[-1], by_column) for W in weights]
    update = lambda W, S, g, alpha, theta: rule.update(W, S, g, alpha, eta, theta, *own)  # noqa: E731
    moved, momentum = each_matrix(f, update, distances(weights, base), momentum, gradient, alphas, thetas)
    return whole(moved, base), momentum


def write_budget(
    k: Tensor, eta: Tensor, theta: Tensor, chunk_size: int, cu_seqlens: Tensor | None = None,
    budget: float = 1.0,
) -> Tensor:  # fmt: skip
    """theta' of `budget.write_budget`, token by token as in its definition."""
    k, eta, theta = (x.to(state_dtype(k)) for x in (k, eta, theta))
    if cu_seqlens is not None:
        borders = pairwise(document_borders(cu_seqlens, k.shape[1]))
        parts = [[x[:, a:b] for x in (k, eta, theta)] for a, b in borders if a < b]
        return torch.cat([write_budget(*part, chunk_size=chunk_size, budget=budget) for part in parts], 1)
    steps, limited = [], []
    for t in range(k.shape[1]):
        first = t - t % chunk_size
        G = [(k[:, t] * k[:, u]).sum(-1).abs() for u in range(first, t + 1)]
        room = budget - sum((steps[u] * G[u - first] for u in range(first, t)), torch.zeros_like(theta[:, t]))
        # compares products instead of quotients, since 1 - eta and G_tt may be 0
        counts = G[-1] >= torch.finfo(theta.dtype).tiny
        over = counts & (2 * theta[:, t] * G[-1] > room.clamp(min=0) * (1 - eta[:, t]))
        most = room.clamp(min=0) / torch.where(counts, G[-1], 1)
        finite = counts & (eta[:, t] < 1)
        full = 2 * theta[:, t] / torch.where(finite, 1 - eta[:, t], 1)
        steps.append(torch.where(over, most, torch.where(finite, full, 0)))
        limited.append(torch.where(over, most * (1 - eta[:, t]) / 2, theta[:, t]))
    return torch.stack(limited, 1)


def _joined(documents: Sequence[Layers]) -> Layers:
    return tuple(torch.cat(layer) for layer in zip(*documents, strict=True))


def end_chunk(
    rule: Rule, f: Activation, after: tuple[Layers, Layers], start: tuple[Layers, Layers],
    kept: tuple[Layers, Layers], decays: Iterable[Tensor], eta: Tensor,
) -> tuple[Layers, Layers]:  # fmt: skip
    """`Rule.end_chunk` of every layer."""
    end = lambda *layer: rule.end_chunk(ChunkEnd._make((*layer, eta)))  # noqa: E731
    W, S = each_matrix(f, end, *after, *start, *kept, decays)
    return W, S


def each_matrix(
    f: Activation, function: Callable[..., tuple[Tensor, ...]], *parts: Iterable[Tensor]
) -> tuple[Layers, ...]:
    """``function`` of every layer's tensors [..., D, F], or [..., 1, 1], and its results by layer.

    Under a gated activation a hidden layer is two matrices, which are given to ``function`` one by one.
    """
    layers, results = list(zip(*parts, strict=True)), []
    for l, layer in enumerate(layers):
        if f.gated and l < len(layers) - 1:
            halves = zip(*(x.chunk(2, -1) if x.shape[-1] > 1 else (x, x) for x in layer), strict=True)
            both = zip(*(function(*half) for half in halves), strict=True)
            results.append(tuple(torch.cat(pair, -1) for pair in both))
        else:
            results.append(function(*layer))
    return tuple(zip(*results, strict=True))


def apply_memory(weights: Layers, x_BHTD: Tensor, f: Activation, residual: Output | None = None) -> Tensor:
    """M(x): the memory's MLP at given weights [B, H, D_in, D_out]; x and the result [B, H, T, D]."""
    hidden = x_BHTD
    for W in weights[:-1]:
        hidden = f.value(hidden @ W)
    return predict(residual, x_BHTD, hidden @ weights[-1])


def inner_gradient(
    weights: Layers, k_BHD: Tensor, v_BHD: Tensor, f: Activation, bound: float | None, rule: Rule,
    residual: Output | None = None, extra_BHE: Tensor | None = None,
) -> Layers:  # fmt: skip
    """Gradient of the rule's inner loss (eq. 12) for one token, each [B, H, D_in, D_out]."""
    extra = () if extra_BHE is None else extra_BHE[:, :, None].unbind(-1)
    error = lambda prediction, v: rule.error(prediction, v, *extra)  # noqa: E731
    inputs, errors = surprise(weights, k_BHD[:, :, None], v_BHD[:, :, None], f, bound, error, residual)
    return tuple(x.mT @ d for x, d in zip(inputs, errors, strict=True))


def squared_error(prediction: Tensor, v: Tensor) -> Tensor:
    """Gradient of ``||M(k) - v||^2`` with respect to the prediction M(k)."""
    return 2 * (prediction - v)


def surprise(
    weights: Layers, k_BHTD: Tensor, v_BHTD: Tensor, f: Activation, bound: float | None,
    error: Callable[[Tensor, Tensor], Tensor] = squared_error, residual: Output | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Input X and error d [B, H, T, D] of each layer; the gradient of token t is ``X_t^T d_t``.

    ``error`` is the gradient of the inner loss with respect to the prediction.
    """
    inputs, z = [k_BHTD], []
    for W in weights[:-1]:
        z.append(inputs[-1] @ W)
        inputs.append(f.value(z[-1]))
    last = inputs[-1] @ weights[-1]
    errors = [clip_norm(pull(residual, error(predict(residual, k_BHTD, last), v_BHTD), last), bound)]
    for W, out in zip(reversed(weights), reversed(z), strict=False):
        errors.insert(0, clip_norm(f.through(errors[0] @ W.mT, out), bound))
    return inputs, errors
