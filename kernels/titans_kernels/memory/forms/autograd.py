"""The generic chunked form: any rule, by automatic differentiation. Slow but correct.

The gradients of a chunk's tokens are computed together, at the weights at the start of the chunk; the rule
then updates the memory token by token. Gradients of the outer loss flow through everything, including the
inner gradients.

Shapes: B rows or one packed document, H heads, T tokens of a chunk, D/F input/output width of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.activations import ACTIVATIONS, Activation
from titans_kernels.memory.forms.reference import apply_memory, each_document, each_matrix, end_chunk
from titans_kernels.memory.options import (
    Inputs,
    Layers,
    MemoryState,
    Options,
    Result,
    broadcast_gate,
    distances,
    theta_of_layers,
    whole,
)
from titans_kernels.memory.parts.norms import clip_norm
from titans_kernels.memory.parts.vjp import flows, vjp
from titans_kernels.memory.residual import Output, predict, pull
from titans_kernels.memory.rules import Rule


class OpenChunk(NamedTuple):
    """The state inside a chunk, for any rule."""

    weights: Layers  # after the last token [B, H, D, F]; with a base, the offset from it
    momentum: Layers
    start: Layers  # weights at the start of the chunk, also as an offset
    alpha: Tensor  # after `Rule.gates`, of the chunk's tokens so far [B, H, p], or [B, H, p, A] per column
    keys: Tensor  # keys of the chunk's tokens with a write budget [B, H, p, D], else [B, H, 0, D]
    steps: Tensor  # their effective steps [B, H, p], or [B, H, 0]
    etas: Tensor  # [B, H, p] for a rule with `end_chunk`, which also needs the three below, else [B, H, 0]
    start_momentum: Layers
    kept: Layers  # the weights without the gradients of the chunk's tokens
    kept_momentum: Layers

    @staticmethod
    def of(state: MemoryState, rule: Rule) -> OpenChunk:
        """An open chunk without tokens; the tensors of ``state`` are [B, H, D, F]."""
        first = state.weights[0]
        none = first.new_zeros(*first.shape[:2], 0)
        keys = first.new_zeros(*none.shape, first.shape[-2])
        weights, momentum = tuple(state.weights), tuple(state.momentum)
        rest = (momentum, weights, momentum) if rule.ends_chunks else ((), (), ())
        return OpenChunk(weights, momentum, weights, none, keys, none, none, *rest)

    @property
    def position(self) -> int:
        """Number of tokens in the open chunk."""
        return self.alpha.shape[2]

    def memory(self) -> MemoryState:
        """Weights and momentum after the last token."""
        return MemoryState(self.weights, self.momentum)


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write every token and read it, as `reference.write_and_read` does, for the rule in ``options``."""
    return each_document(_rows, inputs.to_state_dtype(), weights, momentum, options)


