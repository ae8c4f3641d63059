"""Which calls the kernels support, and the reason why not for all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titans_kernels.memory.forms.triton import assembler
from titans_kernels.memory.forms.triton.pieces import INTERPRETED
from titans_kernels.memory.options import Layers, on_gpu

WIDTHS = (16, 32, 64, 128, 256)
HIDDEN = (16, 32, 64, 128, 256, 512)
CHUNKS = (16, 32, 64, 128)
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusal(
    q: Tensor, k: Tensor, v: Tensor, weights: Layers, chunk_size: int, dtype: torch.dtype | None = None
) -> str | None:
    """Why no kernel supports a call, or None if one does. ``dtype``: of the operands; q's by default."""
    if not on_gpu(q) and not INTERPRETED:
        return f"tensors are on {q.device.type}, and Triton's interpreter is off"
    widths = [q.shape[-1], *(W.shape[-1] for W in weights)]
    arch = None if INTERPRETED or not q.is_cuda else assembler.arch_of(q.device.index)
    return shape_refusal(widths, chunk_size, dtype or q.dtype, arch)


def shape_refusal(
    widths: Sequence[int], chunk_size: int, dtype: torch.dtype, arch: int | None = None
) -> str | None:
    """Why no kernel supports a memory on an architecture such as 90 (None: in the interpreter), or None.

    ``widths``: of keys, hidden layers and values.
    """
    ends, hidden = (widths[0], widths[-1]), set(widths[1:-1])
    if dtype not in TYPES:
        return f"no kernel for {dtype}"
    if chunk_size not in CHUNKS:
        return f"chunk_size {chunk_size} is not one of {', '.join(map(str, CHUNKS))}"
    if not set(ends).issubset(WIDTHS):
        return f"head widths {ends[0]}, {ends[1]} are not of {', '.join(map(str, WIDTHS))}"
    if len(hidden) > 1:
        return f"hidden widths {sorted(hidden)} differ"
    if not hidden.issubset(HIDDEN):
        return f"hidden width {hidden.pop()} is not one of {', '.join(map(str, HIDDEN))}"
    if arch is None:
        return None
    return too_large(dtype, chunk_size) or assembler.refusal(arch)


def too_large(dtype: torch.dtype, chunk_size: int) -> str | None:
    """Why a program of some kernel does not fit into a multiprocessor, or None if all do.

    A float32 product splits its operands into two parts, so 128 x 128 tiles need four times the memory of
    bf16: the backward of the reads would need 256 KB of Hopper's 227 KB of shared memory, 320 KB with hidden
    layers.
    """
    if dtype == torch.float32 and chunk_size == 128:
        return "chunk_size 128 in float32 needs more shared memory than a multiprocessor has"
    return None
