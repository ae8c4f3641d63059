"""The generic chunked form: any rule, by automatic differentiation. Slow, and right.

The gradients of a chunk's tokens are taken together, at the weights the chunk starts from;
the rule then updates the memory token after token. Gradients of the outer loss flow through all of it, the
inner gradients included.

Shapes: B rows or one packed document, H heads, T tokens of a chunk, D/F widths of a layer's input and output.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.activations import ACTIVATIONS, Activation
from titans_kernels.memory.options import Inputs, Layers, MemoryState, Options, Result
from titans_kernels.memory.reference import apply_memory, bounded, each_document
from titans_kernels.memory.rules import Rule
from titans_kernels.memory.vjp import flows, vjp


class OpenChunk(NamedTuple):
    """The memory inside a chunk, whatever the rule: what a token's gradient and its update need."""

    weights: Layers  # after the last token [B, H, D, F]
    momentum: Layers
    start: Layers  # weights the chunk starts from
    alpha: Tensor  # of the chunk's tokens so far [B, H, p]

    @staticmethod
    def of(state: MemoryState) -> OpenChunk:
        """An open chunk without tokens; ``state`` with a batch dimension."""
        first = state.weights[0]
        alpha = first.new_zeros(*first.shape[:2], 0)
        return OpenChunk(tuple(state.weights), tuple(state.momentum), tuple(state.weights), alpha)

    @property
    def position(self) -> int:
        """Tokens of the open chunk so far."""
        return self.alpha.shape[-1]

    def memory(self) -> MemoryState:
        """Weights and momentum after the last token."""
        return MemoryState(self.weights, self.momentum)


def forget_and_learn(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write every token and read it, as `reference.forget_and_learn` does, for the rule in ``options``."""
    return each_document(_rows, inputs.to_state_dtype(), weights, momentum, options)


def _rows(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    state, outputs = MemoryState(weights, momentum), []
    for chunk in zip(*(x.split(options.chunk_size, 1) for x in inputs), strict=True):
        y, opened = continue_chunk(Inputs(*chunk), OpenChunk.of(state), options)
        state = opened.memory()
        outputs.append(y)
    return torch.cat(outputs, 1), state.weights, state.momentum


def continue_chunk(inputs: Inputs, chunk: OpenChunk, options: Options) -> tuple[Tensor, OpenChunk]:
    """y [B, T, H, D] of the next tokens of a chunk, which do not reach beyond it, and the chunk with them."""
    now = Inputs(*(x.transpose(1, 2) for x in inputs))
    rule, f = options.rule, ACTIVATIONS[options.activation]
    alpha = torch.cat([chunk.alpha, now.alpha], -1)
    decay = (1 - alpha).cumprod(-1)[..., chunk.position :]
    gradients = token_gradients(rule, chunk.start, now.k, now.v, decay, f, options.surprise_bound)
    W, S, y = chunk.weights, chunk.momentum, []
    for t in range(now.q.shape[2]):
        gates = [gate[:, :, t, None, None] for gate in (now.alpha, now.eta, now.theta)]
        layers = zip(W, S, gradients, strict=True)
        after = [rule.update(w, s, g[:, :, t], *gates) for w, s, g in layers]
        W, S = (tuple(part) for part in zip(*after, strict=True))
        y.append(apply_memory(W, now.q[:, :, t : t + 1], f))
    return torch.cat(y, 2).transpose(1, 2), OpenChunk(W, S, chunk.start, alpha)


def token_gradients(
    rule: Rule, start: Layers, k: Tensor, v: Tensor, decay: Tensor, f: Activation, bound: float | None
) -> list[Tensor]:
    """Gradient of each token's inner loss for each layer [B, H, T, D, F].

    Args:
        start: weights the chunk starts from.
        k, v: [B, H, T, D].
        decay: [B, H, T], what the chunk's forgetting has left of ``start`` at each token.
        f: activation between the layers.
        bound: of each token's error signal at every layer, or None.
    """
    create_graph, x, pullbacks = flows(*start, k, v, decay), k[..., None, :], []
    for l, W in enumerate(start):
        points = rule.gradient_point(W[:, :, None], decay[..., None, None])
        points = points.expand(*k.shape[:3], *W.shape[-2:])
        layer = partial(_layer, f if l else ACTIVATIONS["identity"])
        # no error goes below the first layer
        asked, fixed = ((points, x), ()) if l else ((points,), (x,))
        x, pullback = vjp(layer, *asked, create_graph=create_graph, fixed=fixed)
        pullbacks.append(pullback)
    errors, gradients = [rule.error(x, v[..., None, :])], []
    for pullback in reversed(pullbacks):
        gradient, *errors = pullback(bounded(errors[0], bound))
        gradients.append(gradient)
    return gradients[::-1]


def _layer(f: Activation, W: Tensor, x: Tensor) -> Tensor:
    """From one layer's output before the non-linearity to the next one's."""
    return f.value(x) @ W
