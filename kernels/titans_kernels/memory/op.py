"""The public operator: validates its arguments, fills in defaults and dispatches by the table `FORMS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from titans_kernels import ran
from titans_kernels.memory import budget
from titans_kernels.memory.activations import ACTIVATIONS
from titans_kernels.memory.forms import (
    autograd,
    channels,
    chunked,
    factored,
    native,
    online,
    reference,
)
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
from titans_kernels.memory.residual import Output, OutputActivation, Residual
from titans_kernels.memory.rules import PAPER, Rule, find_rule
from titans_kernels.memory.rules.delta_ttt import DeltaTTT
from titans_kernels.memory.rules.gated_delta import GatedDelta
from titans_kernels.memory.rules.momentum_delta import MomentumDelta
from titans_kernels.memory.validate import (
    check_base,
    check_options,
    check_residual,
    check_rule,
    check_shapes,
)


def _triton(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    # imported on first use: a CPU does not need Triton
    from titans_kernels.memory.forms.triton import op

    return op.write_and_read(inputs, weights, momentum, options)


def _triton_limits(inputs: Inputs, weights: Layers, options: Options) -> str | None:
    from titans_kernels.memory.forms.triton.refusal import refusal

    return refusal(*inputs[:3], weights, options.chunk_size, options.operands)


def _traced(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """`chunked` or `channels` as a custom operator (below), which torch.compile and torch.export take."""
    given = (list(x) for x in (weights, momentum, options.base, options.norm))
    output = options.residual.name if isinstance(options.residual, OutputActivation) else None
    y, *state = memory_chunked(*inputs.to_state_dtype()[:6], *given, *options[:4], output)
    return y, tuple(state[: len(weights)]), tuple(state[len(weights) :])


class Form(NamedTuple):
    """A form (implementation) of the operator: the calls it supports, its accuracy, when "auto" picks it."""

    name: str
    """What `forms_used` reports."""
    backend: str
    """The value of `neural_memory`'s ``backend`` that selects it."""
    compute: Callable[[Inputs, Layers, Layers, Options], Result]
    """Takes inputs of any dtype; weights and momenta [N, H, D_in, D_out] have the dtype of the state."""
    tolerance: float
    """Relative error of reads, states and gradients to "reference"; in float64, for Triton in float32."""
    device: Literal["any", "cpu", "cuda"] = "any"
    """"auto" picks it only on this device."""
    rules: tuple[type[Rule], ...] | None = (Rule,)
    """Supported rules; None for any. `Rule` itself is the paper's."""
    linear: bool = False
    """Whether the rule must be linear (`Rule.linear`), or but for a step of its own (`Rule.stepped`)."""
    windows: bool = False
    """Whether the rule may have a `Rule.window`."""
    alpha: Literal["head", "column", "any"] = "head"
    """Supported alpha: one per head, one per group of columns, or either."""
    norm: bool = False
    """Whether it supports LN inside the memory (`Residual.norm`) and an activation of its output."""
    any_loss: bool = False
    """Whether the loss may depend on more than prediction - value. If not, ``x + f(x)`` and the base of a
    linear memory are folded into the value."""
    linear_base: bool = False
    """Whether it applies the base of a linear memory itself, faster than folding it into the value."""
    depth: int | None = None
    """Maximum number of layers; None for any."""
    chunk_size: int | None = None
    """The only supported chunk size; None for any."""
    surprise_bound: bool = True
    """Whether it supports a surprise bound."""
    layerwise: bool = False
    """Whether it supports rules with a loss for each layer."""
    gated: bool = False
    """Whether it supports a gated activation between layers."""
    steps_by_matrix: bool = False
    """Whether it supports a theta for each matrix."""
    traced: Callable[[Inputs, Layers, Layers, Options], Result] | None = None
    """Replaces ``compute`` under torch.compile and for meta tensors, where ``compute`` cannot be traced."""
    limits: Callable[[Inputs, Layers, Options], str | None] = lambda *call: None
    """Any other reason why a call is not supported (sizes, dtypes, no C++ compiler), or None."""

    def refusal(self, inputs: Inputs, weights: Layers, options: Options) -> str | None:
        """Why this form does not support a call, or None if it does."""
        layers, by_column = len(weights), inputs.forgets_by_column
        if (
            (self.rules is not None and type(options.rule) not in self.rules)
            or (self.linear and not (options.rule.linear or options.rule.stepped))
            or (options.rule.layerwise and not self.layerwise)
        ):
            return f"it does not support the rule {options.rule}"
        if options.rule.window and not self.windows:
            return "it does not write a token together with earlier ones"
        if options.curved and not self.norm:
            what = "LN inside the memory" if options.norm else "an activation of the memory's output"
            return f"it does not support {what}"
        if self.alpha == ("head" if by_column else "column"):
            return f"it does not support alpha per {'column' if by_column else 'head'}"
        if inputs.steps_by_matrix and not self.steps_by_matrix:
            return "it does not support theta per matrix"
        if self.depth is not None and layers > self.depth:
            return f"it supports {self.depth} layer, not {layers}"
        if self.chunk_size not in (None, options.chunk_size):
            return f"it supports chunk_size {self.chunk_size}, not {options.chunk_size}"
        if layers > 1 and ACTIVATIONS[options.activation].gated and not self.gated:
            return f"it does not support the activation {options.activation}"
        if options.surprise_bound is not None and not self.surprise_bound:
            return "it does not support surprise_bound"
        return self.limits(inputs, weights, options)


