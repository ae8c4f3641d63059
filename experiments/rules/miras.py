"""MIRAS's memories (arXiv 2504.13173): Huber, Yaad with a constant or a gated threshold, Moneta, Memora.

All are published without momentum (`momentum: false`) and with `residual: norm`, `expansion: 4` and
`activation: gelu`. Absolute values are ``sqrt(x^2 + 1e-6)``, as printed (Remark 5), and signs ``x / |x|`` of
these: the slope of the printed tanh is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from experiments.rules.matrices import TINY, EndedRule, decay
from titans_kernels import MemoryState, Rule
from titans_kernels.memory.options import Inputs, Options

SMOOTH = 1e-6


@dataclass(frozen=True)
class Huber(Rule):
    """Huber inner loss, coordinate by coordinate (Section 5.1).

    With ``e = M(k) - v`` the loss is the sum over coordinates of ``e^2`` where ``|e| <= delta`` and of
    ``2 delta |e| - delta^2`` beyond, so outliers have a gradient of constant size. This is twice MIRAS's H,
    which has a factor 1/2 that eq. 12 lacks, so that a large delta gives the paper's rule. MIRAS also makes
    delta depend on the token; here it is a constant.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise ValueError(f"delta: {self.delta} must be above 0 and finite")

    def loss(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        e = prediction - v
        near = e.clamp(-self.delta, self.delta)
        return (near * (2 * e - near)).sum(-1)


@dataclass(frozen=True)
class Yaad(Huber):
    """The update that MIRAS calls Yaad: a Huber loss that switches on the norm of the error.

    The gradient is of ``||e||_2^2`` where ``||e||_2 <= delta`` and of ``2 delta ||e||_1`` beyond;
    again twice MIRAS's. Unlike Huber's it is discontinuous at the threshold.
    """

    def loss(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        e = prediction - v
        near = e.square().sum(-1) <= self.delta**2
        return torch.where(near, e.square().sum(-1), 2 * self.delta * e.abs().sum(-1))


@dataclass(frozen=True)
class YaadGated(Rule):
    """Yaad with its threshold per token, ``delta_t = delta * gate_t`` (eq. 26).

    The gradient is of ``||e||_2^2`` where ``||e||_2 <= delta_t``, and of ``delta_t ||e||_1`` beyond;
    `Yaad`, with a constant delta, doubles the second.
    """

    extra_gates: ClassVar[int] = 1
    delta: float = 1.0

    def loss(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        squares, delta = (prediction - v).square(), self.delta * extra[0]
        near = squares.sum(-1) <= delta.square()
        return torch.where(near, squares.sum(-1), delta * (squares + SMOOTH).sqrt().sum(-1))


@dataclass(frozen=True)
class Moneta(EndedRule):
    """An l_p loss and weights normalised by their l_q norm (eqs. 24, 25).

        g = grad sum |e|^p;    Acc = (1 - alpha) Acc - theta g;    W = Acc / ||Acc||_q^(q-2)

    W is normalised at the end of a chunk only, as published; inside one it takes the steps of Acc. The norm
    is of a head's whole matrix (the text does not say). Acc is not kept: ``||W|| = ||Acc||^(3-q)`` gives
    it back, ``Acc = W ||W||^((q-2)/(3-q))``, and so the Acc that M_0 starts from.

    With q above 3 the scale is inverted: forgetting makes W larger, and a gate near 1 lets it grow without
    bound.
    """

    p: float = 3.0
    q: float = 4.0

    def __post_init__(self) -> None:
        for name, value, valid in (("p", self.p, self.p >= 1), ("q", self.q, self.q > 1 and self.q != 3)):
            if not valid:
                raise ValueError(
                    f"{name}: {value} must be {'1 or more' if name == 'p' else 'above 1, not 3'}"
                )

    def loss(self, prediction: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        return ((prediction - v).square() + SMOOTH).pow(self.p / 2).sum(-1)

    def end(self, start: MemoryState, after: MemoryState, tokens: Inputs) -> MemoryState:
        weights, kept = [], decay(tokens)
        for W0, W in zip(start.weights, after.weights, strict=True):
            Acc = W0 * self._norm(W0).pow((self.q - 2) / (3 - self.q))
            Acc = kept * Acc + (W - kept * W0)
            weights.append(Acc / self._norm(Acc).pow(self.q - 2))
        return MemoryState(tuple(weights), after.momentum)

    def _norm(self, W: Tensor) -> Tensor:
        return ((W.square() + TINY).pow(self.q / 2).sum((-2, -1), keepdim=True)).pow(1 / self.q)


@dataclass(frozen=True)
class Memora(EndedRule):
    """Weights that are distributions: ``W = softmax((1 - alpha) log W - theta grad)`` (eq. 27).

    A slice of the softmax is all inputs of one output (the text does not say). Gradients are taken at the
    start of a chunk, so its steps add up before the softmax: the weights at its end are exactly as in (27)
    with these gradients. Inside a chunk, reads see the steps added to W, as in the published parallel form.
    A memory must start from distributions; other weights are clamped above 0 first.

    With ``lag`` the first token of a chunk is the lag token of eq. 30: it takes a step of (27) of its own,
    from W to W_1, and the other tokens take their gradients at W_1 and add their steps to it,

        W_1 = softmax((1 - alpha_1) log W - theta_1 grad(W; k_1, v_1)),    g_t at W_1 for t > 1.

    The text does not say how ``log W`` is defined after linear steps, which may make a weight negative: here
    a chunk ends with the softmax of its steps added to ``log W_1``, as without ``lag``.
    """

    lag: float = 0.0

    def chunk(self, tokens: Inputs, state: MemoryState, options: Options) -> tuple[Tensor, MemoryState]:
        b, size = tokens.q.shape[2], options.chunk_size
        if not self.lag or size == 1:
            return super().chunk(tokens, state, options)
        outputs = []
        for start, length in ((0, 1), (1, size - 1)):
            if start < b:
                part = Inputs(*(x[:, :, start : start + length] for x in tokens))
                y, state = super().chunk(part, state, options._replace(chunk_size=length))
                outputs.append(y)
        return torch.cat(outputs, 2), state

    def end(self, start: MemoryState, after: MemoryState, tokens: Inputs) -> MemoryState:
        weights, kept = [], decay(tokens)
        for W0, W in zip(start.weights, after.weights, strict=True):
            logarithm = W0.clamp(min=torch.finfo(W0.dtype).tiny).log()
            weights.append((kept * logarithm + W - kept * W0).softmax(-2))
        return MemoryState(tuple(weights), after.momentum)
