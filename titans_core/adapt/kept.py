"""Tokens kept whole beyond the window: those that surprised the layer most.

A matrix reads back a blend of what was written to it; a name or a number needs the sharp read of softmax. So
a layer can keep some tokens as they are, and surprise decides which. Every token is written to a small memory
M of each head of keys and values under the gated delta rule, which is not trained, and surprises it by
``|v - M k|^2 / |v|^2`` (the loss of eq. 12, before the write). A token's score is the mean surprise of the
tokens around it. Of those that have left the window the ``most`` with the highest scores are kept, and every
query sees them at the distance of the window's last token.

Shapes: B rows, T tokens, N kept tokens, C candidates, H query heads, G heads of keys and values, R = H / G,
E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from titans_core.adapt.memory import AROUND, extend_matrix
from titans_core.memory import zero_momentum
from titans_kernels import AnyState, DecodeState, MemoryState

STEP, FORGET = 0.5, 0.001
"""Of the error that a write removes, and of the memory that a token forgets."""
PIECE = 256
"""Queries whose kept tokens are selected at once."""


class Kept(NamedTuple):
    """What a layer keeps after any token."""

    k: Tensor
    """[B, N, G, E], before positions, in the order of the text."""
    v: Tensor
    score: Tensor
    """[B, N]."""
    surprise: Tensor
    """[B, h], of the last tokens."""
    memory: AnyState


def start(k_BTGE: Tensor) -> Kept:
    """Return what is kept before the first token."""
    B, _, G, E = k_BTGE.shape
    none, score = k_BTGE[:, :0], k_BTGE.new_zeros(B, 0, dtype=torch.float32)
    weights = (k_BTGE.new_zeros(B, G, E, E, dtype=torch.float32),)
    return Kept(none, none, score, score, DecodeState.of(MemoryState(weights, zero_momentum(weights))))


@torch.no_grad()
def surprised(kept: Kept, k_BTGE: Tensor, v_BTGE: Tensor, window: int) -> tuple[Tensor, Kept]:
    """Return the scores [B, T] of the tokens that leave the window when these come in, and write these.

    Tokens leave once the text is longer than the window; a score of one that does not is meaningless.
    """
    k, v, held = F.normalize(k_BTGE.float(), dim=-1), v_BTGE.float(), kept.surprise.shape[1]
    rate = torch.ones_like(k[..., 0])
    read, memory = extend_matrix(k, k, v, FORGET * rate, STEP * rate, kept.memory)
    # the write has removed STEP of the error
    error = ((v - read) / (1 - STEP)).square().sum(-1) / v.square().sum(-1).clamp(min=1e-12)
    surprise = torch.cat([kept.surprise, error.mean(2)], 1)
    score = F.avg_pool1d(surprise, 2 * AROUND + 1, 1, AROUND, count_include_pad=False)
    score = F.pad(score, (window, 0))[:, held : held + k.shape[1]]
    last = surprise[:, -(window + AROUND) :].clone()  # a copy: a view would keep that of all tokens
    return score, kept._replace(surprise=last, memory=memory)


def attend(
    attention: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], q_BTHE: Tensor, kept: Kept,
    k_BTGE: Tensor, v_BTGE: Tensor, score_BT: Tensor, most: int,
) -> tuple[Tensor, Tensor, Tensor, Kept]:  # fmt: skip
    """Let a token that has left the window compete with the kept ones, then attend to those, T times.

    Args:
        attention: `titans_core.adapt.attention._attend`.
        q_BTHE: scaled queries.
        kept: before these tokens.
        k_BTGE: keys of the tokens that leave the window with each query, values ``v_BTGE``, their scores.
        score_BT: see `surprised`.
        most: N.

    Returns:
        [B, T, H, E], [B, T, H] log sums of exponentials, [T] numbers of kept tokens, and what is kept after.
    """
    outputs, levels, counts = [], [], []
    for q, *new in zip(*(x.split(PIECE, 1) for x in (q_BTHE, k_BTGE, v_BTGE, score_BT)), strict=True):
        k, v, score = (torch.cat(pair, 1) for pair in zip(kept[:3], new, strict=True))
        stays = _stay(score, q.shape[1], most)
        queries = q.unflatten(2, (k.shape[2], -1)).permute(2, 0, 3, 1, 4).flatten(2, 3)  # [G, B, R T, E]
        keys, values = (x.permute(2, 0, 1, 3) for x in (k, v))
        of = attention(queries[None], keys[None], values[None], stays)
        y, level = (x[0].unflatten(2, (-1, q.shape[1])) for x in of)  # [G, B, R, T, ..]
        outputs.append(y.permute(1, 3, 0, 2, 4).flatten(2, 3))
        levels.append(level.permute(1, 3, 0, 2).flatten(2, 3))
        counts.append(stays[0].sum(-1))
        # those that stay, in the order of the text; their number without asking the device
        order = stays[:, -1].to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        order = order[:, :most]
        pick = lambda x: x.take_along_dim(order.view(*order.shape, *[1] * (x.ndim - 2)), 1)  # noqa: B023, E731
        kept = kept._replace(k=pick(k), v=pick(v), score=pick(score))
    return torch.cat(outputs, 1), torch.cat(levels, 1), torch.cat(counts), kept


def _stay(score_BC: Tensor, queries: int, most: int) -> Tensor:
    """[B, queries, C]: the last ``queries`` candidates come one by one; a query sees the best until then."""
    C = score_BC.shape[1]
    index = torch.arange(C, device=score_BC.device)
    other, own = score_BC[:, :, None], score_BC[:, None]
    # of equals the earlier stays
    above = (other > own) | ((other == own) & (index[:, None] < index))
    rank = above.cumsum(1)[:, C - queries :]
    return (rank < most) & (index <= index[C - queries :, None])