FORMS = (
    Form("layerwise", "online", online.layerwise, 1e-9, rules=(DeltaTTT,), layerwise=True, linear_base=True,
         chunk_size=1, surprise_bound=False),
    Form("online", "online", online.write_and_read, 1e-9, rules=(Rule, GatedDelta, MomentumDelta), depth=1,
         chunk_size=1, surprise_bound=False),
    Form("triton", "triton", _triton, 5e-5, device="cuda", limits=_triton_limits),
    Form("native", "native", native.write_and_read, 1e-9, device="cpu", rules=native.LOSSES, norm=True,
         linear_base=True, limits=native.refusal),
    Form("chunked", "chunked", chunked.write_and_read, 1e-9, norm=True, traced=_traced),
    Form("channels", "chunked", channels.write_and_read, 1e-9, alpha="column", norm=True,
         traced=_traced),
    Form("factored", "chunked", factored.write_and_read, 1e-9, rules=None, linear=True, norm=True,
         any_loss=True, windows=True, gated=True, steps_by_matrix=True, traced=autograd.write_and_read),
    Form("autograd", "autograd", autograd.write_and_read, 1e-9, rules=None, alpha="any", norm=True,
         any_loss=True, gated=True, steps_by_matrix=True),
    Form("reference", "reference", reference.write_and_read, 0.0, rules=None, alpha="any", norm=True,
         any_loss=True, layerwise=True, windows=True, gated=True, steps_by_matrix=True),
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
    extra: Tensor | None = None,
    chunk_size: int = 64,
    activation: str = "silu",
    surprise_bound: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    rule: Rule | str = PAPER,
    residual: Output | None = None,
    base: tuple[Tensor, ...] | None = None,
    write_budget: float | None = None,
    keep_bytes: int | None = None,
    output_final_state: bool = True,
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
            groups of adjacent columns of every layer; A must divide the layer's width (see `channels`).
        eta: momentum in [0, 1], [B, T, H].
        theta: step size, at least 0, [B, T, H], or [B, T, H, M] with one for each matrix of the memory, in
            the order of ``weights``; a hidden layer under a gated activation has two.
        weights: L tensors [H, D_in, D_out], shared by the batch, or [B, H, D_in, D_out].
        momentum: tensors of the same shapes, or None for zeros.
        extra: the rule's own gates in [0, 1], [B, T, H, E] with E = `Rule.extra_gates`; None if it has none.
        chunk_size: the paper's b; 1 is the exact online rule. Changes the result.
        activation: "silu", "gelu" or "identity", between layers; or "swiglu" or "geglu", under which every
            layer but the last is two matrices side by side, [W, V] with ``silu(x W) * (x V)`` as its output,
            and 2 F wide for the F inputs of the next. "factored" and "autograd" support these two.
        surprise_bound: c; each token's error signal is clipped to norm c at every layer. None for no bound.
        cu_seqlens: [N + 1] int32 or int64, cumulative lengths of N documents packed into B = 1; documents may
            be empty. Each document starts from the given weights and momentum, whose batch dimension may be
            N, and the returned state has batch dimension N. The values are read once per tensor; on the CPU
            they cost no GPU synchronisation.
        backend: "auto", "reference", "autograd", "chunked", "native", "online" or "triton". "auto" picks
            "online" with chunk_size 1 and no surprise bound for a linear memory (rules "paper",
            "gated_delta" and "mdn") and for "delta_ttt", otherwise "triton" on a GPU, with operands in q's
            dtype or autocast's; if no kernel supports the call it falls back to "chunked" and logs that once.
            On a CPU "auto" picks "native" if there is a C++ compiler, otherwise "chunked". For any other rule
            it picks "chunked", otherwise "autograd".
        rule: the update rule, a `Rule` or a name known to `find_rule`; the equations above are the default,
            "paper". "reference" supports any rule, "autograd" any but "delta_ttt".
        residual: None for the paper's memory, a residual connection around it, with or without LN, or an
            `OutputActivation`. "online" and "triton" support neither of the last two nor alpha per column;
            "native" does not support the latter. "auto" skips them.
        base: per layer B [H, D_in, D_out], shared by the batch: the weights decay towards B instead of zero,
            ``W_t = B + (1 - alpha_t) (W_{t-1} - B) + S_t``. ``weights`` and the returned weights are then the
            offsets W - B, so a memory that starts at its base has zero weights.
        write_budget: maximum number of full steps written along any direction of key space within a chunk
            (see `budget`), so that repeated tokens cannot make the memory diverge. None for the paper's rule.
        keep_bytes: memory, in bytes, that the Triton kernels may save for the backward pass; a call that
            needs more recomputes in the backward pass, with the same result. None for 1/64 of the GPU's
            memory. Other backends ignore it.
        output_final_state: if False, the returned state is empty, which saves one state per document when
            training on packed documents.

    Returns:
        y [B, T, H, D_v] in q's dtype, and the state after the last token in float32 (float64 for float64
        input). Passing the state to the next call continues the sequence exactly if the call ended on a
        chunk boundary; `extend_memory` continues from any position.

    Raises:
        TypeError: an option or cu_seqlens has the wrong type; the message names it.
        ValueError: a shape, name or size is invalid; the message names it. Or ``backend`` does not support
            the call.

    Non-finite values: for finite inputs a read depends on no later token. For "reference" and "autograd" this
    holds for NaN and inf too. The other forms multiply by a masked matrix, and 0 * inf is NaN, so a NaN or
    inf in k, v or a gate may also reach earlier tokens of the same chunk and head ("online": of the same
    block of 32 tokens, where a finite value whose square overflows does so as well). It never reaches another
    row, document or head, or an earlier chunk. Masking before the product would cost 4 to 6% of a training
    step and 10 to 12% of a forward pass.

    Precision: a deep memory without ``surprise_bound`` can be ill-conditioned, especially with keys of norm
    above 1. Among 258 random calls with finite outputs, the worst reads in float32 were off by 2e-3 and the
    worst gradients by 1e-2 relative to float64, in every form. With ``surprise_bound=1`` the error is 5e-7;
    with ``write_budget=2`` alone it is 1e-4 (`tests/kernels/test_random_calls.py`).
    """
    documents = check_shapes(q, k, v, (alpha, eta, theta), weights, momentum, cu_seqlens, activation)
    check_options(chunk_size, activation, surprise_bound, write_budget)
    if len(weights) == 1 and ACTIVATIONS[activation].gated:  # there is nothing between layers
        activation = "identity"
    rule = find_rule(rule) if isinstance(rule, str) else rule
    check_rule(rule, extra, eta, theta, chunk_size, weights, residual, write_budget)
    dtype = state_dtype(q)
    inputs = Inputs.of(q, k, v, alpha, eta, theta, extra)
    weights = tuple(x.to(dtype) for x in weights)
    momentum = tuple(x.to(dtype) for x in momentum) if momentum else _zeros_like(weights)
    shared = None
    if all(x.ndim == 3 for x in (*weights, *momentum)):
        shared = tuple(x[None] for x in weights), tuple(x[None] for x in momentum)
    weights, momentum = _per_document(weights, documents), _per_document(momentum, documents)
    residual, own = check_residual(residual, q, v), check_base(base, weights)
    options = Options(
        chunk_size, activation, surprise_bound, cu_seqlens, rule, keep_bytes, output_final_state, shared,
        residual, own, operand_dtype(q),
    )  # fmt: skip
    inputs = with_targets(inputs, options)
    form = choose(backend, inputs, weights, options)
    if write_budget:
        limit = reference.write_budget if form.name == "reference" else budget.write_budget
        inputs = inputs._replace(theta=limit(k, eta, theta, chunk_size, cu_seqlens, budget=write_budget))
    if not torch.compiler.is_compiling():
        ran.note("neural_memory", form.name, q)
    # the state stays float32 under autocast
    with without_autocast(q):
        y, weights, momentum = _compute(form, inputs, weights, momentum, options)
    return y.to(q.dtype), MemoryState(weights, momentum) if output_final_state else MemoryState((), ())


def with_targets(inputs: Inputs, options: Options) -> Inputs:
    """The inputs [B, T, H, ...] with the rule's targets in place of the values."""
    if type(options.rule).target is Rule.target:
        return inputs
    k, v = (x.to(inputs.state_dtype).transpose(1, 2) for x in (inputs.k, inputs.v))
    with without_autocast(v):
        return inputs._replace(v=options.rule.target(k, v, options.residual).transpose(1, 2))


