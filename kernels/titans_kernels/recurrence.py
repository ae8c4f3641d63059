"""Linear attention with decay, used by RetNet, GLA, HGRN2 and Mamba2.

Each comes as a token-by-token recurrence and as a parallel form with the same signature and result. On a CPU
the recurrences of GLA, HGRN2 and Mamba run in C++ if a compiler is found (`titans_kernels.native`).

Shapes: B batch, T tokens, H heads, E key width, F value width, N chunks of c tokens (t and s below); G is E
for a decay per key channel and 1 for a decay per head.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from titans_kernels import ran
from titans_kernels.memory.options import operand_dtype, state_dtype, without_autocast
from titans_kernels.native import compiled, parallel_for, pointer, serves
from titans_kernels.scans import EVERY, resets

MIN_TOKENS, MIN_WIDTH = 16, 16
"""With fewer tokens, as in decoding, the kernels do not pay off; narrower heads do not fill a tensor core."""
MIN_LOG_DECAY = -32.0
"""Log decays are clamped here: 1e-14 of the state remains, negligible beside the next write. The kernels take
differences of cumulative log decays, so stronger ones add rounding errors, and minus infinity gives NaN."""
PART_BYTES = 2**30
"""Most bytes of a tensor of the chunked form, which takes longer rows in parts."""
INSTALLED = importlib.util.find_spec("fla") is not None


def recurrent_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, index_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``S_t = diag(exp log_decay_t) S_{t-1} + k_t^T v_t`` and ``y_t = q_t S_t``, token by token.

    Args:
        q: queries, [B, T, H, E].
        k: keys, [B, T, H, E].
        v: values, [B, T, H, F].
        log_decay: [B, T, H, G], at most 0.
        state: S_0, [B, H, E, F].
        index_BT: index of the packed document of each token; the state is reset to zero where a document
            starts inside a row.

    Returns:
        y [B, T, H, F] and the state after the last token [B, H, E, F], both in the dtype of the state.
    """
    dtype, outputs = state_dtype(q), []
    q, k, v, log_decay, state = (x.to(dtype) for x in (q, k, v, log_decay, state))
    with without_autocast(q):
        for t in range(q.shape[1]):
            if index_BT is not None and t:
                state = state * (index_BT[:, t] == index_BT[:, t - 1]).to(dtype)[:, None, None, None]
            state = log_decay[:, t, :, :, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None]
            outputs.append((q[:, t, :, None] @ state).squeeze(2))
    return torch.stack(outputs, 1) if outputs else v, state


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    index_BT: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`recurrent_linear_attention` in chunks: attention within a chunk, a recurrence across chunks.

    With ``D[t, s]`` the product of the decays after token s up to and including token t, each chunk computes

        y_t = exp(log decays up to t) q_t S + sum_{s <= t} (q_t D[t, s] k_s^T) v_s

    where S is the state at the start of the chunk. D is at most 1 and computed from sums of logarithms, so no
    decay overflows. A sequence may be split anywhere, since the state does not depend on the chunks. The
    default ``chunk_size`` is 64 tokens for a decay per head and 16 for a decay per channel, whose D is E
    times as large.

    On a GPU, flash-linear-attention's kernels are used if they are installed and support the call
    (`fla_attention`), on a CPU the compiled recurrence for a decay per key channel; `forms_used` tells
    which form ran. Passing ``chunk_size`` selects this form.
    Arguments and results as in `recurrent_linear_attention`.
    """
    T, dtype = q.shape[1], state_dtype(q)
    state = _checked(q, k, v, log_decay, state)
    if not T:
        return v.to(dtype), state.to(dtype)
    if chunk_size is None:
        operands = operand_dtype(v)
        reason = fla_refusal(v, q.shape[-1], log_decay.shape[-1], operands)
        if reason is None:
            q, k, v = (x.to(operands) for x in (q, k, v))
            tokens = q, k, v, log_decay, state, index_BT
            y, state = fla_attention(*tokens)  # pyright: ignore[reportCallIssue]
            return y.to(dtype), state
        if not torch.compiler.is_compiling():
            if v.is_cuda and T >= MIN_TOKENS:
                ran.warn_once("linear_attention", "chunks of PyTorch's operators", reason)
            inputs = [x.to(dtype) for x in (q, k, v, log_decay, state)]
            compiled = log_decay.shape[-1] == q.shape[-1] > 1 and v.numel() > 0 and serves(*inputs)
            ran.note("linear_attention", "native" if compiled else "chunked", v)
            if compiled:
                return _Attend.apply(*inputs, resets(index_BT))  # pyright: ignore[reportReturnType]
    q, k, v, log_decay = (x.to(dtype) for x in (q, k, v, log_decay))
    size = min(T, chunk_size or (64 if log_decay.shape[-1] == 1 else 16))
    # a chunk has decays [H, c, c, G] and a state
    largest = max(size**2 * log_decay[:, 0].numel(), state.numel(), 1) * dtype.itemsize
    tokens = max(1, PART_BYTES // largest) * size
    outputs, state = [], state.to(dtype)
    with without_autocast(q):
        if tokens >= T:
            return _chunked(q, k, v, log_decay, state, index_BT, size)
        for start in range(0, T, tokens):
            part = slice(start, start + tokens)
            index = None if index_BT is None else index_BT[:, part]
            if index_BT is not None and start:
                state = state * (index_BT[:, start] == index_BT[:, start - 1]).to(dtype)[:, None, None, None]
            here = q[:, part], k[:, part], v[:, part], log_decay[:, part]
            y, state = _chunked(*here, state, index, size)
            outputs.append(y)
    return torch.cat(outputs, 1), state


def _checked(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> Tensor:
    """Return a state of each row; raise ValueError where shapes differ, which compiled kernels do not see."""
    B, T, H, E = q.shape
    for name, x, expected in (("k", k, q.shape), ("v", v, (B, T, H, v.shape[-1]))):
        if x.shape != expected:
            raise ValueError(f"{name}: {list(x.shape)} does not fit q {list(q.shape)}")
    if log_decay.shape[:3] != (B, T, H) or log_decay.shape[-1] not in (1, E):
        raise ValueError(f"log_decay: {list(log_decay.shape)} does not fit q {list(q.shape)}")
    if state.shape[1:] != (H, E, v.shape[-1]) or state.shape[0] not in (1, B):
        raise ValueError(f"state: {list(state.shape)} is not [{B}, {H}, {E}, {v.shape[-1]}]")
    return state.expand(B, -1, -1, -1)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, index_BT: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    T = q.shape[1]
    q, k, v, log_decay = (_chunks(x, size) for x in (q, k, v, log_decay))
    sees, reads, writes, keeps = _borders(index_BT, T, size, q)
    D = torch.where(sees[..., None], _segment_sums(log_decay), -torch.inf).exp()  # [B, N, H, t, s, G]
    through = log_decay.cumsum(-2).exp()  # [B, N, H, t, G]
    kept = keeps * through[..., -1, :, None]
    added = (k * D[..., -1, :, :] * writes).mT @ v
    starts, state = _passed(kept, added, state)
    y = _scores(q, k, D) @ v + (q * through * reads) @ starts
    return y.transpose(2, 3).flatten(1, 2)[:, :T], state


def fla_refusal(v: Tensor, key_width: int, decays: int, operands: torch.dtype) -> str | None:
    """Return the reason for which FLA's kernels refuse a call with v [B, T, H, F] and ``decays`` G."""
    if not v.is_cuda:
        return "a CPU"
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
    """Return True if FLA's backward would raise; checked before the forward, while we can fall back."""
    import triton

    version = TorchVersion(triton.__version__)
    affected = TorchVersion("3.4") <= version < TorchVersion("3.7.1")
    return affected and torch.cuda.get_device_capability(device)[0] == 9


