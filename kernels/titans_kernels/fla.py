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

from titans_kernels import ran
from titans_kernels.memory.options import without_autocast

MIN_TOKENS, MIN_WIDTH = 16, 16
"""With fewer tokens, as in decoding, the kernels do not pay off; narrower heads do not fill a tensor core."""
MIN_LOG_DECAY = -32.0
"""Log decays are clamped here: 1e-14 of the state remains, negligible beside the next write. The kernels take
differences of cumulative log decays, so stronger ones add rounding errors, and minus infinity gives NaN."""
INSTALLED = importlib.util.find_spec("fla") is not None


def refusal(v: Tensor, key_width: int, decays: int, operands: torch.dtype) -> str | None:
    """Why these kernels do not support a GPU call with v [B, T, H, F] and G ``decays``; None if they do."""
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
    """The condition on which FLA's backward raises, checked before the forward, while we can fall back."""
    import triton

    version = TorchVersion(triton.__version__)
    affected = TorchVersion("3.4") <= version < TorchVersion("3.7.1")
    return affected and torch.cuda.get_device_capability(device)[0] == 9


def kernel_name(log_decay: Tensor) -> str:
    """Name of the kernel for this decay: per head or per key channel."""
    return "chunk_simple_gla" if log_decay.shape[-1] == 1 else "chunk_gla"


# torch.compile cannot trace the kernels: a compiled block has a graph break here
@torch.compiler.disable
def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, index_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`titans_kernels.recurrent_linear_attention` with FLA's kernels; q, k and v must have one dtype.

    FLA's default scale of 1 / sqrt(key width) for q is overridden by 1; packed documents are one long row
    with cu_seqlens. y has the dtype of v, the state stays in float32. Second derivatives are not supported,
    since FLA's backward is not differentiable.
    """
    name = kernel_name(log_decay)
    ran.note("linear_attention", f"flash-linear-attention's {name}")
    # "fla.ops.gla" has "chunk_gla"; a decorator hides its signature from type checkers
    kernel: Any = getattr(importlib.import_module(f"fla.ops.{name.removeprefix('chunk_')}"), name)
    decay = log_decay.float().clamp(min=MIN_LOG_DECAY)
    tokens = (q, k, v, decay.squeeze(-1) if decay.shape[-1] == 1 else decay)
    borders, last = None, None
    if index_BT is not None:
        # the first document of a row starts from `state`, and the last one's state is returned
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
