"""Incremental decoding: continue a sequence from any position, by one token or by many.

All gradients of a chunk are taken at the weights at its start (eq. 16). So the state inside a chunk consists
of those weights, the factors of the gradients of the tokens so far, and their coefficients under momentum
and decay. A new token then costs one pass through the memory and one row of products with the tokens of its
chunk; earlier writes are not recomputed. For rules with an update of their own, and for alpha per column, the
state inside a chunk is an `OpenChunk`.

Shapes: B batch, T new tokens, H heads, D width of a key, D_v of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titans_kernels.memory import window
from titans_kernels.memory.activations import ACTIVATIONS, Activation
from titans_kernels.memory.budget import effective_steps
from titans_kernels.memory.forms import factored, native
from titans_kernels.memory.forms.autograd import OpenChunk, continue_chunk
from titans_kernels.memory.forms.reference import apply_memory, surprise
from titans_kernels.memory.op import FORMS, neural_memory, with_targets
from titans_kernels.memory.options import Inputs, Layers, MemoryState, Options, whole, without_autocast
from titans_kernels.memory.parts.gates import decay_products
from titans_kernels.memory.residual import Output, predict
from titans_kernels.memory.rules import PAPER, Rule, find_rule
from titans_kernels.memory.state import (
    AnyState,
    DecodeState,
    after_lag_token,
    as_factors,
    as_open_chunk,
    has_factors,
    with_steps,
)
from titans_kernels.memory.validate import (
    check_base,
    check_options,
    check_residual,
    check_rule,
    check_shapes,
)
from titans_kernels.memory.window import WindowState

NATIVE = next(form for form in FORMS if form.name == "native")
STEP_PRODUCTS = 2**20
"""The C++ form recomputes all tokens of the open chunk. Up to this many multiplications per layer that is
cheaper than the overhead of calling PyTorch's operators."""


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    state: AnyState,
    *,
    extra: Tensor | None = None,
    chunk_size: int = 64,
    activation: str = "silu",
    surprise_bound: float | None = None,
    rule: Rule | str = PAPER,
    residual: Output | None = None,
    base: Layers | None = None,
    write_budget: float | None = None,
) -> tuple[Tensor, AnyState]:
    """Write and read the next token, or the next few of the open chunk, exactly as `neural_memory` would.

    All options must stay the same for the whole sequence.

    Args:
        q: queries of T new tokens, [B, T, H, D]. They must fit into the open chunk; T = 1 always does.
        k: keys, [B, T, H, D].
        v: values, [B, T, H, D_v].
        alpha: weight decay in [0, 1], [B, T, H], or per group of columns [B, T, H, A].
        eta: momentum in [0, 1], [B, T, H].
        theta: step size, at least 0, [B, T, H], or per matrix [B, T, H, M].
        state: the state before these tokens; not modified. ``DecodeState.of`` starts a sequence.
        extra: as in `neural_memory`.
        chunk_size: as in `neural_memory`.
        activation: as in `neural_memory`.
        surprise_bound: as in `neural_memory`.
        rule: as in `neural_memory`.
        residual: as in `neural_memory`.
        base: as in `neural_memory`.
        write_budget: as in `neural_memory`.

    Returns:
        y [B, T, H, D_v] in q's dtype and the state after the last token. Gradients flow through both.

    Raises:
        TypeError: an option has the wrong type; the message names it.
        ValueError: a shape, name or size is invalid, or the tokens exceed the open chunk; the message names
            the argument.
    """
    _check(q, k, v, (alpha, eta, theta), state, write_budget, activation)
    check_options(chunk_size, activation, surprise_bound, write_budget)
    residual = check_residual(residual, q, v)
    if state.position + q.shape[1] > chunk_size:
        raise ValueError(
            f"q: {q.shape[1]} tokens after {state.position} of the open chunk are more than chunk_size "
            f"{chunk_size}; use extend_memory for more tokens"
        )
    rule, own = _rule(rule), check_base(base, state.weights)
    check_rule(rule, extra, eta, theta, chunk_size, state.weights, residual, write_budget)
    if rule.layerwise:
        y, ended = neural_memory(
            q, k, v, alpha, eta, theta, state.weights, state.momentum, extra=extra, chunk_size=chunk_size,
            activation=activation, surprise_bound=surprise_bound, rule=rule, base=base,
            write_budget=write_budget,
        )  # fmt: skip
        return y, DecodeState.of(ended)
    options = Options(chunk_size, activation, surprise_bound, None, rule, residual=residual, base=own)
    tokens = with_targets(Inputs.of(q, k, v, alpha, eta, theta, extra), options).to_state_dtype()
    if rule.window:
        return _windowed(tokens, state, options, q.dtype, write_budget)
    tokens, steps = _budgeted(tokens, state, chunk_size, write_budget)
    outputs, rest = [], tokens
    with without_autocast(q):
        first, *others = rule.parts(chunk_size)
        if others and not state.position:  # the first part is one token
            one, rest = (Inputs(*(x[:, part] for x in tokens)) for part in (slice(first), slice(first, None)))
            y, state = _continued(one, state, options._replace(chunk_size=first))
            state = after_lag_token(state.memory(), one, rule)
            outputs.append(y)
        if rest.q.shape[1]:
            y, state = _continued(rest, state, options)
            outputs.append(y)
        if write_budget and state.position:
            state = with_steps(state, tokens.k, steps)
    return torch.cat(outputs, 1).to(q.dtype), state


