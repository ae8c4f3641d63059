"""`chunked` as operators of torch's library, for torch.compile, torch.export and meta tensors.

They are opaque to the compiler, which knows of them only the shapes of their results. The backward is an
operator of its own that does the forward anew from the inputs, so the forward keeps nothing but
its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titans_kernels.memory import chunked
from titans_kernels.memory.options import Inputs, Layers, Options, Result

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor eta, Tensor theta, "
    "Tensor[] weights, Tensor[] momentum, int chunk_size, str activation, float? surprise_bound, "
    "Tensor? cu_seqlens"
)


def forget_and_learn(inputs: Inputs, weights: Layers, momentum: Layers, options: Options) -> Result:
    """Write and read every token: `chunked.forget_and_learn` as an operator."""
    y, *state = memory_chunked(*inputs.to_state_dtype(), list(weights), list(momentum), *options[:4])
    return y, tuple(state[: len(weights)]), tuple(state[len(weights) :])


@torch.library.custom_op("titans::memory_chunked", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]")
def memory_chunked(q, k, v, alpha, eta, theta, weights, momentum, *options):
    """y, weights and momenta after the last token, in one list; all of one dtype."""
    inputs, options = Inputs(q, k, v, alpha, eta, theta), Options(*options)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        y, *state = chunked.forget_and_learn(inputs, tuple(weights), tuple(momentum), options)
    return _fresh([y, *(x for part in state for x in part)])


@torch.library.custom_op(
    "titans::memory_chunked_backward",
    mutates_args=(),
    schema=f"(Tensor[] doutputs, {_ARGUMENTS}) -> Tensor[]",
)
def memory_chunked_backward(doutputs, q, k, v, alpha, eta, theta, weights, momentum, *options):
    """Gradients of the six inputs, the weights and the momenta, in one list, from those of the results."""
    inputs, options = Inputs(q, k, v, alpha, eta, theta), Options(*options)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        grads = chunked.gradients(inputs, tuple(weights), tuple(momentum), options, doutputs)
    return _fresh(grads)


@memory_chunked.register_fake
def _(q, k, v, alpha, eta, theta, weights, momentum, *options):
    y = v.new_empty(v.shape)
    return [y, *(x.new_empty(x.shape) for x in (*weights, *momentum))]


@memory_chunked_backward.register_fake
def _(doutputs, q, k, v, alpha, eta, theta, weights, momentum, *options):
    return [x.new_empty(x.shape) for x in (q, k, v, alpha, eta, theta, *weights, *momentum)]


def _setup(ctx, inputs, output) -> None:
    *tokens, weights, momentum, chunk_size, activation, bound, cu_seqlens = inputs
    ctx.save_for_backward(*tokens, *weights, *momentum, cu_seqlens)
    ctx.rule, ctx.depth = (chunk_size, activation, bound), len(weights)


def _backward(ctx, doutputs):
    *tensors, cu_seqlens = ctx.saved_tensors
    depth = ctx.depth
    weights, momentum = tensors[6 : 6 + depth], tensors[6 + depth :]
    results = [tensors[2], *weights, *momentum]  # of the same shapes
    given = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(results, doutputs, strict=True)]
    grads = memory_chunked_backward(given, *tensors[:6], weights, momentum, *ctx.rule, cu_seqlens)
    state = grads[6:]
    return *grads[:6], state[:depth], state[depth:], None, None, None, None


memory_chunked.register_autograd(_backward, setup_context=_setup)


def _fresh(results: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors, as the fake form declares, none of them a view of another."""
    return [x.clone(memory_format=torch.contiguous_format) if _is_view(x) else x for x in results]


def _is_view(x: Tensor) -> bool:
    return not x.is_contiguous() or x.untyped_storage().nbytes() != x.nbytes
