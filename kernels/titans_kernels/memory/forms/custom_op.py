"""`chunked` and `channels` as custom operators, for torch.compile, torch.export and meta tensors.

They are opaque to the compiler, which only knows the shapes of their results. The backward is a second custom
operator that recomputes the forward from the inputs, so the forward saves only its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from titans_kernels.memory.forms import channels, chunked
from titans_kernels.memory.options import Inputs, Layers, Options, Result
from titans_kernels.memory.residual import OutputActivation, Residual

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor eta, Tensor theta, "
    "Tensor[] weights, Tensor[] momentum, Tensor[] base, Tensor[] norm, int chunk_size, str activation, "
    "float? surprise_bound, Tensor? cu_seqlens, str? output"
)
"""``base``: per layer, or empty; ``norm``: weight and bias of the LN after the last layer, or empty;
``output``: the name of an activation of the output."""


def write_and_read(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write and read every token with the custom operator."""
    given = (list(x) for x in (weights, momentum, options.base, options.norm))
    output = options.residual.name if isinstance(options.residual, OutputActivation) else None
    y, *state = memory_chunked(*inputs.to_state_dtype()[:6], *given, *options[:4], output)
    return y, tuple(state[: len(weights)]), tuple(state[len(weights) :])


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