def _continued(tokens: Inputs, state: AnyState, options: Options) -> tuple[Tensor, DecodeState | OpenChunk]:
    """y [B, T, H, D_v] of the next tokens of a chunk, and the state after them."""
    rule, own, activation = options.rule, options.base, options.activation
    if has_factors(rule, by_column=tokens.forgets_by_column):
        y, state = by_factors(tokens, as_factors(state), options)
    else:
        y, state = continue_chunk(tokens, as_open_chunk(state, rule), options)
    if state.position < options.chunk_size:
        return y, state
    if isinstance(state, OpenChunk):
        return y, DecodeState.of(state.memory())
    ended = state.ended(rule, own, activation)
    if rule.ends_chunks and rule.reads == "token":
        f, last = ACTIVATIONS[activation], tokens.q[:, -1:].transpose(1, 2)
        read = apply_memory(whole(ended.weights, own), last, f, options.residual).transpose(1, 2)
        y = torch.cat([y[:, :-1], read], 1)
    return y, DecodeState.of(ended)


def extend_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    state: AnyState,
    *,
    extra: Tensor | None = None,
    chunk_size: int = 64,
    activation: str = "silu",
    surprise_bound: float | None = None,
    backend: str = "auto",
    rule: Rule | str = PAPER,
    residual: Output | None = None,
    base: Layers | None = None,
    write_budget: float | None = None,
) -> tuple[Tensor, AnyState]:
    """`decode_step` for any number of tokens.

    The first tokens fill the open chunk, `neural_memory` processes all full chunks, and the rest starts the
    next open chunk. ``DecodeState.of(state)`` of a memory's initial state starts a sequence. If no gradient
    is needed and the C++ form supports the call, it processes all tokens at once. All options must stay the
    same for the whole sequence.

    Args:
        q: queries of T new tokens, [B, T, H, D].
        k: keys, [B, T, H, D].
        v: values, [B, T, H, D_v].
        alpha: weight decay in [0, 1], [B, T, H], or per group of columns [B, T, H, A].
        eta: momentum in [0, 1], [B, T, H].
        theta: step size, at least 0, [B, T, H], or per matrix [B, T, H, M].
        state: the state before these tokens; not modified.
        extra: as in `neural_memory`.
        chunk_size: as in `neural_memory`.
        activation: as in `neural_memory`.
        surprise_bound: as in `neural_memory`.
        backend: of the full chunks, as in `neural_memory`.
        rule: as in `neural_memory`.
        residual: as in `neural_memory`.
        base: as in `neural_memory`.
        write_budget: as in `neural_memory`.

    Returns:
        y [B, T, H, D_v] in q's dtype and the state after the last token. Gradients flow through both.

    Raises:
        TypeError: an option has the wrong type; the message names it.
        ValueError: a shape, name or size is invalid; the message names the argument.
    """
    _check(q, k, v, (alpha, eta, theta), state, write_budget, activation)
    check_options(chunk_size, activation, surprise_bound, write_budget)
    rule, T = _rule(rule), q.shape[1]
    own = check_base(base, state.weights)
    check_rule(rule, extra, eta, theta, chunk_size, state.weights, residual, write_budget)
    fitted = check_residual(residual, q, v)
    options = Options(chunk_size, activation, surprise_bound, None, rule, residual=fitted, base=own)
    tokens = Inputs.of(q, k, v, alpha, eta, theta, extra)
    if rule.window:
        tokens = with_targets(tokens, options).to_state_dtype()
        return _windowed(tokens, state, options, q.dtype, write_budget)
    if backend in ("auto", "native") and _serves_compiled(tokens, state, options):
        tokens, steps = _budgeted(tokens, state, chunk_size, write_budget)
        y, after = _compiled(tokens, as_factors(state), options)
        return y, after._replace(steps=steps[..., steps.shape[-1] - after.position :].clone())
    fill = min(T, -state.position % chunk_size)
    whole = (T - fill) // chunk_size * chunk_size
    outputs = []
    for start, end in ((0, fill), (fill, fill + whole), (fill + whole, T)):
        part = Inputs(*(x[:, start:end] for x in tokens))
        if start == end:
            continue
        if start == fill and whole:
            y, after = neural_memory(
                *part[:6], state.weights, state.momentum, extra=part.extra, chunk_size=chunk_size,
                activation=activation, surprise_bound=surprise_bound, backend=backend, rule=rule,
                residual=residual, base=base, write_budget=write_budget,
            )  # fmt: skip
            state = DecodeState.of(after)
        else:
            y, state = decode_step(
                *part[:6], state, extra=part.extra, chunk_size=chunk_size, activation=activation,
                surprise_bound=surprise_bound, rule=rule, residual=residual, base=base,
                write_budget=write_budget,
            )  # fmt: skip
        outputs.append(y)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)), state


