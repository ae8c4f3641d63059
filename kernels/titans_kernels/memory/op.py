"""The public operator: checks its input, fills in defaults, and chooses a form by the table `FORMS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from titans_kernels import forms
from titans_kernels.memory import budget
from titans_kernels.memory.activations import ACTIVATIONS
from titans_kernels.memory.forms import autograd, channels, chunked, custom_op, native, online, reference
from titans_kernels.memory.options import (
    Inputs,
    Layers,
    MemoryState,
    Options,
    Result,
    distances,
    operand_dtype,
    state_dtype,
    whole,
    without_autocast,
)
from titans_kernels.memory.residual import Residual
from titans_kernels.memory.rules import PAPER, GatedDelta, Rule, find_rule
from titans_kernels.memory.validate import check_base, check_options, check_residual, check_shapes


def _triton(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    # imported when asked for: a CPU has no use for Triton
    from titans_kernels.memory.forms.triton import op

    return op.write_and_read(inputs, weights, momentum, options)


def _triton_limits(inputs: Inputs, weights: Layers, options: Options) -> str | None:
    from titans_kernels.memory.forms.triton.refusal import refusal

    return refusal(*inputs[:3], weights, options.chunk_size, options.operands)


class Form(NamedTuple):
    """A form of the operator: which calls it computes, how exactly, and when "auto" takes it."""

    name: str
    """What `forms_used` reports."""
    backend: str
    """The argument that asks for it."""
    compute: Callable[[Inputs, Layers, Layers, Options], Result]
    """Takes inputs of any precision, weights and momenta [N, H, D_in, D_out] of the state's precision."""
    tolerance: float
    """Relative error to "reference", of reads, states and gradients; float64, and float32 for Triton."""
    device: Literal["any", "cpu", "cuda"] = "any"
    """"auto" takes it there alone."""
    rules: tuple[type[Rule], ...] | None = (Rule,)
    """None for any rule. `Rule` itself is the paper's."""
    alpha: Literal["head", "column", "any"] = "head"
    """One number a head, a number for each group of columns, or either."""
    norm: bool = False
    """Whether it computes LN inside the memory (`Residual.norm`)."""
    any_loss: bool = False
    """Whether the loss may depend on more than prediction - value; else ``x + f(x)`` and a base of a linear
    memory become part of the value."""
    linear_base: bool = False
    """Whether it computes the base of a linear memory itself, in less time than products outside of it."""
    base_depth: int | None = None
    """The most layers it takes with a base; None for any."""
    depth: int | None = None
    """The most layers it takes; None for any."""
    chunk_size: int | None = None
    """The one it takes; None for any."""
    surprise_bound: bool = True
    """Whether it takes one."""
    traced: Callable[[Inputs, Layers, Layers, Options], Result] | None = None
    """Computes the same under torch.compile and for meta tensors, which cannot follow ``compute``."""
    limits: Callable[[Inputs, Layers, Options], str | None] = lambda *call: None
    """Why it does not serve a call for another reason (sizes, types, a compiler that is missing), or None."""

    def refusal(self, inputs: Inputs, weights: Layers, options: Options) -> str | None:
        """Why this form does not compute a call, or None where it does."""
        layers, by_column = len(weights), inputs.forgets_by_column
        if self.rules is not None and type(options.rule) not in self.rules:
            return f"it does not take the rule {options.rule}"
        if options.norm and not self.norm:
            return "it does not compute LN inside the memory"
        if self.alpha == ("head" if by_column else "column"):
            return f"it does not take an alpha by {'column' if by_column else 'head'}"
        if self.depth is not None and layers > self.depth:
            return f"it takes {self.depth} layer, not {layers}"
        if options.base and self.base_depth is not None and layers > self.base_depth:
            return f"it takes a base with {self.base_depth} layer, not {layers}"
        if self.chunk_size not in (None, options.chunk_size):
            return f"it takes chunk_size {self.chunk_size}, not {options.chunk_size}"
        if options.surprise_bound is not None and not self.surprise_bound:
            return "it does not take a surprise_bound"
        return self.limits(inputs, weights, options)