def choose(backend: str, inputs: Inputs, weights: Layers, options: Options) -> Form:
    """The first form in `FORMS` that supports the call, among those selected by ``backend``.

    Raises:
        ValueError: ``backend`` is unknown, or none of its forms supports the call.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    # C++ cannot be traced by torch.compile or run on meta tensors
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
                ran.warn_once("neural_memory", "chunked in place of triton", slower)
            replaced = traced and form.traced and not options.rule.window
            return form._replace(compute=form.traced) if replaced else form
        if form.name == "triton" and type(options.rule) is Rule:
            slower = reason
    raise ValueError(f"backend: {backend} does not support this call: {reason}; use backend='auto'")


def _compute(form: Form, inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Run a form; residual and base are applied around it unless the form does so itself.

    ``||k + f(k) - v||^2`` is the loss of f for the value v - k. For a linear memory with a base B,
    ``||k (W + B) - v||^2`` is the loss of W for the value v - k B.
    """
    base, added = options.base, []
    if not form.any_loss and not options.curved:
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
        # the kernels need operands of one dtype
        inputs = inputs._replace(v=v.to(inputs.v.dtype) if inputs.v.is_cuda else v)
    y, weights, momentum = form.compute(inputs, whole(weights, own), momentum, options)
    for part in reversed(added):
        y = part(q) + y
    return y, distances(weights, own), momentum


