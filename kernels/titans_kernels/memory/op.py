"""The public operator: validates its arguments, fills in defaults and dispatches by the table `FORMS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import torch
from torch import Tensor, library

from titans_kernels import ran
from titans_kernels.memory.forms import chunked, generic, native, online, reference
from titans_kernels.memory.options import (
    Extension,
    Inputs,
    Layers,
    MemoryState,
    Options,
    Result,
    distances,
    on_gpu,
    operand_dtype,
    state_dtype,
    whole,
    without_autocast,
)
from titans_kernels.memory.residual import Residual
from titans_kernels.memory.rules import Rule, find_rule
from titans_kernels.memory.validate import (
    check_base,
    check_gates,
    check_options,
    check_residual,
    check_shapes,
)

Compute = Callable[[Inputs, Layers, Layers, Options], Result]
"""Takes inputs of any dtype; weights and momenta [N, H, D_in, D_out] have the dtype of the state. With a
base, weights are offsets from it."""


class Form(NamedTuple):
    """A form (implementation) of the operator: the calls it supports, its accuracy, when "auto" picks it."""

    name: str
    """The value of `neural_memory`'s ``backend`` that selects it; `forms_used` reports it."""
    compute: Compute
    tolerance: float
    """Relative error of reads, states and gradients to "reference"; in float64, for Triton in float32."""
    refusal: Callable[[Inputs, Layers, Options], str | None] = lambda *call: None
    """Why it does not support a call (rule, sizes, dtypes, no C++ compiler), or None if it does."""
    device: Literal["any", "cpu", "cuda"] = "any"
    """"auto" picks it only on this device."""
    traced: Compute | None = None
    """Replaces ``compute`` under torch.compile and for meta tensors, where ``compute`` cannot be traced."""