def fla_kernel(log_decay: Tensor) -> str:
    """Name of the kernel for this decay: per head or per key channel."""
    return "chunk_simple_gla" if log_decay.shape[-1] == 1 else "chunk_gla"


# torch.compile cannot trace the kernels: a compiled block has a graph break here
@torch.compiler.disable
def fla_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, index_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`recurrent_linear_attention` with the kernels of flash-linear-attention (the extra ``fla``) on a GPU.

    q, k and v must have one dtype.

    FLA's default scale of 1 / sqrt(key width) for q is overridden by 1; packed documents are one long row
    with cu_seqlens. y has the dtype of v, the state stays in float32. Second derivatives are not supported,
    since FLA's backward is not differentiable.
    """
    name = fla_kernel(log_decay)
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


class _Attend(torch.autograd.Function):
    """`recurrent_linear_attention` with a decay per key channel, in C++."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, starts: Tensor | None
    ):
        (B, T, H, E), values = q.shape, v.shape[-1]
        q, k, v, log_decay, state = inputs = [x.contiguous() for x in (q, k, v, log_decay, state)]
        y, end = torch.empty_like(v), torch.empty_like(state)
        saved = state.new_empty(B * H, -(-T // EVERY), E, values)
        ctx.save_for_backward(*inputs, starts, saved)
        ctx.shape = shape = (ctypes.c_int64 * 5)(T, H, E, values, EVERY)
        tensors = [pointer(x) for x in (*inputs, starts, y, end, saved)]
        run = compiled(q).attend_forward
        parallel_for(B * H, lambda *jobs: run(shape, *tensors, *jobs))
        return y, end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dend: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, starts, saved = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in inputs]
        before = [*inputs[:4], starts, saved, dy.contiguous(), dend.contiguous()]
        tensors, run = [pointer(x) for x in (*before, *grads)], compiled(dy).attend_backward
        parallel_for(len(saved), lambda *jobs: run(ctx.shape, *tensors, *jobs))
        return *grads, None


def _chunks(x: Tensor, size: int) -> Tensor:
    """Split [B, T, H, ...] into chunks [B, N, H, c, ...], padded with zeros, which leave the state as is."""
    return F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size)).transpose(2, 3)


