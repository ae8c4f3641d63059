"""Tokens kept whole beyond the window: the most attended to and the most surprising.

A matrix reads back a blend of what was written to it; a name or a number needs the sharp read of softmax. So
a layer can keep some of the tokens that leave the window as they are. A weighted sum of two scores decides:

- the attention that a token receives in the older half of its time in the window, the mean of a group's query
  heads (H2O, arXiv 2306.14048, counts all of it; attention from the next few tokens says little about what
  later ones will need);
- surprise (in EM-LLM, arXiv 2407.09450, it bounds events). Every token is written to a small untrained memory
  M of each head of keys and values under the gated delta rule, and surprises it by ``|v - M k|^2 / |v|^2``,
  the loss before the write; what counts is the mean surprise of the tokens around one.

Each group keeps its own. Every query sees them at distance W, or where they stood by a table of positions.

Shapes: B rows, T tokens, N kept tokens, C candidates, H query heads, G heads of keys and values, R = H / G,
E head width, W window. A group is a head of keys and values with its query heads.
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
WEIGHT = 4 / 3
"""The weight of surprise, beside 1 of the attention received."""
PIECE = 256
"""Queries whose kept tokens are selected at once."""


class Kept(NamedTuple):
    """The tokens that a layer keeps, and what it knows of those in its window, after any token."""

    k: Tensor
    """[B, G, N, E], at position 0, in the order of the text."""
    v: Tensor
    score: Tensor
    """[B, G, N]."""
    received: Tensor
    """[B, h, G], the attention that tokens of the window have received from queries W / 2 later and more."""
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
    none, weights = k_BTGE.new_empty(B, G, 0, E), (k_BTGE.new_zeros(B, G, E, E, dtype=torch.float32),)
    score, received, surprise = (weights[0].new_empty(shape) for shape in ((B, G, 0), (B, 0, G), (B, 0)))
    memory = DecodeState.of(MemoryState(weights, zero_momentum(weights)))
    return Kept(none, none, score, received, surprise, memory)


@torch.no_grad()
def write(kept: Kept, k_BTGE: Tensor, v_BTGE: Tensor, window: int) -> tuple[Tensor, Kept]:
    """Write tokens to the memory, before positions.

    Returns:
        [B, T], the mean surprise around the tokens that leave the window as these come in, without meaning
        where none does; and the state after, whose kept tokens `attend` updates.
    """
    k, v, held = F.normalize(k_BTGE.float(), dim=-1), v_BTGE.float(), kept.surprise.shape[1]
    rate = torch.ones_like(k[..., 0])
    read, memory = extend_matrix(k, k, v, FORGET * rate, STEP * rate, kept.memory)
    # the write has removed STEP of the error
    error = ((v - read) / (1 - STEP)).square().sum(-1) / v.square().sum(-1).clamp(min=1e-12)
    surprise = torch.cat([kept.surprise, error.clamp(max=MOST).mean(2)], 1)
    around = F.avg_pool1d(surprise, 2 * AROUND + 1, 1, AROUND, count_include_pad=False)
    around = F.pad(around, (window, 0))[:, held : held + k.shape[1]]
    last = surprise[:, -(window + AROUND) :].clone()  # a copy: a view would keep all tokens'
    return around, kept._replace(surprise=last, memory=memory)


def attend(
    attention: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], q_BTHE: Tensor, kept: Kept,
    k_BTGE: Tensor, v_BTGE: Tensor, score_BTG: Tensor, limit: int,
) -> tuple[Tensor, Tensor, Kept]:  # fmt: skip
    """Attend to the kept tokens, which each token that leaves the window may join in the place of another.

    Args:
        attention: `titans_core.adapt.attention._attend`.
        q_BTHE: scaled queries, at position W.
        kept: before these tokens.
        k_BTGE: keys at position 0 of the tokens that leave the window with each query.
        v_BTGE: their values.
        score_BTG: their scores.
        limit: N.

    Returns:
        [B, T, H, E], log sums of exponentials [B, T, H], and the state after.
    """
    outputs, levels, G = [], [], k_BTGE.shape[2]
    for q, *new in zip(*(x.split(PIECE, 1) for x in (q_BTHE, k_BTGE, v_BTGE, score_BTG)), strict=True):
        k, v, score = (torch.cat([x, y.transpose(1, 2)], 2) for x, y in zip(kept[:3], new, strict=True))
        seen = _seen(score, q.shape[1], limit)
        queries = q.unflatten(2, (G, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, G, R T, E]
        # each head of keys and values of a row is a block: they do not keep the same tokens
        attended = attention(*(x.flatten(0, 1)[None, None] for x in (queries, k, v)), seen.flatten(0, 1))
        y, level = (x[0, 0].unflatten(0, (-1, G)).unflatten(2, (-1, q.shape[1])) for x in attended)
        outputs.append(y.permute(0, 3, 1, 2, 4).flatten(2, 3))
        levels.append(level.permute(0, 3, 1, 2).flatten(2, 3))
        # in the order of the text; their number without asking the device
        order = seen[:, :, -1].to(torch.uint8).argsort(dim=2, descending=True, stable=True)[..., :limit]
        k, v = (x.take_along_dim(order[..., None], 2) for x in (k, v))
        kept = kept._replace(k=k, v=v, score=score.take_along_dim(order, 2))
    return torch.cat(outputs, 1), torch.cat(levels, 1), kept


def _seen(score_BGC: Tensor, queries: int, limit: int) -> Tensor:
    """[B, G, queries, C]: candidates come one by one with the queries; each sees the best until then."""
    n, index = score_BGC.shape[2] - queries, torch.arange(score_BGC.shape[2], device=score_BGC.device)
    held, new = score_BGC.split([n, queries], 2)
    # of two with equal scores the earlier stays
    rank = held.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
    rank = torch.cat([rank, (held[..., None] >= new[..., None, :]).sum(2)], 2)
    other, own = new[..., None], score_BGC[..., None, :]
    above = (other > own) | ((other == own) & (index[n:, None] < index))
    return (rank[..., None, :] + above.cumsum(2, dtype=torch.int32) < limit) & (index <= index[n:, None])
