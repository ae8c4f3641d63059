"""A delta rule in each layer: DeltaTTT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from titans_kernels import MemoryState, Rule
from titans_kernels.memory.activations import ACTIVATIONS
from titans_kernels.memory.forms.reference import apply_memory, clip_norm
from titans_kernels.memory.options import Inputs, Options, broadcast_gate, whole


@dataclass(frozen=True)
class DeltaTTT(Rule):
    """Each layer has an inner loss of its own, ``||x W - v||^2`` of its input x (DeltaTTT, arXiv 2610.08553).

    For two layers A and B, activation f and the rates r, one token is

        A += r1 k^T (v - k A)              (9)
        h = f(k A),  B += r2 h^T (v - h B) (11)
        y = f(q A) B                       (12)

    where h reads A before its write, or with ``post`` after it (10). Each layer must be as wide as the value,
    and there is no residual. It is computed token by token, as with chunks of one; at 6d21fe7 each layer was
    a scan (docs of that commit have its speed).

    The paper does not print how rates are made: here ``r1 = 2 theta_t`` in [0, 2 max_theta], and r2 is a gate
    in [0, 1] of its own. Decay, momentum and a surprise bound work as in other rules; the published rule has
    none of them.
    """

    extra_gates: ClassVar[int] = 1

    post: float = 0.0

    def chunk(self, tokens: Inputs, state: MemoryState, options: Options) -> tuple[Tensor, MemoryState]:
        if len(widths := {W.shape[-1] for W in state.weights}) > 1 or options.residual is not None:
            raise ValueError(
                f"rule: DeltaTTT needs layers as wide as the value, without a residual; widths {widths}"
            )
        outputs = []
        for t in range(tokens.q.shape[2]):
            now = Inputs(*(x[:, :, t : t + 1] for x in tokens))
            state = self._written(now, state, options)
            outputs.append(apply_memory(whole(state.weights, options.base), now.q, options))
        return torch.cat(outputs, 2), state

    def _written(self, now: Inputs, state: MemoryState, options: Options) -> MemoryState:
        x, v, f, after = now.k, now.v, ACTIVATIONS[options.activation], []
        alpha, eta = (gate[:, :, 0] for gate in (now.alpha, now.eta))
        thetas = now.theta, *[now.extra[..., 0] / 2] * (len(state.weights) - 1)
        bases = options.base or tuple(torch.zeros_like(V) for V in state.weights)
        for V, S, base, theta in zip(*state, bases, thetas, strict=True):
            W = V + base
            gradient = x.mT @ clip_norm(2 * (x @ W - v), options.surprise_bound)
            forget = broadcast_gate(alpha, W.shape[-1], alpha.ndim > 2)
            V, S = self.update(V, S, gradient, forget, eta[..., None, None], theta[..., None])
            after.append((V, S))
            if self.post:
                W = V + base
            x = f.value(x @ W)
        weights, momentum = zip(*after, strict=True)
        return MemoryState(weights, momentum)
