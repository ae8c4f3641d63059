"""Which calls the kernels support, and the reason why not for all others."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from titans_kernels.memory.forms.triton.pieces import INTERPRETED
from titans_kernels.memory.options import Layers

WIDTHS = (16, 32, 64, 128, 256)
HIDDEN = (16, 32, 64, 128, 256, 512)
CHUNKS = (16, 32, 64, 128)
TYPES = (torch.bfloat16, torch.float16, torch.float32)
WRONG_ON_HOPPER = (12, 8), (13, 1)
"""Versions of ptxas from the first on, before the second, give wrong numbers or write outside of shared
memory where wgmma takes an operand from registers, as in most products here: 12.8.93 did both and 13.0.88 the
latter on the same PTX, 13.1.80 neither (flash-linear-attention, pull request 1262 and issue 640)."""


def refusal(
    q: Tensor, k: Tensor, v: Tensor, weights: Layers, chunk_size: int, dtype: torch.dtype | None = None
) -> str | None:
    """Why no kernel supports a call, or None if one does. ``dtype``: of the operands; q's by default."""
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
    if INTERPRETED:
        return None
    return too_large(dtype, chunk_size) or miscompiled(q.device.index)


def too_large(dtype: torch.dtype, chunk_size: int) -> str | None:
    """Why a program of some kernel does not fit into a multiprocessor, or None if all do.

    A float32 product splits its operands into two parts, so 128 x 128 tiles need four times the memory of
    bf16: the backward of the reads would need 256 KB of Hopper's 227 KB of shared memory, 320 KB with hidden
    layers.
    """
    if dtype == torch.float32 and chunk_size == 128:
        return "chunk_size 128 in float32 needs more shared memory than a multiprocessor has"
    return None


@torch.compiler.assume_constant_result
def miscompiled(device: int | None) -> str | None:
    """Why Triton's ptxas may miscompile the kernels for a CUDA device, or None.

    `TITANS_PTXAS=any` in the environment disables the check.
    """
    if os.environ.get("TITANS_PTXAS") == "any" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    version = assembler()
    first, fixed = WRONG_ON_HOPPER
    if not first <= tuple(map(int, version.split("."))) < fixed:
        return None
    return (
        f"ptxas {version} miscompiles products for Hopper (FLA's pull request 1262): upgrade to Triton 3.9, "
        "which has a newer one, or set TITANS_PTXAS=any to use it anyway"
    )


def assembler() -> str:
    """Version of the ptxas that Triton takes for Hopper."""
    from triton.backends.nvidia.compiler import get_ptxas

    return get_ptxas(90).version
