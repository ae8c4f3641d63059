"""Softmax attention to the keys of a sliding window and to a prefix that every query sees.

Shapes: B batch, H heads, T queries, S keys, E head width, P keys of the prefix, w window.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from titans_core.documents import Documents
from titans_kernels import document_borders, state_dtype
from titans_kernels.memory.options import on_gpu, without_autocast


class KeyCache(NamedTuple):
    """KV cache: rotated keys and values, [B, H, S, E] each."""

    k: Tensor
    v: Tensor

    def extended(self, new: KeyCache) -> KeyCache:
        """Append the keys and values of later tokens."""
        return KeyCache(*(torch.cat(pair, 2) for pair in zip(self, new, strict=True)))


def last_keys(keys: KeyCache, keep: int) -> KeyCache:
    """Copy the last ``keep`` tokens of a cache: a view would keep the others in memory."""
    S = keys.k.shape[2]
    return keys if keep == S else KeyCache(*(x[:, :, S - keep :].clone() for x in keys))


def softmax_attention(q: Tensor, keys: KeyCache, mask: Tensor | None, prefix: KeyCache | None) -> Tensor:
    """Attention to the keys under ``mask`` (to all of them if None) and to the prefix [1, H, P, E].

    ``mask`` is [T, S] or [B, 1, T, S] bool, True where a query sees a key.
    """
    if prefix is not None:
        keys = KeyCache(*(p.expand(len(q), -1, -1, -1) for p in prefix)).extended(keys)
        mask = None if mask is None else F.pad(mask, (prefix.k.shape[2], 0), value=True)
    return F.scaled_dot_product_attention(q, *keys, attn_mask=mask)


def window_attention(
    q: Tensor, keys: KeyCache, prefix: KeyCache | None, window: int | None,
    hidden_BS: Tensor | None = None, cut_from: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sliding-window attention of the last T of S tokens; [B, H, T, E].

    Args:
        q: rotated queries of the last tokens, [B, H, T, E].
        keys: keys and values of all tokens.
        prefix: keys and values that every token sees.
        window: number of keys that a token sees, its own among them; None for all.
        hidden_BS: [B, S] bool, keys that no query sees.
        cut_from: [B or 1, 1] position of the first key if attention is cut at multiples of the window.
    """
    T, S = q.shape[2], keys.k.shape[2]
    before = S - T
    if cut_from is not None and window is not None:
        index_BS = (cut_from + torch.arange(S, device=q.device)) // window
        if hidden_BS is not None:
            index_BS = index_BS.masked_fill(hidden_BS, -1)
        return _blocked(F.pad(q, (0, 0, before, 0)), keys, window, prefix, index_BS)[:, :, before:]
    if window is None or window >= S:
        return _dense(q, keys, prefix, hidden_BS)
    if T == 1:  # a decode step attends to the whole window
        hidden_BS = None if hidden_BS is None else hidden_BS[:, -window:]
        return _dense(q, KeyCache(*(x[:, :, -window:] for x in keys)), prefix, hidden_BS)
    # padding queries for the cached tokens, at most a window of them, keeps the blocks aligned
    q = F.pad(q, (0, 0, before, 0))
    # hidden keys are treated as another document
    index_BS = None if hidden_BS is None else hidden_BS.long()
    return _blocked(q, keys, window, prefix, index_BS)[:, :, before:]


def packed_attention(
    q: Tensor, keys: KeyCache, prefix: KeyCache | None, window: int | None, documents: Documents,
    cut: bool = False,
) -> Tensor:  # fmt: skip
    """Attention within each document of a packed batch, cut at multiples of the window if ``cut``."""
    if cut and window is not None:
        within_BT = documents.position_BT // window
        return _blocked(q, keys, window, prefix, documents.index_BT * q.shape[2] + within_BT)
    if window is not None and window < q.shape[2]:
        return _blocked(q, keys, window, prefix, documents.index_BT)
    B, T = documents.index_BT.shape
    if prefix is None and documents.one_per_row:
        return _dense(q, keys, prefix)
    if torch.compiler.is_compiling():  # lengths are data-dependent
        index = documents.index_BT
        mask = (index[:, None, :, None] == index[:, None, None]).tril()
        return softmax_attention(q, keys, mask, prefix)
    lengths = [end - start for start, end in pairwise(document_borders(documents.cu_seqlens, B * T))]
    # split and cat: the gradient of each slice would be a tensor of the whole batch's size
    parts = (x.transpose(0, 1).flatten(1, 2)[None].split(lengths, 2) for x in (q, *keys))
    y = torch.cat([_dense(q, KeyCache(k, v), prefix) for q, k, v in zip(*parts, strict=True)], 2)
    return y[0].unflatten(1, (B, T)).transpose(0, 1)