def _windowed(
    tokens: Inputs, state: AnyState, options: Options, dtype: torch.dtype, write_budget: float | None
) -> tuple[Tensor, WindowState]:
    """y [B, T, H, D_v] of new tokens and the state after them, for a rule with a `Rule.window`."""
    if write_budget:
        raise ValueError(f"write_budget: does not apply to the rule {options.rule}; set it to None")
    if tokens.forgets_by_column:
        raise ValueError(f"alpha: per column is not supported by the rule {options.rule}; use one per head")
    held = state if isinstance(state, WindowState) else None
    if held is None and state.position:
        raise ValueError("state: inside a chunk of another rule; continue with the same rule")
    with without_autocast(tokens.q):
        y, after = window.extend(tokens, MemoryState(state.weights, state.momentum), held, options)
    return y.to(dtype), after


def _rule(rule: Rule | str) -> Rule:
    return find_rule(rule) if isinstance(rule, str) else rule


def _check(
    q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor, ...], state: AnyState,
    write_budget: float | None, activation: str,
) -> None:  # fmt: skip
    check_shapes(q, k, v, gates, state.weights, state.momentum, activation=activation)
    held = state.weights[0].shape[:2]
    if held != (q.shape[0], q.shape[2]):
        raise ValueError(f"state: [B, H] = {tuple(held)} differs from q's {(q.shape[0], q.shape[2])}")
    if state.steps.shape[-1] != (state.position if write_budget else 0):
        raise ValueError(
            f"write_budget: {write_budget}, but the {state.position} tokens of the state's open chunk were "
            f"written {'without' if write_budget else 'with'} one; pass the same value for all tokens of a "
            "chunk"
        )


def _budgeted(
    tokens: Inputs, state: AnyState, chunk_size: int, budget: float | None
) -> tuple[Inputs, Tensor]:
    """The tokens with theta', and the effective steps [B, H, p + T] of the open chunk and the new tokens."""
    if budget is None:
        return tokens, state.steps[..., :0]
    held = state.keys, state.steps
    theta, steps = effective_steps(tokens.k, tokens.eta, tokens.theta, chunk_size, held=held, budget=budget)
    return tokens._replace(theta=theta), torch.cat([state.steps, steps.transpose(1, 2)], 2)


