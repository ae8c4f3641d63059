"""The online rule of a linear memory (b = 1), exact and in matrix products.

With chunks of one token (the paper's b = 1) each gradient is taken at the weights after the previous token,
which is sequential. For a linear memory without a bound the recurrence is linear in the writes, so a block of
tokens is one triangular system, as in DeltaNet (Yang et al. 2024, arXiv 2406.06484), here with momentum and
decay:

    S_t = eta_t S_{t-1} + k_t^T u_t,    W_t = (1 - alpha_t) W_{t-1} + S_t,    u_t = 2 theta_t (v_t - k_t P_t)

with P_t = W_{t-1} for the paper's rule and (1 - alpha_t) W_{t-1} for `GatedDelta`. In a block that starts
from W, S the coefficients of `gates` give ``P_t = c_t W + n_t S + sum_{s<t} D[t, s] k_s^T u_s``, and so

    (I + L) U = diag(2 theta) (V - diag(c) K W - diag(n) K S),    L[t, s] = 2 theta_t D[t, s] k_t k_s^T.

On a CPU a small memory goes token by token in C++ instead (`native/scans.cpp`), whose time does not depend on
the number of rows.

All blocks are solved at once, up to the state that each starts from. A block is an affine map of that state,
so the states come from a scan over blocks: on a GPU a Triton kernel (`triton/delta.py`), elsewhere `_states`.

Shapes: B rows, T tokens, H heads, D and F the widths of key and value; n blocks of b tokens, R = B H rows.
A state [R, 2 D, F] is the weights and the momentum, one below the other.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from titans_kernels import ran
from titans_kernels.memory.forms.documents import each_document
from titans_kernels.memory.options import Inputs, Layers, Options, Result, on_gpu
from titans_kernels.memory.parts.gates import coefficients
from titans_kernels.memory.rules import GatedDelta, Rule
from titans_kernels.native import compiled, parallel_for, pointer, serves
from titans_kernels.recurrence import MIN_TOKENS, fla_delta_rule, fla_refusal

BLOCK = 32
"""Tokens per triangular system. Affects only rounding."""
COMPILED = 64 * 64
"""Numbers of a head's weights up to which the token-by-token form in C++ is used on a CPU."""
EVERY = 16
"""Tokens between the states that it saves for the backward."""
PART_BYTES = 2**29
"""Most bytes of the states before the blocks of a call, whose tokens are taken in parts."""
FEW = 16
"""Blocks up to which one follows the other."""
SMALL = 1024
"""Rows of all states (R times 2 D) from which one block is enough work for a step."""