def read_memory(
    q: Tensor, weights: tuple[Tensor, ...], *, activation: str = "silu", residual: Output | None = None,
    base: tuple[Tensor, ...] | None = None,
) -> Tensor:  # fmt: skip
    """Read M(q) without writing (eq. 15).

    Args:
        q: queries, [B, T, H, D].
        weights: L tensors [B, H, D_in, D_out] or [H, D_in, D_out].
        activation: as in `neural_memory`.
        residual: as in `neural_memory`.
        base: per layer [H, D_in, D_out]; ``weights`` are then the offsets from it, as in `neural_memory`.

    Returns:
        y [B, T, H, D_v] in q's dtype.

    Raises:
        ValueError: ``base`` does not match ``weights``.
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


# `chunked` and `channels` as custom operators, for torch.compile, torch.export and meta tensors. They are
# opaque to the compiler, which only knows the shapes of their results. The backward is a second custom
# operator that recomputes the forward from the inputs, so the forward saves only its arguments.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor eta, Tensor theta, "
    "Tensor[] weights, Tensor[] momentum, Tensor[] base, Tensor[] norm, int chunk_size, str activation, "
    "float? surprise_bound, Tensor? cu_seqlens, str? output"
)
"""``base``: per layer, or empty; ``norm``: weight and bias of the LN after the last layer, or empty;
``output``: the name of an activation of the output."""


@torch.library.custom_op("titans::memory_chunked", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]")
def memory_chunked(q, k, v, alpha, eta, theta, weights, momentum, base, norm, *options):
    """y, weights and momenta after the last token, in one list; all of one dtype."""
    inputs, options = Inputs.of(q, k, v, alpha, eta, theta), _options(base, norm, options)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        form = channels if inputs.forgets_by_column else chunked
        y, *state = form.write_and_read(inputs, tuple(weights), tuple(momentum), options)
    return _fresh([y, *(x for part in state for x in part)])


@torch.library.custom_op(
    "titans::memory_chunked_backward",
    mutates_args=(),
    schema=f"(Tensor[] doutputs, {_ARGUMENTS}) -> Tensor[]",
)
def memory_chunked_backward(doutputs, q, k, v, alpha, eta, theta, weights, momentum, base, norm, *options):
    """Gradients of the six inputs, weights, momenta, base and LN, in one list, from those of the results."""
    inputs, options = Inputs.of(q, k, v, alpha, eta, theta), _options(base, norm, options)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        form = channels if inputs.forgets_by_column else chunked
        grads = form.gradients(inputs, tuple(weights), tuple(momentum), options, doutputs)
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
    *tokens, weights, momentum, base, norm, chunk_size, activation, bound, cu_seqlens, output = inputs
    ctx.save_for_backward(*tokens, *weights, *momentum, *base, *norm, cu_seqlens)
    ctx.rule, ctx.output = (chunk_size, activation, bound), output
    ctx.sizes = [6, *map(len, (weights, momentum, base, norm))]


def _backward(ctx, doutputs):
    *tensors, cu_seqlens = ctx.saved_tensors
    tokens, weights, momentum, *fixed = _parted(tensors, ctx.sizes)
    results = [tokens[2], *weights, *momentum]  # of the same shapes
    given = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(results, doutputs, strict=True)]
    grads = memory_chunked_backward(
        given, *tokens, weights, momentum, *fixed, *ctx.rule, cu_seqlens, ctx.output
    )
    of_tokens, *of_layers = _parted(grads, ctx.sizes)
    return *of_tokens, *of_layers, None, None, None, None, None


def _parted(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[list[Tensor]]:
    """Split a list into lists of ``sizes``."""
    rest = iter(tensors)
    return [list(islice(rest, n)) for n in sizes]


memory_chunked.register_autograd(_backward, setup_context=_setup)


def _options(base: list[Tensor], norm: list[Tensor], options: Sequence) -> Options:
    *options, output = options
    residual = Residual(*norm) if norm else output and OutputActivation(output)
    return Options(*options, residual=residual, base=tuple(base))


def _fresh(results: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors, as the fake form declares, none of them a view of another."""
    return [x.clone(memory_format=torch.contiguous_format) if _is_view(x) else x for x in results]


def _is_view(x: Tensor) -> bool:
    return not x.is_contiguous() or x.untyped_storage().nbytes() != x.nbytes
