"""Norms and orthogonalisation of weights, for rules that act at the end of a chunk."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from titans_kernels import MemoryState, Rule
from titans_kernels.memory.forms.generic import write_chunk
from titans_kernels.memory.forms.reference import apply_memory, clip_norm
from titans_kernels.memory.options import Inputs, Options, distances, whole

TINY = 1e-20
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""a, b, c of each iteration, as in LaCT's code (`zeropower_via_newtonschulz5`)."""


@dataclass(frozen=True)
class EndedRule(Rule):
    """A rule that changes the state at the end of a full chunk; the last token already reads it.

    A chunk that is not full, such as the last one of a text, is not ended.
    """

    @abstractmethod
    def end(self, start: MemoryState, after: MemoryState, tokens: Inputs) -> MemoryState:
        """Return the state after a full chunk, from full weights [B, H, D, F] before and after its tokens."""

    def inside(self, tokens: Inputs) -> Inputs:
        """Return the tokens that the chunk is written with."""
        return tokens

    def chunk(self, tokens: Inputs, state: MemoryState, options: Options) -> tuple[Tensor, MemoryState]:
        y, after = write_chunk(self, self.inside(tokens), state, options)
        if tokens.q.shape[2] < options.chunk_size:
            return y, after
        full = lambda part: part._replace(weights=whole(part.weights, options.base))  # noqa: E731
        ended = self.end(full(state), full(after), tokens)
        if self.reads == "token":
            y = torch.cat([y[:, :, :-1], apply_memory(ended.weights, tokens.q[:, :, -1:], options)], 2)
        return y, ended._replace(weights=distances(ended.weights, options.base))


def decay(tokens: Inputs) -> Tensor:
    """Product of 1 - alpha over a chunk, [B, H, 1, 1]."""
    return (1 - tokens.alpha).prod(2)[..., None, None]


def clip_matrix(W: Tensor, bound: float) -> Tensor:
    """Matrices [..., D, F] clipped to a Frobenius norm."""
    return clip_norm(W.flatten(-2), bound).view_as(W)


def with_row_norms_of(W: Tensor, start: Tensor) -> Tensor:
    """W [..., D, F] with the weights of each output scaled to their norm in ``start``.

    Those are the columns of our ``x W``; published code has them as rows.
    """
    before, after = (x.square().sum(-2, keepdim=True) + TINY for x in (start, W))
    return W * (before / after).sqrt()


def newton_schulz(G: Tensor) -> Tensor:
    """G [..., D, F] with its singular values brought near 1, as Muon does, on the smaller side."""
    X = G.mT if G.shape[-2] > G.shape[-1] else G
    X = X / ((X.square().sum((-2, -1), keepdim=True) + TINY).sqrt() + 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if G.shape[-2] > G.shape[-1] else X