def segment_attention(
    q: Tensor, tokens: KeyCache, reads: KeyCache, prefix: KeyCache | None, documents: Documents | None
) -> Tensor:
    """Attention of the last T of S tokens of a segment to the reads and tokens up to their own; [B, H, T, E].

    ``documents`` are segments in one row, which do not see each other.
    """
    if documents is not None:
        q, *others = (_swapped(documents.rows(_swapped(x))) for x in (q, *tokens, *reads))
        y = segment_attention(q, KeyCache(*others[:2]), KeyCache(*others[2:]), prefix, None)
        return _swapped(documents.row(_swapped(y)))
    T, S = q.shape[2], tokens.k.shape[2]
    causal = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return softmax_attention(q, reads.extended(tokens), torch.cat([causal, causal], 1), prefix)


def _swapped(x: Tensor) -> Tensor:
    """[B, H, T, E] to [B, T, H, E], and back."""
    return x.transpose(1, 2)


def _dense(q: Tensor, keys: KeyCache, prefix: KeyCache | None, hidden_BS: Tensor | None = None) -> Tensor:
    """Causal attention of the last T of S tokens to all before them."""
    T, S = q.shape[2], keys.k.shape[2]
    if hidden_BS is None and prefix is None and S == T:
        return F.scaled_dot_product_attention(q, *keys, is_causal=T > 1)
    if hidden_BS is None and T == 1:
        return softmax_attention(q, keys, None, prefix)
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return softmax_attention(q, keys, mask if hidden_BS is None else mask & ~hidden_BS[:, None, None], prefix)


