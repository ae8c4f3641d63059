"""The calls that the kernels support, and the reason why not for all others.

A reason is one sentence that begins with the field of `MemoryConfig` to change. Imports no Triton, so that it
can be used where a run is planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from titans_kernels.memory.forms.triton import assembler
from titans_kernels.memory.forms.triton.launch import INTERPRETED
from titans_kernels.memory.options import Layers, Options, on_gpu

MOST_WIDTH = 2048
"""Widest head and hidden layer."""
CHUNKS = (16, 32, 64, 128)
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusal(q: Tensor, weights: Layers, options: Options) -> str | None:
    """Return why no kernel supports a call, or None if one does."""
    if options.norm:
        return "residual: no kernel computes norm, x + LN(f(x)); set none or input, or backend: chunked"
    arch = options.arch
    if arch is None and not INTERPRETED:
        if not on_gpu(q):
            return f"backend: tensors are on {q.device.type}, and Triton's interpreter is off"
        arch = assembler.arch_of(q.device.index) if q.is_cuda else None
    widths = [q.shape[-1], *(W.shape[-1] for W in weights)]
    return shape_refusal(widths, options.chunk_size, options.operands or q.dtype, arch)


def shape_refusal(
    widths: Sequence[int], chunk_size: int, dtype: torch.dtype, arch: int | None = None
) -> str | None:
    """Return why no kernel supports a memory on an architecture such as 90 (None: interpreted), or None.

    ``widths``: of keys, hidden layers and values.
    """
    hidden = set(widths[1:-1])
    if dtype not in TYPES:
        return f"backend: no kernel computes in {dtype}; use bfloat16 or float32, or backend: chunked"
    if chunk_size not in CHUNKS:
        return (
            f"chunk_size: {chunk_size} is not one of the kernels' {', '.join(map(str, CHUNKS))}; set one of "
            f"them, or backend: chunked"
        )
    if max(widths) > MOST_WIDTH:
        return (
            f"heads: a memory is {max(widths)} wide and the kernels' are at most {MOST_WIDTH}; use more "
            f"heads, or backend: chunked"
        )
    if len(hidden) > 1:
        return f"weights: hidden widths {sorted(hidden)} differ; make them equal, or use backend: chunked"
    return None if arch is None else too_large(dtype, chunk_size) or no_compiler(arch)


def too_large(dtype: torch.dtype, chunk_size: int) -> str | None:
    """Return why a program of some kernel does not fit into a multiprocessor, or None if all do.

    A float32 product splits its operands into two parts, so 128 x 128 tiles need four times the memory of
    bf16: the backward of the reads would need 256 KB of Hopper's 227 KB of shared memory, 320 KB with hidden
    layers.
    """
    if dtype == torch.float32 and chunk_size == 128:
        return (
            "chunk_size: 128 in float32 needs more shared memory than a multiprocessor has; set 64, or "
            "compute in bfloat16, or set backend: chunked"
        )
    return None


def no_compiler(arch: int) -> str | None:
    """Return why the kernels cannot be compiled for an architecture, or None if they can.

    A machine that has neither a GPU nor Triton only plans a run for another one, of which nothing is known.
    """
    if find_spec("triton") is not None:
        return assembler.refusal(arch)
    if not torch.cuda.is_available():
        return None
    return "backend: Triton is not installed; install the package triton, or set backend: chunked"
