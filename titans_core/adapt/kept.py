"""Tokens kept whole beyond the window: the ones which surprised the layer most.

A matrix reads back a blend of what was written to it; a name or a number needs the sharp read of softmax. So
a layer can keep some tokens as they are, and surprise decides which (in EM-LLM, arXiv 2407.09450, surprise
at the next token bounds events). Every token is written to a small untrained memory M of each head of keys
and values under the gated delta rule, and surprises it by ``|v - M k|^2 / |v|^2``, the loss before the write.
A token's score is the mean surprise of the tokens around it. Of the tokens that have left the window the ones
with the highest scores are kept; every query sees them at distance W, or where they stood by a table of
positions.

Shapes: B rows, T tokens, N kept tokens, C candidates, H query heads, G heads of keys and values, R = H / G,
E head width, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from titans_core.memory import expand_momentum, zero_momentum
from titans_kernels import AnyState, DecodeState, Extension, MemoryState, extend_memory, find_rule

AROUND = 8
"""Tokens before and after one whose surprise counts for it."""
STEP, FORGET = 0.5, 0.001
"""The part of the error that a write removes, and of the memory that a token forgets."""
MOST = 4.0
"""Surprise of a value that is predicted with the wrong sign. Values near zero, as of tokens that heads attend
to for want of another, would have any."""
PIECE = 256
"""Queries whose kept tokens are selected at once."""


class Kept(NamedTuple):
    """The tokens that a layer keeps, and the memory that they surprised, after any token."""

    k: Tensor
    """[B, N, G, E], at position 0, in the order of the text."""
    v: Tensor
    score: Tensor
    """[B, N]."""
    surprise: Tensor
    """[B, h], of the last tokens."""
    memory: AnyState


def extend_matrix(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, theta: Tensor, state: AnyState
) -> tuple[Tensor, AnyState]:
    """Write each token to a matrix under the gated delta rule, then read with its query.

    Args:
        q: [B, T, M, E], keys ``k`` and values ``v`` alike; keys have norm 1.
        alpha: [B, T, M], the part of the matrix that is forgotten.
        theta: [B, T, M], the part of the error that is removed.
        state: whose momentum is a scalar, since the rule has none.

    Returns:
        The reads [B, T, M, E], and the state after the last token.
    """
    state = state._replace(momentum=expand_momentum(state.momentum, state.weights))
    y, after = extend_memory(
        q, k, v, alpha, torch.zeros_like(alpha), theta / 2, state, chunk_size=1,
        extension=Extension(rule=find_rule("gated_delta"), is_delta_rule=True),
    )  # fmt: skip
    return y, after._replace(momentum=zero_momentum(after.weights))


def start(k_BTGE: Tensor) -> Kept:
    """Return what is kept before the first token."""
    B, _, G, E = k_BTGE.shape
    none, score = k_BTGE[:, :0], k_BTGE.new_zeros(B, 0, dtype=torch.float32)
    weights = (k_BTGE.new_zeros(B, G, E, E, dtype=torch.float32),)
    return Kept(none, none, score, score, DecodeState.of(MemoryState(weights, zero_momentum(weights))))


@torch.no_grad()
def write(kept: Kept, k_BTGE: Tensor, v_BTGE: Tensor, window: int) -> tuple[Tensor, Kept]:
    """Write tokens to the memory, before positions.

    Returns:
        [B, T], the scores of the tokens that leave the window as these come in, without meaning where none
        does; and the state after, whose kept tokens `attend` updates.
    """
    k, v, held = F.normalize(k_BTGE.float(), dim=-1), v_BTGE.float(), kept.surprise.shape[1]
    rate = torch.ones_like(k[..., 0])
    read, memory = extend_matrix(k, k, v, FORGET * rate, STEP * rate, kept.memory)
    # the write has removed STEP of the error
    error = ((v - read) / (1 - STEP)).square().sum(-1) / v.square().sum(-1).clamp(min=1e-12)
    surprise = torch.cat([kept.surprise, error.clamp(max=MOST).mean(2)], 1)
    score = F.avg_pool1d(surprise, 2 * AROUND + 1, 1, AROUND, count_include_pad=False)
    score = F.pad(score, (window, 0))[:, held : held + k.shape[1]]
    last = surprise[:, -(window + AROUND) :].clone()  # a copy: a view would keep all tokens'
    return score, kept._replace(surprise=last, memory=memory)


def attend(
    attention: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], q_BTHE: Tensor, kept: Kept,
    k_BTGE: Tensor, v_BTGE: Tensor, score_BT: Tensor, limit: int,
) -> tuple[Tensor, Tensor, Kept]:  # fmt: skip
    """Attend to the kept tokens, which each token that leaves the window may join in the place of another.

    Args:
        attention: `titans_core.adapt.attention._attend`.
        q_BTHE: scaled queries, at position W.
        kept: before these tokens.
        k_BTGE: keys at position 0 of the tokens that leave the window with each query.
        v_BTGE: their values, and ``score_BT`` their scores.
        limit: N.

    Returns:
        [B, T, H, E], log sums of exponentials [B, T, H], and the state after.
    """
    outputs, levels = [], []
    for q, *new in zip(*(x.split(PIECE, 1) for x in (q_BTHE, k_BTGE, v_BTGE, score_BT)), strict=True):
        k, v, score = (torch.cat(pair, 1) for pair in zip(kept[:3], new, strict=True))
        seen = _seen(score, q.shape[1], limit)
        queries = q.unflatten(2, (k.shape[2], -1)).permute(2, 0, 3, 1, 4).flatten(2, 3)  # [G, B, R T, E]
        keys, values = (x.permute(2, 0, 1, 3) for x in (k, v))
        of = attention(queries[None], keys[None], values[None], seen)
        y, level = (x[0].unflatten(2, (-1, q.shape[1])) for x in of)  # [G, B, R, T, ..]
        outputs.append(y.permute(1, 3, 0, 2, 4).flatten(2, 3))
        levels.append(level.permute(1, 3, 0, 2).flatten(2, 3))
        # in the order of the text; their number without asking the device
        order = seen[:, -1].to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        order = order[:, :limit]
        pick = lambda x: x.take_along_dim(order.view(*order.shape, *[1] * (x.ndim - 2)), 1)  # noqa: B023, E731
        kept = kept._replace(k=pick(k), v=pick(v), score=pick(score))
    return torch.cat(outputs, 1), torch.cat(levels, 1), kept


def _seen(score_BC: Tensor, queries: int, limit: int) -> Tensor:
    """[B, queries, C]: the last ``queries`` candidates come one by one; a query sees the best until then."""
    n = score_BC.shape[1] - queries
    index = torch.arange(n + queries, device=score_BC.device)
    # of two with equal scores the earlier stays
    other, own = score_BC[:, :, None], score_BC[:, None]
    above = (other > own) | ((other == own) & (index[:, None] < index))
    rank = above[:, :n].sum(1, keepdim=True) + above[:, n:].cumsum(1)
    return (rank < limit) & (index <= index[n:, None])
