"""Where documents and their chunks lie among the flat tokens, found on the device without waiting for it.

A batch [B, T] is B documents of T tokens one after another; packed documents are any lengths. Chunks are
numbered document by document.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from titans_kernels.memory.triton.launch import writing_down


class Tables(NamedTuple):
    """int32 tables of N documents and at most M chunks of up to b tokens."""

    documents: Tensor  # [N, 3]: first token, token after the last, first chunk
    chunks: Tensor  # [M, 2]: first token, how many tokens; 0 for a chunk that is not there


def chunk_count(tokens: int, documents: int, chunk_size: int, packed: bool) -> int:
    """Number of chunks: exact for equal rows, an upper bound for packed documents of unknown lengths."""
    if packed:
        return tokens // chunk_size + documents
    return documents * -(-(tokens // documents) // chunk_size)


def tables(batch: int, length: int, cu_seqlens: Tensor | None, b: int, device: torch.device) -> Tables:
    """Tables of a batch of equal rows, or of documents packed into one row."""
    if cu_seqlens is None:
        return (_equal_fresh if of_the_moment() else _equal)(batch, length, b, device)
    most = chunk_count(length, cu_seqlens.shape[0] - 1, b, True)
    if of_the_moment() or cu_seqlens.is_inference():  # which has no version to know a change by
        return _make(cu_seqlens.to(device), b, most)
    version, kept = _packed.get(cu_seqlens) or (-1, {})
    if version != cu_seqlens._version:
        version, kept = cu_seqlens._version, {}
        _packed[cu_seqlens] = version, kept
    if (b, device) not in kept:
        kept[b, device] = _make(cu_seqlens.to(device), b, most)
    return kept[b, device]


def of_the_moment() -> bool:
    """Whether tensors made now are not to be kept: they hold nothing, or belong to a graph being captured."""
    return writing_down() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Tables by cu_seqlens: every layer of a model needs those of the same tensor."""


def _equal_fresh(batch: int, length: int, b: int, device: torch.device) -> Tables:
    bounds = torch.arange(0, (batch + 1) * length, length, device=device)
    return _make(bounds, b, chunk_count(batch * length, batch, b, False))


_equal = lru_cache(maxsize=64)(_equal_fresh)


def _make(bounds: Tensor, b: int, most: int) -> Tables:
    first, end = bounds[:-1].long(), bounds[1:].long()
    stop = torch.cumsum((end - first + b - 1) // b, 0)
    chunk = torch.arange(most, device=bounds.device)
    document = torch.searchsorted(stop, chunk, right=True).clamp_(max=len(first) - 1)
    before = torch.cat([stop.new_zeros(1), stop[:-1]])
    token = first[document] + (chunk - before[document]) * b
    count = (end[document] - token).clamp_(0, b)
    documents = torch.stack([first, end, before], 1)
    return Tables(documents.int(), torch.stack([token, count], 1).int())