FORMS = (
    Form("online", "online", online.write_and_read, 1e-9, rules=(Rule, GatedDelta), depth=1, chunk_size=1,
         surprise_bound=False),
    Form("triton", "triton", _triton, 5e-5, device="cuda", base_depth=1, limits=_triton_limits),
    Form("native", "native", native.write_and_read, 1e-9, device="cpu", linear_base=True,
         limits=native.refusal),
    Form("chunked", "chunked", chunked.write_and_read, 1e-9, norm=True, traced=custom_op.write_and_read),
    Form("channels", "chunked", channels.write_and_read, 1e-9, alpha="column", norm=True,
         traced=custom_op.write_and_read),
    Form("autograd", "autograd", autograd.write_and_read, 1e-9, rules=None, alpha="any", norm=True,
         any_loss=True),
    Form("reference", "reference", reference.write_and_read, 0.0, rules=None, alpha="any", norm=True,
         any_loss=True),
)  # fmt: skip
"""Every form, in the order in which "auto" tries them."""

BACKENDS = ("auto", *reversed(dict.fromkeys(form.backend for form in FORMS)))


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
        residual, own, operand_dtype(q),
    )  # fmt: skip
    form = choose(backend, inputs, weights, options)
    if write_budget:
        limit = reference.write_budget if form.name == "reference" else budget.write_budget
        inputs = inputs._replace(theta=limit(k, eta, theta, chunk_size, cu_seqlens, budget=write_budget))
    if not torch.compiler.is_compiling():
        forms.note("neural_memory", form.name, q)
    # the state is float32 whatever autocast would make of the products
    with without_autocast(q):
        y, weights, momentum = _compute(form, inputs, weights, momentum, options)
    return y.to(q.dtype), MemoryState(weights, momentum) if output_final_state else MemoryState((), ())


def choose(backend: str, inputs: Inputs, weights: Layers, options: Options) -> Form:
    """The first form of the table that computes a call, among those that ``backend`` names.

    Raises:
        ValueError: there is no such backend, or none of its forms computes the call.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    # neither a compiler nor meta tensors can follow C++
    traced = torch.compiler.is_compiling() or inputs.q.is_meta
    backend = "chunked" if traced and backend == "native" else backend
    reason, slower = None, None
    for form in FORMS:
        if backend == "auto":
            here = {"any": True, "cpu": not traced, "cuda": inputs.q.is_cuda}
            if not here[form.device]:
                continue
        elif backend != form.backend:
            continue
        reason = form.refusal(inputs, weights, options)
        if reason is None:
            if slower and not torch.compiler.is_compiling():
                forms.warn_once("neural_memory", "chunked in place of triton", slower)
            return form._replace(compute=form.traced) if traced and form.traced else form
        if form.name == "triton" and type(options.rule) is Rule:
            slower = reason
    raise ValueError(f"backend: {backend} does not serve this call: {reason}; auto takes another form")


def _compute(form: Form, inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """A call by a form, where residual and base are computed around it unless it does so itself.

    ``||k + f(k) - v||^2`` is the loss of f for the value v - k; of a linear memory with a base B,
    ``||k (W + B) - v||^2`` is that of W for the value v - k B.
    """
    base, added = options.base, []
    if not form.any_loss and not options.norm:
        if base and len(base) == 1 and not form.linear_base:
            added.append(lambda x: torch.einsum("bthd,hdf->bthf", x, base[0]))
            options = options._replace(base=())
        if options.residual is not None:
            added.append(lambda x: x)
            options = options._replace(residual=None)
    own, (q, k, v) = options.base, (x.to(inputs.state_dtype) for x in inputs[:3])
    if added:
        for part in added:
            v = v - part(k)
        # a kernel takes its operands in one type
        inputs = inputs._replace(v=v.to(inputs.v.dtype) if inputs.v.is_cuda else v)
    y, weights, momentum = form.compute(inputs, whole(weights, own), momentum, options)
    for part in reversed(added):
        y = part(q) + y
    return y, distances(weights, own), momentum


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
