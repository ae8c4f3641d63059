"""The public operator: checks its input, fills in what was left out, chooses the backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from titans_kernels import forms
from titans_kernels.memory import autograd, budget, channels, chunked, chunked_op, native, online, reference
from titans_kernels.memory.activations import ACTIVATIONS
from titans_kernels.memory.options import (
    Inputs,
    Layers,
    MemoryState,
    Options,
    Result,
    distances,
    not_in_the_paper,
    operand_dtype,
    state_dtype,
    whole,
    without_autocast,
)
from titans_kernels.memory.residual import Residual
from titans_kernels.memory.rules import PAPER, Rule, find_rule
from titans_kernels.memory.validate import check_base, check_options, check_residual, check_shapes

BACKENDS = ("auto", "reference", "autograd", "chunked", "native", "online", "triton")

Form = Callable[[Inputs, Layers, Layers, Options], Result]
"""One form of the operator: inputs of any precision, weights and momenta [N, H, D_in, D_out] of the state's
precision, contiguous or not."""

OF_ANY_LOSS = (reference.forget_and_learn, autograd.forget_and_learn)
"""The forms that take a rule whose loss is of more than the difference of prediction and value."""


def neural_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    weights: tuple[Tensor, ...],
    momentum: tuple[Tensor, ...] | None = None,
    *,
    chunk_size: int = 64,
    activation: str = "silu",
    surprise_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    rule: Rule | str = PAPER,
    residual: Residual | None = None,
    base: tuple[Tensor, ...] | None = None,
    write_budget: float | None = None,
    keep_bytes: int | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, MemoryState]:
    """Write each token into the memory and read it back (eqs. 12-16).

    Each token takes one step of gradient descent on ``||M(k_t) - v_t||^2`` with momentum eta_t, step
    theta_t and weight decay alpha_t, its gradient at the weights that stood when its chunk began; the read
    ``y_t = M_t(q_t)`` uses the weights after token t.

    Args:
        q, k, v: [B, T, H, D]; the width of v is that of the last layer's output.
        alpha, eta, theta: [B, T, H]; alpha, eta in [0, 1], theta >= 0. An alpha [B, T, H, A] has a number for
            each of A groups of neighbouring columns of every layer, whose width A divides (see `channels`).
        weights: L tensors [H, D_in, D_out], shared by the batch, or [B, H, D_in, D_out].
        momentum: the same shapes, or None for zeros.
        chunk_size: the paper's b; 1 is the exact online rule. Changes the result.
        activation: silu, gelu or identity, between layers.
        surprise_bound: c; each token's error signal is scaled to norm at most c at every layer.
        cu_seqlens: [N + 1] int, borders of N documents packed into B = 1, some of them empty perhaps; each
            starts from the given weights and momentum (which may then have N in place of B), and so has
            the returned state. Read once for each tensor: given on the CPU, nothing waits for a GPU.
        backend: "auto", "reference", "autograd", "chunked", "native", "online" or "triton". "auto" is
            "triton" on a GPU, whose operands are of q's type, or of autocast's where it is on; a call that no
            kernel serves takes "chunked", which is logged once. On a CPU it is "native" where a C++ compiler
            is and the memory is small, else "chunked"; for another rule than the paper's, "autograd".
            "online" takes the place of all others for a linear memory in chunks of one token.
        rule: what a token does to the memory, a `Rule` or a name that `find_rule` knows; the text above is
            the paper's. "reference" and "autograd" take any rule.
        residual: None for the paper's memory, or a residual around it, with or without LN. LN and an alpha by
            column are not for "native", "online" and "triton", and "auto" passes these over.
        base: of each layer B [H, D_in, D_out], shared by all rows, to which forgetting leads in place of
            zero: ``W_t = B + (1 - alpha_t) (W_{t-1} - B) + S_t``. The weights given and returned are then
            W - B, the distance from it: zero where a memory begins at its base. A deep memory with a base is
            not for "triton".
        write_budget: full steps that a direction of key space is written at most within a chunk (see
            `budget`), so that like tokens cannot make the memory diverge; None is the paper's rule.
        keep_bytes: what the kernels may keep of this call for its backward; a call that needs more computes
            it again there, with the same result. None for 1/64 of the card's memory. The other forms do not
            look at it.
        output_final_state: without it the returned state has no layers, and takes no memory: what training
            on packed documents wants, whose states are one a document.

    Returns:
        y [B, T, H, D] in q's dtype and the state after the last token. States are float32 (float64 for
        float64 input), and without layers where it was not wanted. Passing a returned state continues
        exactly where the cut is on a chunk border; `extend_memory` continues from anywhere.

    Raises:
        TypeError: an option or cu_seqlens of a type that does not fit, named.
        ValueError: a shape, name or size that does not fit, named; a backend that does not take the rule, or
            "native", "online" or "triton" for a call that it does not serve.

    Non-finite numbers: a read depends on no later token while all numbers are finite. "reference" and
    "autograd" keep to that for a NaN or an inf too. The other forms multiply by a masked matrix, and zero
    times inf is NaN: one in k, v or a gate may then also reach earlier tokens of its own chunk and head
    ("online": of its block of 32 tokens, and there a finite number whose square overflows does so as well).
    No form lets it reach another row, document or head, or an earlier chunk. Masking before the product
    would take 4 to 6% of a training step's time, and 10 to 12% of a forward pass's.

    Precision: a deep memory without ``surprise_bound`` can be ill-conditioned, above all with keys of norm
    above 1. Of 258 random ones whose outputs stayed finite the worst had reads of the size of their values,
    2e-3 off those of float64, and gradients 1e-2 off, in every form. With ``surprise_bound=1`` errors there
    are 5e-7; ``write_budget=2`` alone leaves 1e-4 (`tests/kernels/test_random_calls.py`).
    """
    documents = check_shapes(q, k, v, (alpha, eta, theta), weights, momentum, cu_seqlens)
    check_options(chunk_size, activation, surprise_bound, write_budget)
    dtype = state_dtype(q)
    inputs = Inputs(q, k, v, alpha, eta, theta)
    weights = tuple(x.to(dtype) for x in weights)
    momentum = tuple(x.to(dtype) for x in momentum) if momentum else _zeros_like(weights)
    shared = None
    if all(x.ndim == 3 for x in (*weights, *momentum)):
        shared = tuple(x[None] for x in weights), tuple(x[None] for x in momentum)
    weights, momentum = _per_document(weights, documents), _per_document(momentum, documents)
    rule = find_rule(rule) if isinstance(rule, str) else rule
    residual, own = check_residual(residual, q, v), check_base(base, weights)
    options = Options(
        chunk_size, activation, surprise_bound, cu_seqlens, rule, keep_bytes, output_final_state, shared,
        residual, own,
    )  # fmt: skip
    form = choose(backend, inputs, weights, options)
    if write_budget:
        limit = reference.write_budget if form is reference.forget_and_learn else budget.write_budget
        inputs = inputs._replace(theta=limit(k, eta, theta, chunk_size, cu_seqlens, budget=write_budget))
    if not torch.compiler.is_compiling():
        forms.note("neural_memory", _name(form), q)
    linear = form not in OF_ANY_LOSS and len(options.norm) == 0
    beside = linear and len(own) == 1 and form is not native.forget_and_learn
    if residual is not None and linear:
        form = partial(_around, form)
    if own:  # what is compiled takes it in less time than the products beside it
        form = partial(_beside_base if beside else _from_base, form)
    # the state is float32 whatever autocast would make of the products
    with without_autocast(q):
        y, weights, momentum = form(inputs, weights, momentum, options)
    return y.to(q.dtype), MemoryState(weights, momentum) if output_final_state else MemoryState((), ())


def choose(backend: str, inputs: Inputs, weights: Layers, options: Options) -> Form:
    """The form of the operator that computes a call.

    Raises:
        ValueError: there is no such form, or it does not take the rule, or does not serve the call.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    if backend == "reference":
        return reference.forget_and_learn
    by_hand = type(options.rule) in chunked.TAKES
    if backend in ("auto", "online"):
        reason = online.refusal(inputs, weights, options)
        if reason is None:
            return online.forget_and_learn
        if backend == "online":
            raise ValueError(f"backend: online does not serve this call: {reason}")
    if backend == "autograd" or (backend == "auto" and not by_hand):
        return autograd.forget_and_learn
    if not by_hand:
        raise ValueError(
            f"backend: {backend!r} does not take the rule {options.rule}; use auto, autograd or reference"
        )
    if backend == "triton" or (backend == "auto" and inputs.q.is_cuda):
        served = _kernels(inputs, weights, options)
        if not isinstance(served, str):
            return served
        if backend == "triton":
            raise ValueError(f"backend: triton does not serve this call: {served}; auto takes another form")
        if not torch.compiler.is_compiling():
            forms.warn_once("neural_memory", "chunked in place of triton", served)
    # eager keeps its work for the backward, which a compiler or a meta tensor could not follow
    if torch.compiler.is_compiling() or inputs.q.is_meta:
        return chunked_op.forget_and_learn
    if backend in ("auto", "native"):
        reason = native.refusal(inputs, weights, options)
        if reason is None:
            return native.forget_and_learn
        if backend == "native":
            raise ValueError(f"backend: native does not serve this call: {reason}")
    return channels.forget_and_learn if inputs.forgets_by_column else chunked.forget_and_learn


