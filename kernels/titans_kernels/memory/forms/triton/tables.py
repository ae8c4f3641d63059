"""Offsets of documents and their chunks in the flat tokens.

A batch [B, T] is B consecutive documents of T tokens, which needs no table. For packed documents the tables
are computed on the CPU from borders that are read once, and copied to the GPU in each call, so that they
belong to the stream and memory pool of that call. Chunks are numbered document by document.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory.forms.triton.launch import is_recording
from titans_kernels.memory.parts.layout import document_borders


class Tables(NamedTuple):
    """Offsets of at most M chunks: the ``length`` of equal rows, or int32 tables of N packed documents."""

    M: int
    longest: int
    """chunks of the longest document, or an upper bound; 1 while launches are recorded"""
    length: int = 0
    documents: Tensor | None = None  # [N, 3]: first token, token after the last, first chunk
    chunks: Tensor | None = None  # [M, 2]: first token, number of tokens; 0 for unused entries


def document_count(batch: int, cu_seqlens: Tensor | None) -> int:
    """Return the number of packed documents, or of rows of a batch."""
    return batch if cu_seqlens is None else cu_seqlens.shape[0] - 1


def chunk_count(tokens: int, documents: int, chunk_size: int, packed: bool) -> int:
    """Return the number of chunks: exact for equal rows, an upper bound for packed documents."""
    if packed:
        return tokens // chunk_size + documents
    return documents * -(-(tokens // documents) // chunk_size)


def tables(batch: int, length: int, cu_seqlens: Tensor | None, b: int, device: torch.device) -> Tables:
    """Tables of a batch of equal rows, or of documents packed into one row.

    Raises:
        ValueError: the borders of packed documents do not rise from 0 to ``length``.
    """
    if cu_seqlens is None:
        longest = 1 if is_recording() else -(-length // b)
        return Tables(chunk_count(batch * length, batch, b, False), longest, length)
    most = chunk_count(length, document_count(1, cu_seqlens), b, True)
    if _unreadable():
        longest = 1 if is_recording() else -(-length // b)
        return Tables(most, longest, 0, *_make(cu_seqlens.to(device), b, most))
    borders = document_borders(cu_seqlens, length)
    longest = max(-(-(end - first) // b) for first, end in pairwise(borders))
    return Tables(most, longest, 0, *(x.to(device) for x in _on_host(borders, b, most)))


def _unreadable() -> bool:
    """Return True if tensor values cannot be read: fake tensors, or during CUDA graph capture."""
    return is_recording() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


@lru_cache(maxsize=64)
def _on_host(borders: tuple[int, ...], b: int, most: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # so that later training steps can use it
        return _make(torch.tensor(borders), b, most)


def _make(bounds: Tensor, b: int, most: int) -> tuple[Tensor, Tensor]:
    first, end = bounds[:-1].long(), bounds[1:].long()
    stop = torch.cumsum((end - first + b - 1) // b, 0)
    chunk = torch.arange(most, device=bounds.device)
    document = torch.searchsorted(stop, chunk, right=True).clamp_(max=first.shape[0] - 1)
    before = torch.cat([stop.new_zeros(1), stop[:-1]])
    token = first[document] + (chunk - before[document]) * b
    count = (end[document] - token).clamp_(0, b)
    documents = torch.stack([first, end, before], 1)
    return documents.int(), torch.stack([token, count], 1).int()