def refusal(inputs: Inputs, weights: Layers, options: Options) -> str | None:
    """Return the reason for which the online form does not support a call, or None if it does."""
    if reason := options.refusal(inputs, (Rule, GatedDelta), norm=False, columns=False):
        return reason
    if len(weights) > 1:
        return f"it supports 1 layer, not {len(weights)}"
    if options.chunk_size != 1:
        return f"it supports chunk_size 1, not {options.chunk_size}"
    return None if options.surprise_bound is None else "it does not support surprise_bound"


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write every token and read it, as `reference.write_and_read` does."""
    if options.is_delta_rule:
        given, operands = inputs.v, options.operands or inputs.v.dtype
        reason = fla_refusal(given, inputs.k.shape[-1], 1, operands)
        if reason is None:
            return _by_fla(inputs, weights[0], momentum, options, operands)
        if given.is_cuda and given.shape[1] >= MIN_TOKENS and not torch.compiler.is_compiling():
            ran.warn_once("neural_memory", "online in place of FLA's delta rule", reason)
    return each_document(_rows, inputs.to_state_dtype(), weights, momentum, options)


def _by_fla(inputs: Inputs, W: Tensor, momentum: Layers, options: Options, operands: torch.dtype) -> Result:
    """Run the delta rule with the kernels of flash-linear-attention: theta writes 2 theta of the error."""
    q, k, v = inputs.q.to(operands), inputs.k.to(operands), inputs.v.to(operands)
    gated = isinstance(options.rule, GatedDelta)
    log_keep = torch.log1p(-inputs.alpha) if gated else None
    y, after = fla_delta_rule(q, k, v, 2 * inputs.theta, log_keep, W, options.cu_seqlens)  # pyright: ignore[reportCallIssue]
    return y, (after.to(W.dtype),), momentum


def _rows(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    W, S = weights[0], momentum[0]
    gated = isinstance(options.rule, GatedDelta)
    if W[0, 0].numel() <= COMPILED and serves(*inputs[:6], W, S):
        y, state = _Tokens.apply(gated, *inputs[:6], torch.stack([W, S], 2))  # pyright: ignore[reportGeneralTypeIssues]
        # copies: a view would keep both in memory
        W, S = (x.clone() for x in state.unbind(2))
        return y, (W,), (S,)
    y, W, S = _memory(inputs, W, S, gated)
    return y, (W,), (S,)


class _Tokens(torch.autograd.Function):
    """Token by token in C++; a state is weights and momentum, [B, H, 2, D, F]."""

    @staticmethod
    def forward(ctx: Any, gated: bool, *given: Tensor):
        inputs = [x.contiguous() for x in given]
        q, _, v, *_, state = inputs
        (B, T, H, D), F = q.shape, v.shape[-1]
        y, end = torch.empty_like(v), torch.empty_like(state)
        saved = state.new_empty(B * H, -(-T // EVERY), 2, D, F)
        ctx.save_for_backward(*inputs[:6], saved)
        ctx.shape = shape = (ctypes.c_int64 * 6)(T, H, D, F, EVERY, gated)
        tensors, run = [pointer(x) for x in (*inputs, y, end, saved)], compiled(q).delta_forward
        parallel_for(B * H, lambda *jobs: run(shape, *tensors, *jobs))
        return y, end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dend: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        dend = dend.contiguous()
        before, after = [*saved, dy.contiguous(), dend], [torch.empty_like(x) for x in (*saved[:6], dend)]
        tensors, run = [pointer(x) for x in (*before, *after)], compiled(dy).delta_backward
        parallel_for(len(saved[-1]), lambda *jobs: run(ctx.shape, *tensors, *jobs))
        return None, *after


def _memory(inputs: Inputs, W: Tensor, S: Tensor, gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return reads [B, T, H, F] and the state after the last token; ``gated``: of `GatedDelta`."""
    B, T, H, _ = inputs.q.shape
    W, S = W.flatten(0, 1), S.flatten(0, 1)
    whole, outputs = T // BLOCK * BLOCK, []
    # no `nbytes`, which torch.compile cannot take of an open size
    state_bytes = (W.numel() + S.numel()) * W.element_size()
    tokens, parts = max(1, PART_BYTES // max(1, state_bytes)) * BLOCK, [(0, whole)]
    if whole > tokens:  # without a loop over a length that torch.compile may leave open
        parts = [(start, min(start + tokens, whole)) for start in range(0, whole, tokens)]
    for start, end, b in (*((*part, BLOCK) for part in parts), (whole, T, T - whole)):
        if start < end:
            part = Inputs(*(x[:, start:end].transpose(1, 2).flatten(0, 1) for x in inputs))
            y, W, S = _blocks(part, W, S, b, gated)
            outputs.append(y)
    y = torch.cat(outputs, 1).unflatten(0, (B, H)).transpose(1, 2)
    return y, W.unflatten(0, (B, H)), S.unflatten(0, (B, H))


def _blocks(inputs: Inputs, W: Tensor, S: Tensor, b: int, gated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return reads [R, T, F], weights and momentum [R, D, F] after T tokens, a multiple of b."""
    q, k, v, alpha, eta, theta = (x.unflatten(1, (-1, b)) for x in inputs[:6])
    rows, flat = alpha.shape[:2], [alpha, eta, torch.ones_like(theta)]
    gates = coefficients(*(x.flatten(0, 1) for x in flat))
    C, N, m, beta, h = (x.unflatten(0, rows) for x in (gates.C, gates.N, gates.m, gates.beta, gates.h))
    # coefficients of the weights at which each token's gradient is taken
    D, c, n = _before(C, 0.0), _before(beta, 1.0), _before(m, 0.0)
    if gated:
        D, c, n = D * (1 - alpha)[..., None], c * (1 - alpha), n * (1 - alpha)
    step = 2 * theta[..., None]
    L = (step * D * (k @ k.mT)).tril(-1)
    known = step * torch.cat([v, c[..., None] * k, n[..., None] * k], -1)
    solved = torch.linalg.solve_triangular(L, known, upper=False, unitriangular=True)
    X, Y, Z = solved.split([v.shape[-1], k.shape[-1], k.shape[-1]], -1)
    among = C * (q @ k.mT)
    reads = torch.cat([beta[..., None] * q, m[..., None] * q], -1)
    # what a block does to the state before it
    width, start = k.shape[-1], torch.cat([W, S], 1)
    if _by_kernel(k, v):
        from titans_kernels.memory.forms.triton.delta import delta_states

        last = [torch.stack([x[:, :, -1] for x in part]) for part in ((C, N), (beta, m, h))]
        ran.select("delta_states", "triton")
        states, written = delta_states(X, Y, Z, k, *last, start)
        starts = states[:, :-1]
    else:
        keeps = torch.cat([x[:, :, -1, None].expand(-1, -1, width) for x in (beta, h)], 2)[..., None]
        writes = torch.cat([(part[:, :, -1, :, None] * k).mT for part in (C, N)], 2)
        seen = torch.cat([Y, Z], -1)
        states = _states(_Blocks(keeps, m[:, :, -1, None, None], writes, seen, writes @ X), start)
        starts = states[:, :-1]
        written = X - seen @ starts
    y = (reads @ starts + among @ written).flatten(1, 2)
    # copies: a view would keep the states of all blocks in memory
    return y, states[:, -1, :width].clone(), states[:, -1, width:].clone()


def _by_kernel(k: Tensor, v: Tensor) -> bool:
    """Return True if Triton's kernels compute the states, for keys [R, n, b, D] and values [R, n, b, F]."""
    if not on_gpu(k) or k.shape[1] == 1:
        return False
    # imported on first use: a CPU does not need Triton
    from titans_kernels.memory.forms.triton.delta import refusal

    reason = refusal(k, v)
    if reason is not None and not torch.compiler.is_compiling():
        ran.warn_once("delta_states", "PyTorch's operators", reason)
    return reason is None


class _Blocks(NamedTuple):
    """Blocks as maps of the state X: ``keeps X + (crosses S, 0) - writes seen X + added``."""

    keeps: Tensor
    """[R, n, 2 D, 1]: what is left of the weights and of the momentum."""
    crosses: Tensor
    """[R, n, 1, 1]: how much of the momentum S reaches the weights."""
    writes: Tensor
    """[R, n, 2 D, b]: what each token's U adds."""
    seen: Tensor
    """[R, n, b, 2 D]: how U depends on the state."""
    added: Tensor
    """[R, n, 2 D, F]."""

    def linear(self, x: Tensor) -> Tensor:
        """Apply the linear part of the map to x [..., 2 D, F]."""
        crossed = self.crosses * x[..., x.shape[-2] // 2 :, :]
        kept = self.keeps * x + F.pad(crossed, (0, 0, 0, crossed.shape[-2]))
        return kept - self.writes @ (self.seen @ x)


def _states(blocks: _Blocks, state: Tensor) -> Tensor:
    """Return the states [R, n + 1, 2 D, F] before each block and after the last one.

    One block after the other takes n steps. Many blocks of few rows are cut into groups: the maps of a
    group's blocks are composed, then the states at the borders of groups follow, then those within groups.
    This takes about 3 sqrt(n) steps, and all but those between groups are taken for all groups at once.
    """
    (rows, n), width = blocks.added.shape[:2], state.shape[1]
    size = n if n <= FEW or rows * width > SMALL else round((n / 2) ** 0.5)
    padded = (F.pad(x, (0, 0, 0, 0, 0, -n % size), value=1.0 if x is blocks.keeps else 0.0) for x in blocks)
    # unbound, not indexed: the backward of an index fills a tensor of all blocks
    groups = [
        _Blocks(*step) for step in zip(*(x.unflatten(1, (-1, size)).unbind(2) for x in padded), strict=True)
    ]
    count, borders = groups[0].added.shape[1], [state]
    if count > 1:
        identity = torch.eye(width, dtype=state.dtype, device=state.device).expand(rows, count, -1, -1)
        composed = F.pad(identity, (0, state.shape[-1]))
        for block in groups:
            composed = block.linear(composed) + F.pad(block.added, (width, 0))
        through, added = composed.split([width, state.shape[-1]], -1)
        for factor, term in zip(through.unbind(1)[:-1], added.unbind(1)[:-1], strict=True):
            borders.append(factor @ borders[-1] + term)
    x, states = torch.stack(borders, 1), []
    for block in groups:
        states.append(x)
        x = block.linear(x) + block.added
    # padding changes nothing, so the last group ends with the state after the last token
    return torch.cat([torch.stack(states, 2).flatten(1, 2)[:, :n], x[:, -1:]], 1)


def _before(x: Tensor, first: float) -> Tensor:
    """Shift along the tokens [R, n, b, ...]: each token's predecessor."""
    return torch.cat([torch.full_like(x[:, :, :1], first), x[:, :, :-1]], 2)