def _rows(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    state, outputs = MemoryState(distances(weights, options.base), momentum), []
    for chunk, size in parts(inputs, options, 1):
        y, opened = continue_chunk(
            chunk, OpenChunk.of(state, options.rule), options._replace(chunk_size=size)
        )
        state = opened.memory()
        outputs.append(y)
    return torch.cat(outputs, 1), whole(state.weights, options.base), state.momentum


def parts(inputs: Inputs, options: Options, dim: int) -> Iterator[tuple[Inputs, int]]:
    """The tokens of each part of each chunk, along ``dim``, and its length in a full chunk (`Rule.parts`)."""
    b, T = options.chunk_size, inputs.q.shape[dim]
    chunks = [*[b] * (T // b), *[T % b] * (T % b > 0)]
    lengths = [length for chunk in chunks for length in options.rule.parts(chunk)]
    tokens = zip(*(x.split(lengths, dim) for x in inputs), strict=True)
    for part, length in zip(tokens, cycle(options.rule.parts(b)), strict=False):
        yield Inputs._make(part), length


def continue_chunk(inputs: Inputs, chunk: OpenChunk, options: Options) -> tuple[Tensor, OpenChunk]:
    """y [B, T, H, D] of the next tokens of a chunk, which must fit into it, and the extended chunk."""
    now = Inputs(*(x.transpose(1, 2) for x in inputs))
    rule, f, by_column, base = (
        options.rule, ACTIVATIONS[options.activation], now.forgets_by_column, options.base,
    )  # fmt: skip
    # copies, since a view would keep all tokens of the call alive
    forget, eta, theta = rule.gates(now.alpha, now.eta, now.theta)
    alpha = torch.cat([chunk.alpha, forget], 2) if chunk.position else forget.clone()
    etas = torch.cat([chunk.etas, now.eta], 2) if rule.ends_chunks else chunk.etas
    p = chunk.position
    decay = (1 - alpha).cumprod(2)[:, :, p:]
    decays = [broadcast_gate(decay, W.shape[-1], by_column) for W in chunk.start]
    gradients = token_gradients(
        rule, chunk.start, now.k, now.v, decays, f, options.surprise_bound, options.residual, base, now.extra
    )
    gates = [eta, *now.extra.unbind(-1)]
    thetas = theta_of_layers(theta, len(chunk.start), options.activation, now.steps_by_matrix)
    W, S, kept, y = chunk.weights, chunk.momentum, (chunk.kept, chunk.kept_momentum), []

    def update(W: Layers, S: Layers, gradients: list[Tensor], t: int) -> tuple[Layers, Layers]:
        eta, *own = (gate[:, :, t, None, None] for gate in gates)
        alphas = [broadcast_gate(forget[:, :, t], w.shape[-1], by_column) for w in W]
        steps = [theta[:, :, t] for theta in thetas]
        updated = lambda w, s, g, alpha, theta: rule.update(w, s, g, alpha, eta, theta, *own)  # noqa: E731
        W, S = each_matrix(f, updated, W, S, gradients, alphas, steps)
        return W, S

    for t in range(now.q.shape[2]):
        W, S = update(W, S, [g[:, :, t] for g in gradients], t)
        if rule.ends_chunks:
            kept = update(*kept, [torch.zeros_like(w) for w in W], t)
            if p + t + 1 == options.chunk_size:
                starts = whole(chunk.start, base), chunk.start_momentum
                after, rest = (whole(W, base), S), (whole(kept[0], base), kept[1])
                W, S = end_chunk(rule, f, after, starts, rest, [x[:, :, -1] for x in decays], etas)
                W = distances(W, base)
        read = whole(W if rule.reads == "token" else chunk.start, base)
        y.append(apply_memory(read, now.q[:, :, t : t + 1], f, options.residual))
    after = chunk._replace(weights=W, momentum=S, alpha=alpha, etas=etas, kept=kept[0], kept_momentum=kept[1])
    return torch.cat(y, 2).transpose(1, 2), after


def token_gradients(
    rule: Rule, start: Layers, k: Tensor, v: Tensor, decays: list[Tensor], f: Activation,
    bound: float | None, residual: Output | None, base: Layers, extra: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradient of each token's inner loss, per layer [B, H, T, D, F].

    Args:
        rule: the update rule.
        start: weights at the start of the chunk; with a base, the offset from it.
        k: keys, [B, H, T, D].
        v: values, [B, H, T, D].
        decays: per layer, the product of 1 - alpha up to and including each token, [B, H, T, 1, 1] or per
            column [B, H, T, 1, F].
        f: activation between the layers.
        bound: maximum norm of each token's error signal at every layer, or None.
        residual: residual around all layers, or None.
        base: [H, D, F] per layer, or empty.
        extra: the rule's own gates, [B, H, T, E].
    """
    norm = residual.norm if residual is not None else ()
    gates = extra[..., None, :].unbind(-1)
    create_graph, x, pullbacks = flows(*start, k, v, *decays, *norm, *base, *gates), k[..., None, :], []
    for l, (W, decay) in enumerate(zip(start, decays, strict=True)):
        points = rule.gradient_point(W[:, :, None], decay)
        points = points + base[l][:, None] if base else points
        points = points.expand(*k.shape[:3], *W.shape[-2:])
        layer = partial(_layer, f if l else ACTIVATIONS["identity"])
        # no error is propagated below the first layer
        asked, fixed = ((points, x), ()) if l else ((points,), (x,))
        x, pullback = vjp(layer, *asked, create_graph=create_graph, fixed=fixed)
        pullbacks.append(pullback)
    error = rule.error(predict(residual, k[..., None, :], x), v[..., None, :], *gates)
    errors, gradients = [pull(residual, error, x)], []
    for pullback in reversed(pullbacks):
        gradient, *errors = pullback(clip_norm(errors[0], bound))
        gradients.append(gradient)
    return gradients[::-1]


def _layer(f: Activation, W: Tensor, x: Tensor) -> Tensor:
    """From a layer's pre-activation to the next layer's."""
    return f.value(x) @ W