def _serves_compiled(tokens: Inputs, state: AnyState, options: Options) -> bool:
    """Whether the C++ form supports these tokens, which start or end inside a chunk."""
    if not isinstance(state, DecodeState):
        return False
    T, reached = tokens.q.shape[1], state.position + tokens.q.shape[1]
    if not (state.position or reached % options.chunk_size):
        return False
    products = -(-reached // 16) * 16 * sum(W.numel() for W in state.weights)
    if products > STEP_PRODUCTS and (T == 1 or reached < options.chunk_size):
        return False
    if torch.compiler.is_compiling() or tokens.q.is_meta:
        return False
    before = (*state.weights, *state.momentum, *state.opened, state.steps)
    leaves = (*tokens, *before, *options.base, *options.norm)
    if torch.is_grad_enabled() and any(x.requires_grad for x in leaves):
        return False
    return NATIVE.refusal(tokens, state.weights, options) is None


def _compiled(tokens: Inputs, state: DecodeState, options: Options) -> tuple[Tensor, DecodeState]:
    """Process all tokens in one call of the C++ form."""
    depth, dtype, tokens = len(state.weights), tokens.q.dtype, tokens.to_state_dtype()
    adds_input = options.residual is not None and not options.curved
    if adds_input:  # as in `op`, the loss of f for the value v - k
        tokens = tokens._replace(v=tokens.v - tokens.k)
    y, weights, momentum, left = native.extend(tokens, state.weights, state.momentum, state.opened, options)
    y = (tokens.q + y if adds_input else y).to(dtype)
    if not left:
        return y, DecodeState.of(MemoryState(weights, momentum))
    layers = tuple(left[:depth]), tuple(left[depth : 2 * depth])
    return y, DecodeState(weights, momentum, *layers, *left[2 * depth :], steps=state.steps, etas=state.etas)


class Rows(NamedTuple):
    """Gate coefficients of the new tokens, one row each, over the open chunk's tokens and the new ones."""

    C: Tensor  # [B, H, T, p + T]
    n: Tensor  # [B, H, p + T], for the last token
    beta: Tensor  # [B, H, T]
    m: Tensor
    h: Tensor

    @staticmethod
    def of(alpha: Tensor, eta: Tensor, theta: Tensor, state: DecodeState) -> Rows:
        """From the gates [B, H, T] of the new tokens.

        The new tokens see the earlier coefficients as one more weight and one more momentum, which evolve as
        W and S do: by the products ``kept`` and ``moved`` from the first new token on.
        """
        keep = 1 - alpha
        kept, h = keep.cumprod(-1), eta.cumprod(-1)
        A, E = _products(keep), _products(eta)
        N = E * theta[..., None, :]
        moved = (A @ h[..., None])[..., 0]
        old = kept[..., None] * state.c[..., None, :] + moved[..., None] * state.n[..., None, :]
        return Rows(
            torch.cat([old, A @ N], -1),
            torch.cat([h[..., -1:] * state.n, N[..., -1, :]], -1),
            kept * state.beta[..., None],
            kept * state.m[..., None] + moved * state.h[..., None],
            h * state.h[..., None],
        )


def by_factors(inputs: Inputs, state: DecodeState, options: Options) -> tuple[Tensor, DecodeState]:
    """y [B, T, H, D_v] of the next tokens of the open chunk, and the state after them."""
    now, f = Inputs(*(x.transpose(1, 2) for x in inputs)), ACTIVATIONS[options.activation]
    rule = options.rule
    theta = torch.ones_like(now.eta) if now.steps_by_matrix else now.theta
    rows = Rows.of(*rule.gates(now.alpha, now.eta, theta), state)
    bound, residual, weights = options.surprise_bound, options.residual, whole(state.weights, options.base)
    error = lambda prediction, v: rule.error(prediction, v, *now.extra.unbind(-1))  # noqa: E731
    X, d = surprise(weights, now.k, now.v, f, bound, error, residual)
    new = X, factored.with_steps(d, now.theta, options.activation) if now.steps_by_matrix else d
    state = _written(state, rows, new)
    if rule.ends_chunks:
        state = state._replace(etas=torch.cat([state.etas, now.eta], 2))
    if rule.reads == "chunk":
        return apply_memory(weights, now.q, f, residual).transpose(1, 2), state
    y = _read(now.q, rows, state, f, options.base)
    return predict(residual, now.q, y).transpose(1, 2), state


def _products(r: Tensor) -> Tensor:
    """`decay_products`; for a single token a matrix of one."""
    return torch.ones_like(r)[..., None] if r.shape[-1] == 1 else decay_products(r)


def _written(state: DecodeState, rows: Rows, new: tuple[list[Tensor], list[Tensor]]) -> DecodeState:
    """The open chunk with the new tokens. Copies, since a view would keep all tokens of the call alive."""
    inputs, errors = (
        tuple(torch.cat(pair, 2) for pair in zip(old, add, strict=True))
        for old, add in zip((state.inputs, state.errors), new, strict=True)
    )
    c, beta, m, h = rows.C[..., -1, :], *(x[..., -1] for x in (rows.beta, rows.m, rows.h))
    if rows.C.shape[-2] > 1:
        c, beta, m, h = (x.clone() for x in (c, beta, m, h))
    return state._replace(inputs=inputs, errors=errors, c=c, n=rows.n, beta=beta, m=m, h=h)


def _read(x: Tensor, rows: Rows, state: DecodeState, f: Activation, base: Layers) -> Tensor:
    """Read queries x [B, H, T, D], each with the weights after its token."""
    beta, m = rows.beta[..., None], rows.m[..., None]
    layers = zip(state.weights, state.momentum, state.inputs, state.errors, strict=True)
    for l, (W, S, X, d) in enumerate(layers):
        x = x if l == 0 else f.value(x)
        z = (beta * x) @ W + (m * x) @ S - ((x @ X.mT) * rows.C) @ d
        x = z + x @ base[l] if base else z
    return x