def _name(form: Form) -> str:
    """The module of a form."""
    return getattr(form, "func", form).__module__.rpartition(".")[2].removesuffix("_op")


def _around(form: Form, inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """``x + f(x)`` by a form of f: ``||k + f(k) - v||^2`` is the loss of f for the value v - k."""
    q, k, v = (x.to(inputs.state_dtype) for x in inputs[:3])
    # a kernel takes its operands in one type
    value = (v - k).to(inputs.v.dtype) if inputs.v.is_cuda else v - k
    y, weights, momentum = form(inputs._replace(v=value), weights, momentum, options._replace(residual=None))
    return q + y, weights, momentum


def _beside_base(form: Form, inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """A linear memory with a base by a form that knows of none: what k B predicts is taken off the value."""
    q, k, v = (x.to(inputs.state_dtype) for x in inputs[:3])
    of_base = lambda x: torch.einsum("bthd,hdf->bthf", x, options.base[0])  # noqa: E731
    # a kernel takes its operands in one type
    value = (v - of_base(k)).to(inputs.v.dtype) if inputs.v.is_cuda else v - of_base(k)
    y, weights, momentum = form(inputs._replace(v=value), weights, momentum, options._replace(base=()))
    return of_base(q) + y, weights, momentum


def _from_base(form: Form, inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Weights as distances from the base by a form that takes whole ones."""
    y, weights, momentum = form(inputs, whole(weights, options.base), momentum, options)
    return y, distances(weights, options.base), momentum


def _kernels(inputs: Inputs, weights: Layers, options: Options) -> Form | str:
    """The Triton form, or why no kernel serves the call."""
    # imported when asked for: a CPU has no use for Triton
    from titans_kernels.memory.triton import op as triton
    from titans_kernels.memory.triton.refusal import refusal

    dtype = operand_dtype(inputs.q)
    if type(options.rule) not in triton.TAKES:
        return f"no kernel for the rule {options.rule}"
    if beyond := not_in_the_paper(inputs, options):
        return f"no kernel for {beyond}"
    if options.base and len(weights) > 1:
        return "no kernel for a deep memory with a base"
    reason = refusal(inputs.q, inputs.k, inputs.v, weights, options.chunk_size, dtype)
    return reason or partial(triton.forget_and_learn, dtype=dtype)


def read_memory(
    q: Tensor, weights: tuple[Tensor, ...], *, activation: str = "silu", residual: Residual | None = None,
    base: tuple[Tensor, ...] | None = None,
) -> Tensor:  # fmt: skip
    """M(q) without a write: q [B, T, H, D], weights [B, H, D_in, D_out] or [H, D_in, D_out].

    With a base [H, D_in, D_out] of each layer the weights are the distance from it, as in `neural_memory`.
    """
    dtype = state_dtype(q)
    layers, f = tuple(W.to(dtype) for W in weights), ACTIVATIONS[activation]
    layers = whole(layers, check_base(base, layers))
    residual = residual and residual.to(dtype)
    with without_autocast(q):
        y = reference.apply_memory(layers, q.to(dtype).transpose(1, 2), f, residual)
    return y.transpose(1, 2).to(q.dtype)


def _per_document(layers: Layers, documents: int) -> Layers:
    return tuple(x if x.ndim == 4 else x.expand(documents, *x.shape) for x in layers)


def _zeros_like(layers: Layers) -> Layers:
    return tuple(torch.zeros_like(x) for x in layers)
