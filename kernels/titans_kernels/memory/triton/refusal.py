"""Which calls the kernels serve, and of every other why they do not."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from titans_kernels.memory.options import Layers
from titans_kernels.memory.triton.pieces import INTERPRETED

WIDTHS = (16, 32, 64, 128)
HIDDEN = (16, 32, 64, 128, 256, 512)
CHUNKS = (16, 32, 64, 128)
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusal(
    q: Tensor, k: Tensor, v: Tensor, weights: Layers, chunk_size: int, dtype: torch.dtype | None = None
) -> str | None:
    """Why no kernel serves a call, or None where one does. ``dtype`` of the operands, else q's."""
    dtype = dtype or q.dtype
    if not q.is_cuda and not INTERPRETED:
        return f"tensors are on {q.device.type}, and Triton's interpreter is off"
    if dtype not in TYPES:
        return f"no kernel for {dtype}"
    if chunk_size not in CHUNKS:
        return f"chunk_size {chunk_size} is not one of {', '.join(map(str, CHUNKS))}"
    hidden = {W.shape[-1] for W in weights[:-1]}
    if q.shape[-1] not in WIDTHS or v.shape[-1] not in WIDTHS:
        return f"head widths {q.shape[-1]}, {v.shape[-1]} are not of {', '.join(map(str, WIDTHS))}"
    if len(hidden) > 1:
        return f"hidden widths {sorted(hidden)} differ"
    if not hidden.issubset(HIDDEN):
        return f"hidden width {hidden.pop()} is not one of {', '.join(map(str, HIDDEN))}"
    return None if INTERPRETED else too_large(dtype, chunk_size, len(weights))


def too_large(dtype: torch.dtype, chunk_size: int, depth: int) -> str | None:
    """Why a multiprocessor can not hold a program of some kernel, or None where it can.

    A float32 product takes its operands in two parts, so tiles of 128 x 128 cost four times those of bf16:
    the reads' backward would ask for 320 KB of shared memory, of 227.
    """
    if dtype == torch.float32 and chunk_size == 128 and depth > 1:
        return "chunk_size 128 in float32 with a hidden layer takes more shared memory than there is"
    return None
