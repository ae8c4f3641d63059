"""flash-linear-attention's kernels for linear attention with decay: the extra ``fla``, on a GPU.

Shapes: B batch, T tokens, H heads, E key width, F value width, N documents; G is E or 1.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from titans_kernels import forms
from titans_kernels.memory.options import without_autocast

MIN_TOKENS, MIN_WIDTH = 16, 16
"""Fewer tokens, as when a model writes, are a few products; narrower heads fill no tensor core."""
MIN_LOG_DECAY = -32.0
"""The logarithm of a decay that leaves 1e-14 of a state, nothing beside what the next token writes. They take
differences of sums of decays: a stronger one adds rounding errors, and minus infinity makes them NaN."""
INSTALLED = importlib.util.find_spec("fla") is not None


def refusal(v: Tensor, key_width: int, decays: int, operands: torch.dtype) -> str | None:
    """Why these kernels do not serve a GPU's call with v [B, T, H, F] and G ``decays``; None if they do."""
    if v.shape[1] < MIN_TOKENS or min(key_width, v.shape[-1]) < MIN_WIDTH:
        return f"fewer than {MIN_TOKENS} tokens, or heads narrower than {MIN_WIDTH}"
    if key_width % 2 or v.shape[-1] % 2:
        return "heads of an odd width"
    if operands == torch.float64:
        return "float64"
    if operands == torch.float32 and not _rounds_to_tf32():
        return "float32 operands, which they round to TF32 (torch.backends.cuda.matmul.fp32_precision)"
    if not INSTALLED:
        return "flash-linear-attention is not installed (pip install 'titans-lab[fla]')"
    if decays == 1 and _wrong_on_hopper(v.device.index):
        return "its backward for one decay a head is refused on Hopper before Triton 3.7.1 (FLA's issue 640)"
    return None


@torch.compiler.assume_constant_result
def _rounds_to_tf32() -> bool:
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


@torch.compiler.assume_constant_result
def _wrong_on_hopper(device: int | None) -> bool:
    """As their backward asks, which raises: too late for another form."""
    import triton

    version = TorchVersion(triton.__version__)
    affected = TorchVersion("3.4") <= version < TorchVersion("3.7.1")
    return affected and torch.cuda.get_device_capability(device)[0] == 9


def kernel_name(log_decay: Tensor) -> str:
    """The kernel that takes such a decay."""
    return "chunk_simple_gla" if log_decay.shape[-1] == 1 else "chunk_gla"


# a compiler cannot trace the kernels: a compiled block breaks its graph here
@torch.compiler.disable
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, index_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`titans_kernels.recurrent_linear_attention` by their kernels; q, k and v of one type.

    Their q is scaled by the root of the key width unless told otherwise, and packed documents are one long
    row with borders. y has the type of v, the state stays in float32. A gradient of a gradient is not to be
    had: theirs carries no graph.
    """
    name = kernel_name(log_decay)
    forms.note("linear_attention", f"flash-linear-attention's {name}")
    # "fla.ops.gla" has "chunk_gla"; a decorator of theirs hides what it takes
    kernel: Any = getattr(importlib.import_module(f"fla.ops.{name.removeprefix('chunk_')}"), name)
    decay = log_decay.float().clamp(min=MIN_LOG_DECAY)
    tokens = (q, k, v, decay.squeeze(-1) if decay.shape[-1] == 1 else decay)
    borders, last = None, None
    if index_BT is not None:
        # a row continues `state` with its first document, and leaves that of its last
        starts = F.pad(index_BT[:, 1:] != index_BT[:, :-1], (1, 0), value=True)
        borders = F.pad(torch.nonzero(starts.flatten()).flatten(), (0, 1), value=starts.numel())
        count = starts.sum(1)
        last = count.cumsum(0) - 1
        tokens = tuple(x.flatten(0, 1)[None] for x in tokens)
        of_all = state.new_zeros(borders.numel() - 1, *state.shape[1:])
        state = of_all.index_copy(0, last + 1 - count, state)
    with without_autocast(q):
        y, after = kernel(
            *tokens, scale=1.0, initial_state=state.float(), output_final_state=True, cu_seqlens=borders
        )
    return (y, after) if last is None else (y.view_as(v), after[last])