def _triton(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    # imported on first use: a CPU does not need Triton
    from titans_kernels.memory.forms.triton import op

    return op.write_and_read(inputs, weights, momentum, options)


def triton_refusal(inputs: Inputs, weights: Layers, options: Options) -> str | None:
    """Return why no Triton kernel supports a call, or None if one does."""
    from titans_kernels.memory.forms.triton.refusal import refusal

    if type(options.rule) is not Rule:
        return f"rule: no kernel computes {options.rule}; set paper, or backend: generic"
    if inputs.by_column:
        return "channel_gates: no kernel computes gates per column; set none, or backend: chunked"
    return refusal(inputs.q, weights, options)


def _traced(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """`chunked` as a custom operator (below), which torch.compile and torch.export take."""
    given = (list(x) for x in (weights, momentum, options.base, options.norm))
    y, *state = memory_chunked(*inputs.to_state_dtype()[:6], *given, *options[:4])
    return y, tuple(state[: len(weights)]), tuple(state[len(weights) :])


def _folded(compute: Compute, base: bool = True) -> Compute:
    """``compute`` of full weights, with ``x + f(x)`` and the base of a linear memory folded into the value.

    ``||k + f(k) - v||^2`` is the loss of f for the value v - k. For a linear memory with a base B,
    ``||k (W + B) - v||^2`` is the loss of W for the value v - k B; ``base=False`` leaves that to ``compute``.
    """

    def folded(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
        B, added = options.base, []
        if base and len(B) == 1 and not options.norm:
            added.append(lambda x: torch.einsum("bthd,hdf->bthf", x, B[0]))
            options = options._replace(base=())
        if options.residual is not None and not options.norm:
            added.append(lambda x: x)
            options = options._replace(residual=None)
        q, k, v = (x.to(inputs.state_dtype) for x in inputs[:3])
        for part in added:
            v = v - part(k)
        if added:  # the kernels need operands of one dtype
            inputs = inputs._replace(v=v.to(inputs.v.dtype) if on_gpu(inputs.v) else v)
        y, weights, momentum = compute(inputs, whole(weights, options.base), momentum, options)
        for part in reversed(added):
            y = part(q) + y
        return y, distances(weights, options.base), momentum

    return folded


FORMS = (
    Form("online", _folded(online.write_and_read), 1e-9, online.refusal),
    Form("triton", _folded(_triton), 5e-5, triton_refusal, "cuda"),
    Form("native", _folded(native.write_and_read, base=False), 1e-9, native.refusal, "cpu"),
    Form("chunked", _folded(chunked.write_and_read), 1e-9, chunked.refusal, traced=_folded(_traced)),
    Form("generic", generic.write_and_read, 1e-9),
    Form("reference", reference.write_and_read, 0.0, reference.refusal),
)
"""Every form, in the order in which "auto" tries them."""

BACKENDS = ("auto", *(form.name for form in reversed(FORMS)))


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
    extension: Extension | None = None,
) -> tuple[Tensor, MemoryState]:
    """Write each token into the memory and read it back (eqs. 12-16).

    Each token takes one step of gradient descent with momentum on ``||M(k_t) - v_t||^2`` (12):

        S_t = eta_t S_{t-1} - theta_t grad(M_{t'}; k_t, v_t)    (14)
        M_t = (1 - alpha_t) M_{t-1} + S_t                        (13)
        y_t = M_t(q_t)                                           (15)

    The gradient is taken at M_{t'}, the weights at the start of the token's chunk (16).

    Args:
        q: queries, [B, T, H, D].
        k: keys, [B, T, H, D].
        v: values, [B, T, H, D_v], where D_v is the output width of the last layer.
        alpha: weight decay (forgetting) in [0, 1], [B, T, H], or [B, T, H, A] with one value for each of A
            groups of adjacent columns of every layer, its outputs (eqs. 32, 33; see `forms.channels`); A must
            divide the layer's width.
        eta: momentum in [0, 1], in either shape.
        theta: step size, at least 0, in either shape; `write_budget` limits what a chunk writes in one
            direction.
        weights: L tensors [H, D_in, D_out], shared by the batch, or [B, H, D_in, D_out].
        momentum: tensors of the same shapes, or None for zeros.
        chunk_size: the paper's b; 1 is the exact online rule. Changes the result.
        activation: "silu", "gelu" or "identity", between layers.
        surprise_bound: c; each token's error signal is clipped to norm c at every layer. None for no bound. A
            signal of norm c, up to rounding, counts as within the bound, and has that gradient.
        cu_seqlens: [N + 1] int32 or int64, cumulative lengths of N documents packed into B = 1; documents may
            be empty. Each document starts from the given weights and momentum, whose batch dimension may be
            N, and the returned state has batch dimension N. If all start from the same [H, D_in, D_out], as
            in training, no state is returned (its parts are empty), which saves one state per document. The
            values are read once per tensor; on the CPU they cost no GPU synchronisation.
        backend: "auto" or the name of a form. "auto" picks "online" for a linear memory with chunk_size 1 and
            no surprise bound (rules "paper" and "gated_delta"), otherwise for the paper's rule "triton" on a
            GPU, with operands in q's dtype or autocast's; if no kernel supports the call it falls back to
            "chunked" and logs that once. On a CPU it picks "native" if there is a C++ compiler, otherwise
            "chunked". For any other rule it picks "generic".
        extension: parts beyond the paper's equations: a residual connection, with or without LN, a base that
            weights decay to, another rule. "online" and "triton" support neither LN nor gates per column,
            "native" supports LN; "auto" skips them.

    Returns:
        y [B, T, H, D_v] in q's dtype, and the state after the last token in float32 (float64 for float64
        input). Passing the state to the next call continues the sequence exactly if the call ended on a
        chunk boundary; `extend_memory` continues from any position.

    Raises:
        TypeError: an option or cu_seqlens has the wrong type; the message names it.
        ValueError: a shape, name or size is invalid; the message names it. Or ``backend`` does not support
            the call.

    Non-finite values: for finite inputs a read depends on no later token. For "reference" this
    holds for NaN and inf too. The other forms multiply by a masked matrix, and 0 * inf is NaN, so a NaN or
    inf in k, v or a gate may also reach earlier tokens of the same chunk and head ("online": of the same
    block of 32 tokens, where a finite value whose square overflows does so as well). It never reaches another
    row, document or head, or an earlier chunk. Masking before the product would cost 4 to 6% of a training
    step and 10 to 12% of a forward pass.

    Precision: a deep memory without ``surprise_bound`` can be ill-conditioned, especially with keys of norm
    above 1. Among 258 random calls with finite outputs, the worst reads in float32 were off by 2e-3 and the
    worst gradients by 1e-2 relative to float64, in every form. With ``surprise_bound=1`` the error is 5e-7;
    with `write_budget` of 2 alone it is 1e-4 (`tests/kernels/test_random_calls.py`).
    """
    documents = check_shapes(q, k, v, (alpha, eta, theta), weights, momentum, cu_seqlens)
    check_options(chunk_size, activation, surprise_bound)
    given, dtype = extension or Extension(), state_dtype(q)
    rule = find_rule(given.rule) if isinstance(given.rule, str) else given.rule
    check_gates(rule, given.gates, eta)
    inputs = Inputs.of(q, k, v, alpha, eta, theta, given.gates)
    weights = tuple(x.to(dtype) for x in weights)
    momentum = tuple(x.to(dtype) for x in momentum) if momentum else _zeros_like(weights)
    shared = None
    if all(x.ndim == 3 for x in (*weights, *momentum)):
        shared = tuple(x[None] for x in weights), tuple(x[None] for x in momentum)
    weights, momentum = _per_document(weights, documents), _per_document(momentum, documents)
    options = Options(
        chunk_size, activation, surprise_bound, cu_seqlens, rule, check_residual(given.residual, q, v),
        check_base(given.base, weights), operand_dtype(q), shared, is_delta_rule=given.is_delta_rule,
    )  # fmt: skip
    if q.is_meta and backend in BACKENDS:
        backend = "auto"  # only shapes are computed, and a form requested by name may refuse meta tensors
    form = choose(backend, inputs, weights, options)
    # the state stays float32 under autocast
    with without_autocast(q):
        y, *after = form.compute(inputs, weights, momentum, options)
    return y.to(q.dtype), MemoryState(*after) if options.final else MemoryState((), ())


def choose(backend: str, inputs: Inputs, weights: Layers, options: Options) -> Form:
    """Return the first form in `FORMS` that supports the call, among those selected by ``backend``.

    Raises:
        ValueError: ``backend`` is unknown, or none of its forms supports the call.
    """
    if backend == "autograd":
        raise ValueError("backend: 'autograd' is now called 'generic'")
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    traced = torch.compiler.is_compiling() or inputs.q.is_meta
    if backend == "native" and torch.compiler.is_compiling():
        backend = "chunked"  # torch.compile cannot trace C++
    reason, slower, here_on_gpu = None, "", on_gpu(inputs.q) or options.arch is not None
    for form in FORMS:
        if backend == "auto":
            here = {"any": True, "cpu": not traced, "cuda": here_on_gpu}
            if not here[form.device]:
                continue
        elif backend != form.name:
            continue
        reason = form.refusal(inputs, weights, options)
        if reason is None:
            if options.arch is None and not inputs.q.is_meta:
                ran.select("neural_memory", form.name, slower)
            return form._replace(compute=form.traced) if traced and form.traced else form
        if form.name == "triton" and type(options.rule) is Rule:
            slower = reason
    raise ValueError(f"backend: {backend} does not support this call: {reason}; use backend='auto'")


def read_memory(
    q: Tensor, weights: tuple[Tensor, ...], *, activation: str = "silu", extension: Extension | None = None
) -> Tensor:
    """Read M(q) without writing (eq. 15).

    Args:
        q: queries, [B, T, H, D].
        weights: L tensors [B, H, D_in, D_out] or [H, D_in, D_out].
        activation: as in `neural_memory`.
        extension: as in `neural_memory`; with a base, ``weights`` are the offsets from it.

    Returns:
        y [B, T, H, D_v] in q's dtype.

    Raises:
        ValueError: the activation is unknown; base or residual do not match ``weights`` and ``q``.
    """
    check_options(1, activation, None)
    dtype, given = state_dtype(q), extension or Extension()
    layers = tuple(W.to(dtype) for W in weights)
    layers = whole(layers, check_base(given.base, layers))
    options = Options(1, activation, None, None, residual=check_residual(given.residual, q, q))
    with without_autocast(q):
        y = reference.apply_memory(layers, q.to(dtype).transpose(1, 2), options)
    return y.transpose(1, 2).to(q.dtype)


def _per_document(layers: Layers, documents: int) -> Layers:
    return tuple(x if x.ndim == 4 else x.expand(documents, *x.shape) for x in layers)


def _zeros_like(layers: Layers) -> Layers:
    return tuple(torch.zeros_like(x) for x in layers)


# `chunked` as custom operators, for torch.compile, torch.export and meta tensors. They are
# opaque to the compiler, which only knows the shapes of their results. The backward is a second custom
# operator that recomputes the forward from the inputs, so the forward saves only its arguments.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor eta, Tensor theta, "
    "Tensor[] weights, Tensor[] momentum, Tensor[] base, Tensor[] norm, int chunk_size, str activation, "
    "float? surprise_bound, Tensor? cu_seqlens"
)
"""``base``: per layer, or empty; ``norm``: weight and bias of the LN after the last layer, or empty."""


@library.custom_op("titans::memory_chunked", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]")
def memory_chunked(q, k, v, alpha, eta, theta, weights, momentum, base, norm, *options):
    """y, weights and momenta after the last token, in one list; all of one dtype."""
    inputs, options = Inputs.of(q, k, v, alpha, eta, theta), _options(base, norm, options)
    ran.note("neural_memory", "chunked")
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        y, *state = chunked.write_and_read(inputs, tuple(weights), tuple(momentum), options)
    return _fresh([y, *(x for part in state for x in part)])


@library.custom_op(
    "titans::memory_chunked_backward",
    mutates_args=(),
    schema=f"(Tensor[] doutputs, {_ARGUMENTS}) -> Tensor[]",
)
def memory_chunked_backward(doutputs, q, k, v, alpha, eta, theta, weights, momentum, base, norm, *options):
    """Return gradients of the six inputs, weights, momenta, base and LN, in one list, from the results'
    gradients.
    """
    inputs, options = Inputs.of(q, k, v, alpha, eta, theta), _options(base, norm, options)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        grads = chunked.gradients(inputs, tuple(weights), tuple(momentum), options, doutputs)
    return _fresh(grads)


@memory_chunked.register_fake
def _(q, k, v, alpha, eta, theta, weights, momentum, base, norm, *options):
    y = v.new_empty(v.shape)
    return [y, *(x.new_empty(x.shape) for x in (*weights, *momentum))]


@memory_chunked_backward.register_fake
def _(doutputs, q, k, v, alpha, eta, theta, weights, momentum, base, norm, *options):
    given = q, k, v, alpha, eta, theta, *weights, *momentum, *base, *norm
    return [x.new_empty(x.shape) for x in given]


def _setup(ctx, inputs, output) -> None:
    *tokens, weights, momentum, base, norm, chunk_size, activation, bound, cu_seqlens = inputs
    ctx.save_for_backward(*tokens, *weights, *momentum, *base, *norm, cu_seqlens)
    ctx.rule = chunk_size, activation, bound
    ctx.sizes = [6, *map(len, (weights, momentum, base, norm))]


def _backward(ctx, doutputs):
    *tensors, cu_seqlens = ctx.saved_tensors
    tokens, weights, momentum, *fixed = _parted(tensors, ctx.sizes)
    results = [tokens[2], *weights, *momentum]  # of the same shapes
    given = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(results, doutputs, strict=True)]
    grads = memory_chunked_backward(given, *tokens, weights, momentum, *fixed, *ctx.rule, cu_seqlens)
    of_tokens, *of_layers = _parted(grads, ctx.sizes)
    return *of_tokens, *of_layers, None, None, None, None


def _parted(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Split a list into lists of ``sizes``."""
    rest = iter(tensors)
    return [list(islice(rest, n)) for n in sizes]


memory_chunked.register_autograd(_backward, setup_context=_setup)


def _options(base: list[Tensor], norm: list[Tensor], options: Sequence) -> Options:
    return Options(*options, residual=Residual(*norm) if norm else None, base=tuple(base))


def _fresh(results: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors, as the fake form declares, none of them a view of another."""
    return [x.clone(memory_format=torch.contiguous_format) if _is_view(x) else x for x in results]


def _is_view(x: Tensor) -> bool:
    return not x.is_contiguous() or x.untyped_storage().nbytes() != x.nbytes
