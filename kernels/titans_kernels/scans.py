"""The scan ``h_t = a_t h_{t-1} + b_t``, and Mamba's selective scan.

Shapes: B batch, T tokens, C channels, N states of each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from titans_kernels.layers import Partial
from titans_kernels.native import compiled, parallel_for, pointer, serves

EVERY = 16
"""Tokens between the states that the compiled recurrences store for their backward."""


def recurrent_scan(a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """``h_t = a_t h_{t-1} + b_t``, token by token, for a, b [B, T, ...] and h_0 [B, ...]; h [B, T, ...]."""
    outputs = []
    for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
        state = a_t * state + b_t
        outputs.append(state)
    return torch.stack(outputs, 1) if outputs else b


WIDE = 8192
"""Elements per token from which a single token saturates a CPU, so that chunks are no faster."""


def scan(a: Tensor, b: Tensor, state: Tensor, chunk_size: int | None = None) -> Tensor:
    """`recurrent_scan` parallel over chunks: T / c + 2 c sequential steps instead of T.

    First computes the states at chunk boundaries, then the tokens of all chunks in parallel. The default
    ``chunk_size`` minimises the number of steps, with at least 16 tokens; on a CPU a row with many elements
    per token is one chunk. The backward saves only a and h and is not differentiable itself.
    """
    T = a.shape[1]
    if not T:
        return b
    compiling = torch.compiler.is_compiling()
    size = min(T, chunk_size or _scan_tokens(a, compiling))
    # torch.compile derives its own backward
    return _swept(_write, a, b, state, size, back=False)[0] if compiling else _Scan.apply(a, b, state, size)


def _scan_tokens(a: Tensor, compiling: bool = False) -> int:
    """Tokens of a chunk of `scan` of a [B, T, ...]."""
    T, whole = a.shape[1], a.device.type == "cpu" and a[:, 0].numel() >= WIDE and not compiling
    return min(T, T if whole else max(16, int((T // 2) ** 0.5)))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, state: Tensor, size: int) -> Tensor:
        h, _ = _swept(_write, a, b, state, size, back=False)
        ctx.save_for_backward(a, h, state)
        ctx.size = size
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        """``dh_t = g_t + a_{t+1} dh_{t+1}``, in reverse order."""
        a, h, state = ctx.saved_tensors
        dh, d_state = _swept(_collect, a, grads[0], torch.zeros_like(state), ctx.size, back=True)
        da = torch.empty_like(dh)
        torch.mul(dh[:, 0], state, out=da[:, 0])
        torch.mul(dh[:, 1:], h[:, :-1], out=da[:, 1:])
        return da, dh, d_state, None


def _write(a_t: Tensor, b_t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.addcmul(b_t, a_t, h)
    return h, h


def _collect(a_t: Tensor, g_t: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    dh = g_t + carry
    return dh, a_t * dh


def _swept(
    step: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    a: Tensor,
    b: Tensor,
    carry: Tensor,
    size: int,
    *,
    back: bool,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of ``step`` at each token, [B, T, ...], and the last carry; in reverse if ``back``.

    A step is linear in the carry with factor a_t, so a chunk is a step whose factor is the product of its a.
    """
    T = a.shape[1]
    if short := -T % size:
        pad = [0, 0] * (a.ndim - 2) + [0, short]
        a, b = F.pad(a, pad, value=1.0), F.pad(b, pad)
    a, b = (x.unflatten(1, (-1, size)) for x in (a, b))
    tokens = list(zip(a.unbind(2), b.unbind(2), strict=True))[:: -1 if back else 1]
    starts = [carry]
    if a.shape[1] > 1:
        end, through = torch.zeros_like(a[:, :, 0]), a.prod(2)
        for a_t, b_t in tokens:
            _, end = step(a_t, b_t, end)
        for n in range(a.shape[1])[:: -1 if back else 1]:
            starts.append(through[:, n] * starts[-1] + end[:, n])
        carry = torch.stack(starts[:-1][:: -1 if back else 1], 1)
    else:
        carry = carry[:, None]
    outputs = []
    for a_t, b_t in tokens:
        y, carry = step(a_t, b_t, carry)
        outputs.append(y)
    y = torch.stack(outputs[:: -1 if back else 1], 2).flatten(1, 2)[:, :T]
    return y, starts[-1] if a.shape[1] > 1 else carry[:, 0]


