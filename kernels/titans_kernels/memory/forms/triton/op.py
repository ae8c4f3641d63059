"""The kernels as custom operators: `titans::memory_triton` and its backward.

They have a fake implementation and an autograd formula, so they work with torch.compile, autocast, DDP and
FSDP2. The fake implementation runs the same host code while recording the launches, so the shapes of the two
always agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from titans_kernels.memory.forms.triton import phases
from titans_kernels.memory.forms.triton.launch import record_launches
from titans_kernels.memory.forms.triton.phases import Kept, Tokens
from titans_kernels.memory.forms.triton.shapes import Shape, flatten, layers_of, unflatten
from titans_kernels.memory.forms.triton.tables import chunk_count, document_count, tables
from titans_kernels.memory.options import Inputs, Layers, Options, Result

KEEP_BYTES = 512 * 2**20
"""`keep_bytes` without a GPU."""


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write and read every token, as `reference.write_and_read` does, with ``options.operands``."""
    dtype = options.operands
    tokens = Tokens(*(x.to(dtype) for x in inputs[:3]), *(x.float() for x in inputs[3:6]))
    widths = [inputs.q.shape[-1], *(W.shape[-1] for W in weights)]
    y, after = _in_parts(tokens, flatten(*(options.shared_start or (weights, momentum))), options, widths)
    return (y, *unflatten(after, layers_of(tuple(widths))[0])) if options.final else (y, (), ())


def _in_parts(tokens: Tokens, start: Tensor, options: Options, widths: list[int]) -> tuple[Tensor, Tensor]:
    """y and the final state; without a gradient, long rows are processed in parts of bounded memory."""
    B, T, H, _ = tokens.q.shape
    b, packed = options.chunk_size, options.cu_seqlens is not None
    each = H * _chunk_bytes(widths, b, tokens.q.element_size())
    total = each * chunk_count(B * T, document_count(B, options.cu_seqlens), b, packed)
    rule = (widths, b, options.activation, options.surprise_bound or 0.0)
    most = keep_bytes(tokens.q.device) if options.keep_bytes is None else options.keep_bytes
    if torch.is_grad_enabled() or packed or total <= most:
        keep = torch.is_grad_enabled() and total <= most
        found = torch.ops.titans.memory_triton(
            *tokens, start, options.cu_seqlens, *rule, keep, options.final
        )  # fmt: skip
        return found[:2]
    out, length = [], b * max(1, most // (each * B))
    for t in range(0, T, length):
        part = (x[:, t : t + length] for x in tokens)
        y, start = torch.ops.titans.memory_triton(*part, start, None, *rule, False, True)[:2]
        out.append(y)
    return torch.cat(out, 1), start


def keep_bytes(device: torch.device) -> int:
    """Maximum bytes that the forward saves for its backward; beyond it the backward recomputes.

    A fraction of the GPU's total memory, not of its free memory, so that results do not depend on other
    processes.
    """
    if device.type != "cuda":
        return KEEP_BYTES
    return torch.cuda.get_device_properties(device).total_memory // 64


def _chunk_bytes(widths: list[int], b: int, element: int) -> int:
    """Bytes of `Kept` per chunk and head."""
    states = sum(2 * D * F for D, F in pairwise(widths)) * element
    hidden = 3 * sum(widths[1:-1]) + widths[-1]
    return states + 4 * b * b + b * (element * hidden + 4 * (5 + len(widths) - 1))


def _shape(
    q: Tensor, start: Tensor, cu_seqlens: Tensor | None, widths: Sequence[int], b: int, activation: str,
    bound: float,
) -> Shape:  # fmt: skip
    B, T, H, _ = q.shape
    layers, size = layers_of(tuple(widths))
    N, found = document_count(B, cu_seqlens), tables(B, T, cu_seqlens, b, q.device)
    precision = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
    return Shape(
        N, start.shape[0] < N, H, B * T, found.M, b, layers, size, activation, bound, precision,
        found,
    )  # fmt: skip


def _flat(*xs: Tensor) -> list[Tensor]:
    """[B, T, ...] to contiguous [B T, ...]."""
    return [x.flatten(0, 1).contiguous() for x in xs]


@torch.library.custom_op("titans::memory_triton", mutates_args=())
def memory_triton(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor, start: Tensor,
    cu_seqlens: Tensor | None, widths: Sequence[int], chunk_size: int, activation: str, bound: float,
    keep: bool, final: bool,
) -> list[Tensor]:  # fmt: skip
    """y, with ``final`` the final state [N, H, size], and with ``keep`` what the backward needs.

    ``start`` is [N, H, size], or [1, H, size] if all documents start from the same state.
    """
    shape = _shape(q, start, cu_seqlens, widths, chunk_size, activation, bound)
    x = Tokens(*_flat(q, k, v, alpha, eta, theta))
    y, after, kept = phases.forward(shape, x, start.contiguous(), keep=keep, final=final)
    return [y.view(v.shape), after, *kept]


@torch.library.custom_op("titans::memory_triton_backward", mutates_args=())
def memory_triton_backward(
    dy: Tensor, dafter: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, eta: Tensor, theta: Tensor,
    start: Tensor, cu_seqlens: Tensor | None, kept: Sequence[Tensor], widths: Sequence[int],
    chunk_size: int, activation: str, bound: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, alpha, eta, theta and start; an empty ``dafter`` is zeros."""
    shape = _shape(q, start, cu_seqlens, widths, chunk_size, activation, bound)
    x = Tokens(*_flat(q, k, v, alpha, eta, theta))
    found = Kept(*kept)
    if not found.states.numel():
        found = phases.recall(shape, x, start.contiguous())
    *tokens, dstart = phases.backward(shape, x, found, _flat(dy)[0], dafter.contiguous())
    return [*(d.view(y.shape) for d, y in zip(tokens, (q, k, v, alpha, eta, theta), strict=True)), dstart]


def _fake(op):
    def fake(*args, **kwargs):
        with record_launches():
            return op(*args, **kwargs)

    return fake


memory_triton.register_fake(_fake(memory_triton._init_fn))
memory_triton_backward.register_fake(_fake(memory_triton_backward._init_fn))


def _setup_context(ctx, inputs, output) -> None:
    *tensors, widths, chunk_size, activation, bound, _, _ = inputs
    _, _, *kept = output
    ctx.save_for_backward(*tensors, *kept)
    ctx.options = list(widths), chunk_size, activation, bound
    # most outputs are saved for the backward and have no gradients; zeros for them would double the memory
    ctx.set_materialize_grads(False)


def _autograd(ctx, grads):
    saved = ctx.saved_tensors  # read once: under activation checkpointing a second read fails
    *tensors, cu_seqlens = saved[:8]
    kept = list(saved[8:])
    dy = torch.zeros_like(tensors[2]) if grads[0] is None else grads[0]
    dafter = tensors[6].new_empty(0) if grads[1] is None else grads[1]
    found = torch.ops.titans.memory_triton_backward(dy, dafter, *tensors, cu_seqlens, kept, *ctx.options)
    return *found, None, None, None, None, None, None, None


memory_triton.register_autograd(_autograd, setup_context=_setup_context)
