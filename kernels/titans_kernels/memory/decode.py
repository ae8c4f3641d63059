"""Incremental decoding: continue a sequence from any position, by one token or by many.

All gradients of a chunk are taken at the weights at its start (eq. 16). So the state inside a chunk consists
of those weights, the factors of the gradients of the tokens so far, and their coefficients under momentum
and decay. A new token then costs one pass through the memory and one row of products with the tokens of its
chunk; earlier writes are not recomputed. For rules with an update of their own, and for gates per column, the
state inside a chunk is its start and its tokens (`OpenChunk`), which each call computes again.

Shapes: B batch, T new tokens, H heads, D width of a key, D_v of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titans_kernels.memory.forms import native
from titans_kernels.memory.forms.state import AnyState, DecodeState, OpenChunk, has_factors, write_factors
from titans_kernels.memory.op import FORMS, neural_memory
from titans_kernels.memory.options import Extension, Inputs, MemoryState, Options, without_autocast
from titans_kernels.memory.rules import find_rule
from titans_kernels.memory.validate import (
    check_base,
    check_gates,
    check_options,
    check_residual,
    check_shapes,
)

NATIVE = next(form for form in FORMS if form.name == "native")
STEP_PRODUCTS = 2**20
"""The C++ form recomputes all tokens of the open chunk. Up to this many multiplications per layer that is
cheaper than the overhead of calling PyTorch's operators."""


def extend_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    state: AnyState,
    *,
    chunk_size: int = 64,
    activation: str = "silu",
    surprise_bound: float | None = None,
    backend: str = "auto",
    extension: Extension | None = None,
) -> tuple[Tensor, AnyState]:
    """Write and read the next tokens of a sequence, one or many, exactly as one `neural_memory` call would.

    The first tokens fill the open chunk, `neural_memory` processes all full chunks, and the rest starts the
    next open chunk. ``DecodeState.of(state)`` of a memory's initial state starts a sequence. If no gradient
    is needed and the C++ form supports the call, it processes all tokens at once. All options must stay the
    same for the whole sequence.

    Args:
        q: queries of T new tokens, [B, T, H, D].
        k: keys, [B, T, H, D].
        v: values, [B, T, H, D_v].
        alpha: weight decay in [0, 1], [B, T, H], or per group of columns [B, T, H, A].
        eta: momentum in [0, 1], in either shape.
        theta: step size, at least 0, in either shape.
        state: the state before these tokens; not modified.
        chunk_size: as in `neural_memory`.
        activation: as in `neural_memory`.
        surprise_bound: as in `neural_memory`.
        backend: of the full chunks, as in `neural_memory`.
        extension: as in `neural_memory`.

    Returns:
        y [B, T, H, D_v] in q's dtype and the state after the last token. Gradients flow through both.

    Raises:
        TypeError: an option has the wrong type; the message names it.
        ValueError: a shape, name or size is invalid; the message names the argument.
    """
    check_shapes(q, k, v, (alpha, eta, theta), state.weights, state.momentum)
    held = state.weights[0].shape[:2]
    if held != (q.shape[0], q.shape[2]):
        raise ValueError(f"state: [B, H] = {tuple(held)} differs from q's {(q.shape[0], q.shape[2])}")
    check_options(chunk_size, activation, surprise_bound)
    extras = extension or Extension()
    rule = find_rule(extras.rule) if isinstance(extras.rule, str) else extras.rule
    check_gates(rule, extras.gates, eta)
    options = Options(
        chunk_size, activation, surprise_bound, None, rule, check_residual(extras.residual, q, v),
        check_base(extras.base, state.weights),
    )  # fmt: skip
    tokens = Inputs.of(q, k, v, alpha, eta, theta, extras.gates)

    def chunks(part: Inputs, start: MemoryState) -> tuple[Tensor, MemoryState]:
        return neural_memory(
            *part[:6], *start, chunk_size=chunk_size, activation=activation, surprise_bound=surprise_bound,
            backend=backend, extension=extras._replace(rule=rule, gates=part.extra),
        )  # fmt: skip

    if not has_factors(rule, tokens.by_column):
        return _recomputed(tokens, state, chunk_size, chunks)
    if isinstance(state, OpenChunk):
        raise ValueError("state: inside a chunk of another rule or of gates per column; continue with these")
    if backend in ("auto", "native") and _serves_compiled(tokens, state, options):
        return _compiled(tokens, state, options)
    fill = min(q.shape[1], -state.position % chunk_size)
    full = (q.shape[1] - fill) // chunk_size * chunk_size
    outputs = []
    for start, end in ((0, fill), (fill, fill + full), (fill + full, q.shape[1])):
        part = _part(tokens, start, end)
        if start == end:
            continue
        if start == fill and full:
            y, after = chunks(part, MemoryState(state.weights, state.momentum))
            state = DecodeState.of(after)
        else:
            y, state = _inside(part, state, options)
        outputs.append(y)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)), state