def selective_scan(
    dt: Tensor, x: Tensor, b: Tensor, c: Tensor, rate: Tensor, state: Tensor, index_BT: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mamba's recurrence (Gu and Dao 2023, arXiv 2312.00752, eq. 2): for each channel

        h_t = exp(-dt_t rate) h_{t-1} + dt_t x_t b_t,    y_t = <c_t, h_t>

    Compiled on a CPU; elsewhere in parts of tokens, whose states take at most `PART_BYTES`.

    Args:
        dt: steps, at least 0, [B, T, C].
        x: inputs, [B, T, C].
        b: input weights, the same for all channels, [B, T, N].
        c: output weights, [B, T, N].
        rate: rates of decay, at least 0, [C, N].
        state: h_0, [B, C, N].
        index_BT: index of the packed document of each token; the state is reset to zero where a document
            starts inside a row.

    Returns:
        y [B, T, C] and the state after the last token [B, C, N], in the common dtype of the arguments.
    """
    (B, T, C), N = x.shape, rate.shape[-1]
    expected = {"dt": (dt, (B, T, C)), "b": (b, (B, T, N)), "c": (c, (B, T, N)), "rate": (rate, (C, N))}
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name}: {list(tensor.shape)} is not {list(shape)}")
    if state.shape[1:] != (C, N) or state.shape[0] not in (1, B):
        raise ValueError(f"state: {list(state.shape)} is not [{B}, {C}, {N}]")
    state, starts = state.expand(B, C, N), resets(index_BT)
    if x.numel() and serves(dt, x, b, c, rate, state):
        return _Select.apply(dt, x, b, c, rate, state, starts)  # pyright: ignore[reportReturnType]
    if not x.shape[1]:
        return x, state
    y, states = scan_parts(dt, x, b, c, rate, state, starts)
    return y, states[-1]


PART_BYTES = 2**28
"""Most bytes of the states [B, t, C, N] of a part."""
_SCAN = "Tensor dt, Tensor x, Tensor b, Tensor c, Tensor rate, Tensor state, Tensor? starts"


# opaque to torch.compile, which would unroll every step; the backward computes the states again
@library.custom_op("titans::scan_parts", mutates_args=(), schema=f"({_SCAN}) -> Tensor[]")
def scan_parts(dt, x, b, c, rate, state, starts):
    """y [B, T, C] and the states before each part and after the last, [parts + 1, B, C, N]."""
    outputs, states = [], [state.clone()]
    for part in _parts(state, dt, x, b, c, starts):
        dt_t, x_t, b_t, c_t, starts_t = part
        _, h = _part_states(dt_t, x_t, b_t, c_t, starts_t, rate, states[-1])
        outputs.append((h @ c_t[..., None]).squeeze(-1))
        states.append(h[:, -1].clone())
    return [torch.cat(outputs, 1), torch.stack(states)]


@library.custom_op(
    "titans::scan_parts_backward",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor dend, Tensor states, {_SCAN}) -> Tensor[]",
)
def scan_parts_backward(dy, dend, states, dt, x, b, c, rate, state, starts):
    """Return gradients of dt, x, b, c, rate and state."""
    chunks, drate = [], torch.zeros_like(rate)
    parts = zip(_parts(state, dt, x, b, c, starts), dy.split(_part_tokens(state), 1), states, strict=False)
    for (dt_, x_, b_, c_, starts_), dy_, first in reversed(list(parts)):
        decay, h = _part_states(dt_, x_, b_, c_, starts_, rate, first)
        dh, dend = _swept(
            _collect, decay, dy_[..., None] * c_[:, :, None], dend, _scan_tokens(decay), back=True
        )
        dc = (dy_[..., None, :] @ h).squeeze(-2)
        dexponent = dh * torch.cat([first[:, None], h[:, :-1]], 1) * decay
        drate -= (dexponent * dt_[..., None]).sum((0, 1))
        dinput = (dh @ b_[..., None]).squeeze(-1)
        db = ((dt_ * x_)[..., None, :] @ dh).squeeze(-2)
        chunks.append((dinput * x_ - (dexponent * rate).sum(-1), dinput * dt_, db, dc))
    return [*(torch.cat(grad[::-1], 1) for grad in zip(*chunks, strict=True)), drate, dend.clone()]


def _part_tokens(state: Tensor) -> int:
    return max(1, PART_BYTES // (state.numel() * state.element_size()))


def _parts(state: Tensor, *tokens: Tensor | None) -> list[tuple[Any, ...]]:
    size, length = _part_tokens(state), tokens[0].shape[1] if tokens[0] is not None else 0
    none = [None] * -(-length // size)
    return list(zip(*(none if x is None else x.split(size, 1) for x in tokens), strict=True))


def _part_states(
    dt: Tensor, x: Tensor, b: Tensor, c: Tensor, starts: Tensor | None, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Decays and states of tokens, [B, t, C, N]."""
    decay = torch.exp(-dt[..., None] * rate)
    if starts is not None:
        decay = torch.where(starts[..., None, None], 0, decay)
    h = _swept(_write, decay, (dt * x)[..., None] * b[:, :, None], state, _scan_tokens(decay), back=False)[0]
    return decay, h


@scan_parts.register_fake
def _(dt, x, b, c, rate, state, starts):
    count = -(-dt.shape[1] // _part_tokens(state))
    return [dt.new_empty(dt.shape), state.new_empty(count + 1, *state.shape)]


@scan_parts_backward.register_fake
def _(dy, dend, states, dt, x, b, c, rate, state, starts):
    return [y.new_empty(y.shape) for y in (dt, x, b, c, rate, state)]


def _scan_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1], *inputs)