def _blocked(q: Tensor, keys: KeyCache, w: int, prefix: KeyCache | None, index_BT: Tensor | None) -> Tensor:
    """Sliding window in blocks of w queries and 2 w keys: linear in T, without a T x T mask.

    ``index_BT`` is each token's document; attention does not cross documents.
    """
    B, T = q.shape[0], q.shape[2]
    blocks = -(-T // w)
    pad = blocks * w - T
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (blocks, w)).transpose(1, 2) for x in (q, *keys))
    k, v = (torch.cat([F.pad(x, (0,) * 6 + (1, -1)), x], 3) for x in (k, v))  # [B, blocks, H, 2w, E]
    query, key = torch.arange(w, device=q.device)[:, None], torch.arange(-w, w, device=q.device)
    mask = ((key <= query) & (key > query - w)).expand(1, blocks, w, 2 * w).clone()
    mask[:, 0, :, :w] = False  # there are no keys before the first block
    if index_BT is not None:
        own = F.pad(index_BT, (0, pad), value=-1).unflatten(1, (blocks, w))
        both = torch.cat([F.pad(own, (0, 0, 1, -1), value=-2), own], 2)
        mask = mask & (own[..., :, None] == both[..., None, :])
    mask = mask.expand(B, *mask.shape[1:]).flatten(0, 1)[:, None]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    y = softmax_attention(q, KeyCache(k, v), mask, prefix)
    return y.unflatten(0, (B, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :T]


def flash_supports(q: Tensor) -> bool:
    """Return True if varlen flash attention supports q: half precision on a GPU."""
    low = q.dtype in (torch.bfloat16, torch.float16)
    return on_gpu(q) and low and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def flash_attention(
    q: Tensor, sets: Sequence[KeyCache], prefix: KeyCache | None, plain_q: Tensor, window: int | None,
    documents: Documents | None = None,
) -> Tensor:  # fmt: skip
    """Attend causally to several sets of keys and a prefix, without a mask in memory; [B, H, T, E].

    Args:
        q: rotated queries, [B, H, T, E].
        sets: keys and values of all tokens, [B, H, T, E] each; a token sees every set's up to its own.
        prefix: keys and values that every token sees.
        plain_q: the queries that see the prefix, [B, H, T, E].
        window: number of keys of a set that a token sees; None for all.
        documents: of the tokens, which do not see each other's keys; None for one in each row.
    """
    B, _, T, _ = q.shape
    borders = torch.arange(B + 1, dtype=torch.int32, device=q.device) * T
    borders = borders if documents is None else documents.cu_seqlens
    flat = lambda x: x.transpose(1, 2).flatten(0, 1)  # noqa: E731
    k, v = (None, None) if prefix is None else (x[0] for x in prefix)
    keys = (flat(x) for pair in sets for x in pair)
    y = _Flash.apply(flat(q), flat(plain_q), k, v, borders, T, -1 if window is None else window - 1, *keys)
    assert isinstance(y, Tensor)
    return y.unflatten(0, (B, T)).transpose(1, 2)


class _Flash(torch.autograd.Function):
    """Flash attention to each set of keys, joined by their log-sum-exps.

    With the joint output and log-sum-exp flash attention's backward gives each set's share of the gradients.
    """

    @staticmethod
    def forward(ctx, q, plain_q, prefix_k, prefix_v, borders, longest, left, *keys):
        parts = [flash_forward(q, *pair, borders, longest, left) for pair in batched(keys)]
        lses = [lse for _, lse in parts]
        scores = None if prefix_k is None else _prefix_scores(plain_q, prefix_k)
        if scores is not None:
            lses.append(scores.logsumexp(-1))
        lse_HN = torch.stack(lses).logsumexp(0)
        (y, lse), *others = parts
        y = y * (lse - lse_HN).exp().T[..., None]
        for other, lse in others:
            y = y + other * (lse - lse_HN).exp().T[..., None]
        if scores is not None:
            P = (scores - lse_HN[..., None]).exp()
            with without_autocast(q):
                y = y + torch.einsum("hnp,hpe->nhe", P, prefix_v.to(P.dtype))
        y = y.to(q.dtype)
        ctx.save_for_backward(q, plain_q, prefix_k, prefix_v, borders, y, lse_HN, *keys)
        ctx.longest, ctx.left = longest, left
        return y

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, plain_q, k, v, borders, y, lse_HN, *keys = ctx.saved_tensors
        dy = dy.contiguous()
        grads = [
            flash_backward(dy, q, *pair, y, lse_HN, borders, ctx.longest, ctx.left) for pair in batched(keys)
        ]
        dq, *others = (grad[0] for grad in grads)
        for other in others:
            dq = dq + other
        after = None, None, None, *(x for grad in grads for x in grad[1:])
        if k is None:
            return dq, None, None, None, *after
        exact = state_dtype(q)
        P = (_prefix_scores(plain_q, k) - lse_HN[..., None]).exp()
        dy, y, v_ = dy.to(exact), y.to(exact), v.to(exact)
        with without_autocast(q):
            dP = torch.einsum("nhe,hpe->hnp", dy, v_) - (dy * y).sum(-1).T[..., None]
            dS = P * dP * q.shape[-1] ** -0.5
            dplain = torch.einsum("hnp,hpe->nhe", dS, k.to(exact)).to(q.dtype)
            dk = torch.einsum("hnp,nhe->hpe", dS, plain_q.to(exact)).to(k.dtype)
            dv = torch.einsum("hnp,nhe->hpe", P, dy).to(v.dtype)
        return dq, dplain, dk, dv, *after


def batched(keys: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of keys and values."""
    return list(zip(keys[::2], keys[1::2], strict=True))


def _prefix_scores(q_NHE: Tensor, k_HPE: Tensor) -> Tensor:
    """Scores of the prefix in the precision of a state, [H, N, P]."""
    exact = state_dtype(q_NHE)
    with without_autocast(q_NHE):
        return torch.einsum("nhe,hpe->hnp", q_NHE.to(exact), k_HPE.to(exact)) * q_NHE.shape[-1] ** -0.5


def flash_forward(q, k, v, borders, longest: int, left: int) -> tuple[Tensor, Tensor]:
    """Return outputs [N, H, E] and log-sum-exps [H, N] of torch's varlen flash attention."""
    import torch.nn.attention.varlen  # imports the compiler, which takes seconds

    op = torch.ops.torch_attn._varlen_attn
    return op(q, k, v, borders, borders, longest, longest, left < 0, None, [left, 0])[:2]


def flash_backward(dy, q, k, v, y, lse, borders, longest: int, left: int) -> Sequence[Tensor]:
    """Return gradients of q, k and v, given the outputs and log-sum-exps over all keys."""
    op, longs = torch.ops.torch_attn._varlen_attn_backward, (longest, longest)
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout
    return op(dy, q, k, v, y, lse, borders, borders, *longs, left < 0, unused, None, [left, 0])