def _segment_sums(x: Tensor) -> Tensor:
    """Entry [t, s] is the sum of x [..., c, G] after s up to t, computed without cancellation."""
    size = x.shape[-2]
    after = torch.ones(size, size, dtype=torch.bool, device=x.device).tril(-1)
    return torch.where(after[..., None], x[..., :, None, :], 0).cumsum(-3)


def _scores(q: Tensor, k: Tensor, D: Tensor) -> Tensor:
    """``q_t D[t, s] k_s^T``, [..., t, s]."""
    if D.shape[-1] == 1:
        return (q @ k.mT) * D.squeeze(-1)
    return ((D * k[..., None, :, :]) @ q[..., None]).squeeze(-1)


def _borders(
    index_BT: Tensor | None, T: int, size: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | int]:
    """Masks of packed documents.

    Which tokens t attend to s, which read the chunk's initial state, which write to its final state, and
    whether the initial state survives the chunk. The first is boolean [.., t, s]; the others are factors for
    [B, N, H, c, E] (twice) and [B, N, H, E, F].
    """
    causal = torch.ones(size, size, dtype=torch.bool, device=like.device).tril()
    if index_BT is None:
        one = like.new_ones(())
        return causal, one, one, 1
    # padding belongs to the last document and does not change its state
    index = torch.cat([index_BT, index_BT[:, -1:].expand(-1, -T % size)], 1).unflatten(1, (-1, size))
    before = torch.cat([index[:, :1, 0], index[:, :-1, -1]], 1)[..., None]
    last = index[..., -1:]
    same = (index[..., :, None] == index[..., None, :]) & causal
    reads, writes, keeps = (x.to(like.dtype)[:, :, None, :, None] for x in
                            (index == before, index == last, last == before))  # fmt: skip
    return same[:, :, None], reads, writes, keeps


def _passed(kept: Tensor, added: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """States at the start of each chunk, [B, N, ...], and the state after the last one."""
    starts = []
    for kept_n, added_n in zip(kept.unbind(1), added.unbind(1), strict=True):
        starts.append(state)
        state = kept_n * state + added_n
    return torch.stack(starts, 1), state


@torch.compiler.disable
def fla_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run ``S_t = a_t S_{t-1} + beta_t k_t^T (v_t - k_t a_t S_{t-1})``, ``y_t = q_t S_t`` with FLA's kernels.

    q, k [B, T, H, E] and v [B, T, H, F] must have one dtype; beta and the logarithm of a are [B, T, H]; if it
    is None, a is 1. ``state`` is [B, H, E, F], or of each packed document. Returns y and the state after.
    """
    if log_decay is None and q.dtype == torch.float32:  # which the kernel without a decay refuses
        log_decay = torch.zeros_like(beta)
    name = "delta_rule" if log_decay is None else "gated_delta_rule"
    ran.note("neural_memory", f"flash-linear-attention's chunk_{name}")
    kernel: Any = getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")
    gate = {} if log_decay is None else {"g": log_decay.float().clamp(min=MIN_LOG_DECAY)}
    borders = None if cu_seqlens is None else cu_seqlens.long()
    with without_autocast(q):
        return kernel(
            q, k, v, beta=beta.to(q.dtype), scale=1.0, initial_state=state.float().contiguous(),
            output_final_state=True, cu_seqlens=borders, **gate,
        )  # fmt: skip