def _scan_gradients(ctx, grads):
    states, *inputs = ctx.saved_tensors
    # of the states only the last has a gradient
    return *scan_parts_backward(grads[0].contiguous(), grads[1][-1].contiguous(), states, *inputs), None


scan_parts.register_autograd(_scan_gradients, setup_context=_scan_context)


class _Select(torch.autograd.Function):
    """`selective_scan` in C++. Channels are independent; few rows are shared out by blocks of channels."""

    @staticmethod
    def forward(ctx: Any, *given: Any):
        *tensors, starts = given
        inputs = [x.contiguous() for x in tensors]
        dt, _, b, *_, state = inputs
        (B, T, C), states = dt.shape, b.shape[-1]
        width = -(-C // -(-torch.get_num_threads() // B))
        y, end = torch.empty_like(dt), torch.empty_like(state)
        saved = state.new_empty(B, -(-T // EVERY), C, states)
        ctx.save_for_backward(*inputs, starts, saved)
        ctx.shape, ctx.blocks = (ctypes.c_int64 * 5)(T, C, states, width, EVERY), -(-C // width)
        pointers, run = [pointer(x) for x in (*inputs, starts, y, end, saved)], compiled(dt).select_forward
        parallel_for(B * ctx.blocks, lambda *jobs: run(ctx.shape, *pointers, *jobs))
        return y, end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dend: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, starts, saved = ctx.saved_tensors
        dt, x, b, _, rate, state = inputs
        ddt, dx, dstate, drate = *(torch.empty_like(y) for y in (dt, x, state)), Partial(rate)
        # a part for each block of channels
        db, dc = b.new_empty(2, ctx.blocks, *b.shape)
        before = [*inputs[:5], starts, saved, dy.contiguous(), dend.contiguous(), ddt, dx, db, dc, dstate]
        pointers, run = [pointer(y) for y in before], compiled(dy).select_backward
        rows = ctypes.c_int64(len(b))
        parallel_for(
            len(b) * ctx.blocks, lambda *jobs: run(ctx.shape, *pointers, rows, drate.of(jobs), *jobs)
        )
        return ddt, dx, db.sum(0), dc.sum(0), drate.sum(), dstate, None


def resets(index_BT: Tensor | None) -> Tensor | None:
    """[B, T]: whether the state is reset before the token."""
    if index_BT is None:
        return None
    return F.pad(index_BT[:, 1:] != index_BT[:, :-1], (1, 0))