def _part(tokens: Inputs, start: int, end: int) -> Inputs:
    return Inputs(*(x[:, start:end] for x in tokens))


def _inside(tokens: Inputs, state: DecodeState, options: Options) -> tuple[Tensor, DecodeState]:
    """y of tokens that fit into the open chunk, and the state after them."""
    now = Inputs(*(x.transpose(1, 2) for x in tokens.to_state_dtype()))
    with without_autocast(tokens.q):
        y, state = write_factors(now, state, options)
        if state.position == options.chunk_size:
            state = DecodeState.of(state.memory())
    return y.transpose(1, 2).to(tokens.q.dtype), state


def _recomputed(tokens: Inputs, state: AnyState, size: int, chunks) -> tuple[Tensor, AnyState]:
    """y of the tokens and the state after them; the tokens of the open chunk are computed again.

    ``chunks(tokens, start)`` is `neural_memory` from the start of a chunk.
    """
    if state.position and not isinstance(state, OpenChunk):
        raise ValueError("state: inside a chunk of a linear rule; continue with that and gates per head")
    p, outputs, start = state.position, [], MemoryState(state.weights, state.momentum)
    if isinstance(state, OpenChunk):
        B, _, H, D = tokens.q.shape
        held = state.tokens._replace(q=tokens.q.new_zeros(B, p, H, D))
        tokens = Inputs(*(torch.cat(pair, 1) for pair in zip(held, tokens, strict=True)))
    n = tokens.q.shape[1]
    full = n - n % size
    if full:
        y, start = chunks(_part(tokens, 0, full), start)
        outputs.append(y)
    if full == n:
        return outputs[0][:, p:], DecodeState.of(start)
    rest = _part(tokens, full, n)
    y, now = chunks(rest, start)
    y = torch.cat([*outputs, y], 1)[:, p:]
    # copies, since a view would keep all tokens of the call alive
    kept = rest._replace(q=rest.q[..., :0])
    return y, OpenChunk(start.weights, start.momentum, now, Inputs(*(x.clone() for x in kept)))


def _serves_compiled(tokens: Inputs, state: DecodeState, options: Options) -> bool:
    """Return True if the C++ form supports these tokens, which start or end inside a chunk."""
    T, reached = tokens.q.shape[1], state.position + tokens.q.shape[1]
    if not (state.position or reached % options.chunk_size):
        return False
    products = -(-reached // 16) * 16 * sum(W.numel() for W in state.weights)
    if products > STEP_PRODUCTS and (T == 1 or reached < options.chunk_size):
        return False
    if torch.compiler.is_compiling() or tokens.q.is_meta:
        return False
    leaves = (*tokens, *state.weights, *state.momentum, *state.opened, *options.base, *options.norm)
    if torch.is_grad_enabled() and any(x.requires_grad for x in leaves):
        return False
    return NATIVE.refusal(tokens, state.weights, options) is None


def _compiled(tokens: Inputs, state: DecodeState, options: Options) -> tuple[Tensor, DecodeState]:
    """Process all tokens in one call of the C++ form."""
    depth, dtype, tokens = len(state.weights), tokens.q.dtype, tokens.to_state_dtype()
    adds_input = options.residual is not None and not options.norm
    if adds_input:  # as in `op`, the loss of f for the value v - k
        tokens = tokens._replace(v=tokens.v - tokens.k)
    y, weights, momentum, left = native.extend(tokens, state.weights, state.momentum, state.opened, options)
    y = (tokens.q + y if adds_input else y).to(dtype)
    if not left:
        return y, DecodeState.of(MemoryState(weights, momentum))
    layers = tuple(left[:depth]), tuple(left[depth : 2 * depth])
    return y, DecodeState(weights, momentum, *layers, *left[2 * depth :])
